"""The optimizer lives on the server. It is built from a name and numbers, never from a pickle.

`OptimizerSpec` describes a `torch.optim` optimizer: its class by name, from an allow-list (`kinds.py`), the
hyper-parameters of each group, and what the servers do besides (`Extras`). `SliceOptimizer` steps one slice with it:
torch's own code on views of the slice, so BSP equals single-process training to the last rounding. Elementwise
optimizers take slices that begin and end anywhere within a tensor; the others take whole tensors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from msgspec import Struct
from torch import Tensor

from paceline.core import spec
from paceline.errors import ConfigError
from paceline.tensors import kinds, schedules
from paceline.tensors.kinds import KINDS
from paceline.tensors.layout import Layout, Part, layout_of
from paceline.tensors.steppers import (
    SCALARS,
    AveragingStepper,
    Hyper,
    Pace,
    SGDStepper,
    State,
    Stepper,
    TorchStepper,
    Value,
)

HOW_NOT_WHAT = ("params", "foreach", "fused", "capturable", "differentiable", "param_names")
"""Group entries that choose an implementation, not a result; the server chooses its own."""

PIECE = 1 << 18
"""Elements of a piece at most: a megabyte in float32. Smaller ones fit the caches better, but then calling torch costs
more than that saves."""

WORTH_A_THREAD = 1 << 18
"""Elements of a slice for each thread at least: waking one takes as long as it takes to step so many."""

MOST_THREADS = 8
"""More would wait for each other: Python lets one at a time begin with its next piece."""

THERE = "there"
"""In a state: whether a piece has any yet."""
AVERAGE = "average"
"""In a state: the moving average of the parameters."""
SAMPLES = "samples"
"""In a state: how many samples a schedule has counted."""


class Extras(Struct, frozen=True, omit_defaults=True):
    """What happens around the optimizer, of whatever kind it is."""

    clip: float | None = None
    """Each worker scales its gradient down to this norm, before it is sliced."""
    ema: float | None = None
    """The servers keep a moving average of the parameters with this decay; it is saved beside the model."""
    stretch: bool = False
    """A step of weight w (1/N, when one gradient of N is applied on arrival) decays betas, momentum and the moving
    average by their power w, so that they reach as far back, in samples, as under BSP."""
    schedule: str | None = None
    """A learning-rate schedule that counts samples, as text."""
    batch: int = 0
    """How many samples a gradient stands for, if there is a schedule."""

    def check(self) -> None:
        for name, value, low, high, words in (
            ("clip", self.clip, 0.0, math.inf, "more than 0"),
            ("ema", self.ema, 0.0, 1.0, "more than 0 and less than 1"),
            ("batch", self.batch, -1, math.inf, "0 or more"),
        ):
            if value is not None and not low < value < high:
                raise ConfigError(f"{name}={value:g} is out of range: {words}")
        if self.schedule is not None:
            schedules.parse(self.schedule)

    def pace(self) -> Pace:
        schedule = schedules.parse(self.schedule) if self.schedule is not None else None
        return Pace(schedule, self.batch, self.stretch)


EXTRAS = Extras.__struct_fields__


class OptimizerSpec(Struct, frozen=True):
    """A torch optimizer without its tensors: a name of the allow-list and each group's hyper-parameters."""

    name: str
    groups: tuple[Hyper, ...]
    extras: Extras = Extras()

    @property
    def borders(self) -> str:
        """Where slices may begin and end, for `Layout.borders`."""
        return "tensors" if KINDS[self.name].whole else "anywhere"

    def build(self, tensors: Sequence[Sequence[Tensor]]) -> torch.optim.Optimizer:
        """The optimizer over `tensors`, one sequence for each group."""
        groups = [{"params": list(group), **hyper} for group, hyper in zip(tensors, self.groups, strict=True)]
        return KINDS[self.name].cls(groups)  # type: ignore[call-arg]

    def check(self, layout: Layout) -> None:
        """Refuse, in one line, a model that this kind cannot train, or extras that do not fit it."""
        self.extras.check()
        kind = KINDS[self.name]
        odd = next((entry for entry in layout.entries if len(entry.shape) != 2), None)
        if kind.matrices and odd is not None:
            raise ConfigError(f"{self.name} steps matrices only, and {odd.name} has the shape {list(odd.shape)}")
        if not self.extras.stretch:
            return
        if not kind.stretched:
            able = ", ".join(name for name, each in KINDS.items() if each.stretched)
            raise ConfigError(f"{self.name} has no decay that stretch=true could change (can: {able})")
        if self.name == "rmsprop" and any(group.get("momentum") for group in self.groups):
            raise ConfigError("rmsprop with momentum cannot have stretch=true: its momentum has no share to scale")


def describe(optimizer: torch.optim.Optimizer, extras: Extras | None = None) -> OptimizerSpec:
    """The spec of a user's optimizer, or a clear refusal."""
    name = kinds.name_of(optimizer)
    return OptimizerSpec(name, tuple(hyper_of(group) for group in optimizer.param_groups), extras or Extras())


def hyper_of(group: Mapping[str, Any]) -> Hyper:
    """The hyper-parameters of one group, as plain numbers."""
    hyper: Hyper = {}
    for key, value in group.items():
        if key in HOW_NOT_WHAT or key == "initial_lr":
            continue
        if isinstance(value, Tensor):
            value = value.item()
        if isinstance(value, tuple | list):
            hyper[key] = tuple(None if item is None else float(item) for item in value)
        elif value is None or isinstance(value, bool | int | float | str):
            hyper[key] = value
    return hyper


def parse(text: str) -> OptimizerSpec:
    """'sgd:lr=0.1,momentum=0.9' -> a spec with one group holding every hyper-parameter, defaults included.

    The keys of `Extras` may stand among the hyper-parameters: 'adam:lr=0.001,clip=1,schedule=cosine(samples=60000)'.
    """
    if not isinstance(text, str):
        raise ConfigError(f"an optimizer is a text like 'sgd:lr=0.1', got {text!r}")
    name, arguments = spec.split(text)
    kind = kinds.named(name)
    extras = read_extras({key: arguments.pop(key) for key in EXTRAS if key in arguments}, name)
    hyper = {key: _read(value, f"{name}:{key}") for key, value in arguments.items()}
    try:
        # As defaults, not as a group: torch checks only those.
        make: Callable[..., torch.optim.Optimizer] = kind.cls
        described = describe(make([torch.zeros(1, 1)], **hyper), extras)
        if any(isinstance(value, float) and not math.isfinite(value) for value in described.groups[0].values()):
            raise ValueError("numbers must be finite")
    except (ValueError, TypeError) as error:
        reason = str(error).removeprefix(f"{kind.cls.__name__}.__init__() ")
        raise ConfigError(f"optimizer {text!r}: {reason}") from None
    try:
        take_a_step(described)
    except ConfigError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"optimizer {text!r}: a step with it fails: {type(error).__name__}: {said}") from None
    return described


def take_a_step(described: OptimizerSpec) -> None:
    """One step on a small matrix, as a server would: torch checks some numbers only when they are used."""
    matrix = torch.ones(2, 2)
    layout = layout_of([("matrix", matrix, 0)], described.borders)
    described.check(layout)
    whole = SliceOptimizer(layout, slice(0, matrix.numel()), matrix.flatten(), described)
    whole.pace.advance(1)
    for stepper in whole.steppers:
        stepper.step(torch.ones(matrix.numel()), 0.5)


def read_extras(arguments: Mapping[str, str], label: str) -> Extras:
    """Extras from texts, checked."""
    values: dict[str, Any] = {}
    for key, text in arguments.items():
        if key not in EXTRAS:
            raise ConfigError(f"{label} has no option {key!r} (it has: {', '.join(EXTRAS)})")
        value = text if key == "schedule" else _read(text, f"{label}:{key}")
        wanted: Any = {"schedule": str, "stretch": bool, "batch": int}.get(key, int | float)
        if not isinstance(value, wanted) or (isinstance(value, bool) and key != "stretch"):
            noun = {"stretch": "true or false", "batch": "a whole number"}.get(key, "a number")
            raise ConfigError(f"{label}:{key}={text} must be {noun}")
        values[key] = value
    extras = Extras(**values)
    extras.check()
    return extras


def _read(text: str, label: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    if text == "none":
        return None
    if label.endswith("_fn"):
        return text
    try:
        numbers = tuple(_number(part) for part in text.split(":"))
    except ValueError:
        raise ConfigError(f"{label}={text} is not a number (nor true, false, none, or a:b for a pair)") from None
    return numbers if len(numbers) > 1 else numbers[0]


def _number(text: str) -> float | int | None:
    if text == "none":
        return None
    return int(text) if text.removeprefix("-").isdigit() else float(text)


class Threads(NamedTuple):
    """How many threads step a slice at once."""

    mean: int
    """On the mean of several gradients: those who sent them wait for it, so their cores are free."""
    single: int
    """On one gradient after another: others compute."""

    @classmethod
    def of(cls, servers: int, workers: int) -> Threads:
        """For each of so many servers, beside so many workers."""
        cores = len(os.sched_getaffinity(0))
        return cls(cores // servers, cores // (servers + workers))

    def for_elements(self, elements: int) -> Threads:
        """No more than such a slice is worth."""
        most = min(MOST_THREADS, elements // WORTH_A_THREAD)
        return Threads(*(max(1, min(wanted, most)) for wanted in self))


ONE_THREAD = Threads(1, 1)


class SliceOptimizer:
    """One shard's slice of the parameters, and the optimizer that steps it.

    It goes over the slice piece by piece, so that taking the mean of several gradients and stepping are one pass
    through memory. A gradient is handed in cut into the same pieces (`cut`).
    """

    def __init__(
        self, layout: Layout, part: Part, values: Tensor, spec: OptimizerSpec, threads: Threads = ONE_THREAD
    ) -> None:
        self.values = values
        self.pieces = layout.pieces(part, PIECE)
        extras = spec.extras
        self.pace = extras.pace()
        self.steppers: list[Stepper] = []
        for piece, tensor in zip(self.pieces, self.cut(values), strict=True):
            hyper = dict(spec.groups[piece.group])
            shape = layout.entries[piece.entry].shape if KINDS[spec.name].whole else None
            self.steppers.append(
                SGDStepper(tensor, hyper, self.pace)
                if spec.name == "sgd"
                else TorchStepper(tensor, spec.name, hyper, self.pace, shape)
            )
        self.average = values.clone() if extras.ema is not None else None
        if self.average is not None and extras.ema is not None:
            averages = self.cut(self.average)
            self.steppers = [
                AveragingStepper(stepper, average, extras.ema, extras.stretch)
                for stepper, average in zip(self.steppers, averages, strict=True)
            ]
        longest = max((piece.length for piece in self.pieces), default=0)
        self.threads = threads.for_elements(len(values))
        most = max(self.threads)
        self.scratch = [torch.empty(longest, dtype=values.dtype) for _ in range(most)]
        self.takes_several = self._is_plain()
        """Whether `apply_each` can be used."""
        self.pool = ThreadPoolExecutor(most - 1) if most > 1 else None

    def close(self) -> None:
        """This slice is stepped no more: let the threads go."""
        if self.pool is not None:
            self.pool.shutdown(wait=False)

    def cut(self, flat: Tensor) -> list[Tensor]:
        """The pieces of a vector as long as the slice, as views."""
        return [flat[piece.offset : piece.offset + piece.length] for piece in self.pieces]

    def cut_from(self, whole: Tensor) -> list[Tensor]:
        """The same pieces of a vector over all parameters, as views."""
        return [whole[piece.start : piece.start + piece.length] for piece in self.pieces]

    def set_hyper(self, groups: Sequence[Hyper]) -> None:
        """Take over hyper-parameters a scheduler has changed on the worker."""
        for piece, stepper in zip(self.pieces, self.steppers, strict=True):
            stepper.hyper.update(groups[piece.group])
        self.takes_several = self._is_plain()

    def _is_plain(self) -> bool:
        """Plain SGD, and nothing else follows the values."""
        return all(isinstance(stepper, SGDStepper) and stepper.is_plain() for stepper in self.steppers)

    def apply(
        self,
        gradients: Sequence[Sequence[Tensor]],
        weight: float,
        absent: Sequence[frozenset[int]] = (),
        targets: Sequence[Sequence[Tensor]] = (),
        spoil: bool = False,
    ) -> None:
        """One step on the mean of `gradients` (each in pieces) at `weight` times the learning rate.

        `absent` names, for each gradient, the tensors that have none. As in torch, a tensor without any
        gradient is left alone, momentum and weight decay included; one that only some workers miss counts
        as zero for those. The new values are also written to `targets` (each in pieces; the gradients themselves may
        be among them), each piece while it is still in the cache. With `spoil`, the first gradient may be written over:
        the sum of several then needs no memory of its own.
        """
        count = len(gradients)
        self.pace.advance(count)
        missing = frozenset[int]().union(*absent).intersection(*absent) if any(absent) else frozenset()

        def step(index: int, scratch: Tensor) -> None:
            stepper = self.steppers[index]
            if self.pieces[index].entry in missing:
                pass
            elif count == 1:
                stepper.step(gradients[0][index], weight)
            else:
                pieces = [gradient[index] for gradient in gradients]
                stepper.step(add_up(pieces, pieces[0] if spoil else scratch), weight, count)
            for target in targets:
                target[index].copy_(stepper.values)

        self._for_each_piece(step, self.threads.mean if count > 1 else self.threads.single)

    def apply_each(
        self, gradients: Sequence[Sequence[Tensor]], weights: Sequence[float], all_wait: bool = False
    ) -> None:
        """As `apply` on one gradient after the other, each its own target, but in one pass through memory.

        What comes out is the same to the last bit: only that a piece is stepped on all gradients before the next is.
        With `all_wait` nobody computes meanwhile.
        """
        factors = []
        for _ in gradients:
            self.pace.advance(1)
            factors.append(self.pace.factor)

        def step(index: int, _: Tensor) -> None:
            stepper = self.steppers[index]
            assert isinstance(stepper, SGDStepper)
            stepper.step_on_each([gradient[index] for gradient in gradients], weights, factors)

        self._for_each_piece(step, self.threads.mean if all_wait else self.threads.single)

    def _for_each_piece(self, step: Callable[[int, Tensor], None], threads: int) -> None:
        """With memory for a piece. Each thread takes the next: one woken late has less to do, and all end together."""
        left = iter(range(len(self.pieces)))

        def work(scratch: Tensor) -> None:
            for index in left:
                step(index, scratch)

        others = [self.pool.submit(work, self.scratch[thread]) for thread in range(1, threads)] if self.pool else []
        work(self.scratch[0])
        for other in others:
            other.result()

    def state(self) -> State:
        """The optimizer's state for this slice, as plain tensors: vectors as long as the slice, scalars by piece."""
        states = [stepper.state() for stepper in self.steppers]
        state: State = {THERE: torch.tensor([float(bool(each)) for each in states])}
        for name in dict.fromkeys(name for each in states for name in each):
            scalar = next(each[name].dim() == 0 for each in states if name in each)
            if scalar:
                state[name] = torch.tensor([float(each[name]) if name in each else 0.0 for each in states])
            else:
                state[name] = torch.zeros_like(self.values)
                for piece, each in zip(self.cut(state[name]), states, strict=True):
                    if name in each:
                        piece.copy_(each[name])
        if self.average is not None:
            state[AVERAGE] = self.average
        if self.pace.schedule is not None:
            state[SAMPLES] = torch.tensor([float(self.pace.samples)], dtype=torch.float64)
        return state

    def load_state(self, state: State) -> None:
        """Take over what `state` gave."""
        if self.average is not None and AVERAGE in state:
            self.average.copy_(state[AVERAGE])
        if SAMPLES in state:
            self.pace.samples = int(state[SAMPLES])
        for index, (piece, stepper) in enumerate(zip(self.pieces, self.steppers, strict=True)):
            if state[THERE][index]:
                where = slice(piece.offset, piece.offset + piece.length)
                stepper.load_state(
                    {
                        name: value[where].clone() if name not in SCALARS else value[index].clone()
                        for name, value in state.items()
                        if name not in (THERE, AVERAGE, SAMPLES)
                    }
                )


def add_up(pieces: Sequence[Tensor], where: Tensor) -> Tensor:
    """The sum of several, at the beginning of `where`."""
    total = torch.add(pieces[0], pieces[1], out=where[: len(pieces[0])])
    for piece in pieces[2:]:
        total += piece
    return total


__all__ = [
    "AVERAGE", "ONE_THREAD", "PIECE", "SAMPLES", "SCALARS", "THERE", "Extras", "Hyper", "OptimizerSpec",
    "SliceOptimizer", "State", "Threads", "describe", "hyper_of", "parse", "read_extras",
]  # fmt: skip
