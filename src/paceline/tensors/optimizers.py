"""The optimizer lives on the server. It is built from a name and numbers, never from a pickle.

`OptimizerSpec` describes a `torch.optim` optimizer: its class by name, from an allow-list (`optimizer_catalogue.py`),
the hyper-parameters of each group, and what the servers do besides (`Extras`). Slices are stepped with it
(`shard_optimizer.py`). Elementwise optimizers take slices that begin and end anywhere within a tensor; the others take
whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from paceline.core import spec
from paceline.errors import ConfigError
from paceline.tensors import fused_optimizers, optimizer_catalogue, schedules
from paceline.tensors.fused_optimizers import FusedPieceOptimizer
from paceline.tensors.layout import Layout, layout_of
from paceline.tensors.optimizer_catalogue import CATALOGUE
from paceline.tensors.piece_optimizers import (
    Hyper,
    MovingAverage,
    PieceOptimizer,
    StepSchedule,
    TorchPieceOptimizer,
    Value,
    constructor_arguments,
)

HOW_NOT_WHAT = ("params", "foreach", "fused", "capturable", "differentiable", "param_names")
"""Group entries that choose an implementation, not a result; the server chooses its own."""


class Extras(Struct, frozen=True, omit_defaults=True):
    """What happens around the optimizer, of whatever kind it is."""

    clip: float | None = None
    """Each worker scales its gradient down to this norm, before it is sliced."""
    clip_mean: float | None = None
    """The servers scale the mean gradient of an iteration down to this norm, taken over all shards."""
    ema: float | None = None
    """The servers keep a moving average of the parameters with this decay; it is saved beside the model."""
    stretch: bool = False
    """A step of weight w (1/N, when one gradient of N is applied on arrival) takes betas, momentum and the moving
    average to the power w, so that they reach as far back, in samples, as under BSP."""
    schedule: str | None = None
    """A learning-rate schedule that counts samples, as text."""
    batch: int = 0
    """How many samples a gradient stands for, if there is a schedule."""

    def check(self) -> None:
        for name, value, low, high, words in (
            ("clip", self.clip, 0.0, math.inf, "more than 0"),
            ("clip_mean", self.clip_mean, 0.0, math.inf, "more than 0"),
            ("ema", self.ema, 0.0, 1.0, "more than 0 and less than 1"),
            ("batch", self.batch, -1, math.inf, "0 or more"),
        ):
            if value is not None and not low < value < high:
                raise ConfigError(f"{name}={value:g} is out of range: {words}")
        if self.schedule is not None:
            schedules.parse(self.schedule)

    def step_schedule(self) -> StepSchedule:
        schedule = schedules.parse(self.schedule) if self.schedule is not None else None
        return StepSchedule(schedule, self.batch, self.stretch)


EXTRAS = Extras.__struct_fields__
SCALE = "the policy has it, as asp:scale=none"


class OptimizerSpec(Struct, frozen=True):
    """A torch optimizer without its tensors: a name of the allow-list and each group's hyper-parameters."""

    name: str
    groups: tuple[Hyper, ...]
    extras: Extras = Extras()

    @property
    def borders(self) -> str:
        """Where slices may begin and end, for `Layout.borders`."""
        return "tensors" if CATALOGUE[self.name].whole else "anywhere"

    def build(self, tensors: Sequence[Sequence[Tensor]]) -> torch.optim.Optimizer:
        """Makes the optimizer over `tensors`, one sequence for each group."""
        groups = [{"params": list(group), **hyper} for group, hyper in zip(tensors, self.groups, strict=True)]
        make: Any = CATALOGUE[self.name].cls
        return make(groups, **constructor_arguments(self.groups[0]))  # type: ignore[no-any-return]

    def piece_optimizer(
        self,
        values: Tensor,
        group: int,
        step_schedule: StepSchedule,
        average: MovingAverage | None,
        shape: Sequence[int],
    ) -> PieceOptimizer:
        """Makes what steps a piece that lies in a tensor of that shape and that group."""
        hyper = dict(self.groups[group])
        if fused_optimizers.can_step(self.name, values):
            return FusedPieceOptimizer(values, self.name, hyper, step_schedule, average)
        whole = tuple(shape) if CATALOGUE[self.name].whole else None
        return TorchPieceOptimizer(values, self.name, hyper, step_schedule, average, whole)

    def check(self, layout: Layout) -> None:
        """Refuses, in one line, a model that this kind cannot train, or extras that do not fit it."""
        self.extras.check()
        kind = CATALOGUE[self.name]
        odd = next((entry for entry in layout.entries if len(entry.shape) != 2), None)
        if kind.matrices and odd is not None:
            raise ConfigError(f"{self.name} steps matrices only, and {odd.name} has the shape {list(odd.shape)}")
        if not self.extras.stretch:
            return
        if not kind.stretched:
            able = ", ".join(name for name, each in CATALOGUE.items() if each.stretched)
            raise ConfigError(f"{self.name} has no decay that stretch=true could change (can: {able})")
        if self.name == "rmsprop" and any(group.get("momentum") for group in self.groups):
            raise ConfigError("rmsprop with momentum cannot have stretch=true: its momentum has no share to scale")


def describe(optimizer: torch.optim.Optimizer, extras: Extras | None = None) -> OptimizerSpec:
    """Returns the spec of a user's optimizer, or refuses it in one line."""
    name = optimizer_catalogue.name_of(optimizer)
    return OptimizerSpec(name, tuple(hyper_of(group) for group in optimizer.param_groups), extras or Extras())


def check_hyper(groups: Sequence[Hyper], said: Sequence[Hyper]) -> None:
    """Refuses hyper-parameters from another host that are not of the optimizer's groups, or of another kind."""
    if len(said) != len(groups):
        raise ConfigError(f"these are hyper-parameters of {len(said)} groups, there are {len(groups)}")
    for ours, theirs in zip(groups, said, strict=True):
        for name in ours.keys() & theirs.keys():
            if not _same_kind(ours[name], theirs[name]):
                raise ConfigError(f"{name} was {ours[name]!r} and cannot become {theirs[name]!r}")


def _same_kind(ours: Value, theirs: Value) -> bool:
    if isinstance(ours, bool | str) or isinstance(theirs, bool | str):
        return type(ours) is type(theirs) and (not isinstance(ours, str) or ours == theirs)
    if isinstance(ours, tuple) or isinstance(theirs, tuple):
        both = isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs)
        return both and all(map(_same_kind, ours, theirs))  # type: ignore[arg-type]
    return (theirs is None and ours is None) or (isinstance(theirs, float | int) and math.isfinite(theirs))


def hyper_of(group: Mapping[str, Any]) -> Hyper:
    """Returns the hyper-parameters of one group, as plain numbers."""
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
    """Reads 'sgd:lr=0.1,momentum=0.9' as a spec with one group holding every hyper-parameter, defaults included.

    The keys of `Extras` may stand among the hyper-parameters: 'adam:lr=0.001,clip=1,schedule=cosine(samples=60000)'.
    """
    if not isinstance(text, str):
        raise ConfigError(f"an optimizer is a text like 'sgd:lr=0.1', got {text!r}")
    name, arguments = spec.split(text)
    kind = optimizer_catalogue.named(name)
    extras = read_extras({key: arguments.pop(key) for key in EXTRAS if key in arguments}, name)
    if "scale" in arguments:
        raise ConfigError(f"{name} has no parameter 'scale' ({SCALE})")
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
        try_step(described)
    except ConfigError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"optimizer {text!r}: a step with it fails: {type(error).__name__}: {said}") from None
    return described


def try_step(described: OptimizerSpec) -> None:
    """Takes one step on a small matrix, as a server would: torch checks some numbers only when they are used."""
    matrix = torch.ones(2, 2)
    layout = layout_of([("matrix", matrix, 0)], described.borders)
    described.check(layout)
    step_schedule = described.extras.step_schedule()
    step_schedule.advance(1)
    stepper = described.piece_optimizer(matrix.flatten(), 0, step_schedule, None, matrix.shape)
    stepper.step([torch.ones(matrix.numel())], (), 0.5, 1.0, torch.empty(matrix.numel()))


def read_extras(arguments: Mapping[str, str], label: str) -> Extras:
    """Reads extras from texts, and checks them."""
    values: dict[str, Any] = {}
    for key, text in arguments.items():
        if key not in EXTRAS:
            known = SCALE if key == "scale" else f"it has: {', '.join(EXTRAS)}"
            raise ConfigError(f"{label} has no option {key!r} ({known})")
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
