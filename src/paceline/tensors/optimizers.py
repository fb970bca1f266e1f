"""The optimizer lives on the server. It is built from a name and numbers, never from a pickle.

`OptimizerSpec` describes a `torch.optim` optimizer: its class by name, from an allow-list, and the
hyper-parameters of each group. `SliceOptimizer` steps one slice with it: torch's own code on views of the
slice, so BSP equals single-process training to the last rounding. All optimizers here are elementwise, so a
slice may begin and end anywhere within a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Protocol

import torch
from msgspec import Struct
from torch import Tensor

from paceline.core import spec
from paceline.errors import ConfigError
from paceline.tensors.layout import Layout

ELEMENTWISE: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
HOW_NOT_WHAT = ("params", "foreach", "fused", "capturable", "differentiable", "param_names")
"""Group entries that choose an implementation, not a result; the server chooses its own."""

PIECE = 1 << 17
"""Elements of a piece at most: half a megabyte in float32. Smaller ones fit the caches better, but then calling
torch costs more than the arithmetic."""

SCALARS = ("step",)
"""State that is one number for a tensor, not one for each element."""
THERE = "there"
"""In a state: whether a piece has any yet."""
CHECKS_OF_CUDA = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")
"""What torch's optimizers ask before each step: whether CUDA captures a graph. In a server asking would start CUDA,
and fail in one forked from a process that has used it."""
State = dict[str, Tensor]

Value = float | int | bool | tuple[float, ...] | None
Hyper = dict[str, Value]


class OptimizerSpec(Struct, frozen=True):
    """A torch optimizer without its tensors: a name of the allow-list and each group's hyper-parameters."""

    name: str
    groups: tuple[Hyper, ...]

    def build(self, tensors: Sequence[Sequence[Tensor]]) -> torch.optim.Optimizer:
        """The optimizer over `tensors`, one sequence for each group."""
        groups = [{"params": list(group), **hyper} for group, hyper in zip(tensors, self.groups, strict=True)]
        return ELEMENTWISE[self.name](groups)  # type: ignore[call-arg]


def describe(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """The spec of a user's optimizer, or a clear refusal."""
    name = type(optimizer).__name__.lower()
    if ELEMENTWISE.get(name) is not type(optimizer):
        raise ConfigError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__} cannot run on the servers "
            f"(can: {', '.join('torch.optim.' + cls.__name__ for cls in ELEMENTWISE.values())})"
        )
    return OptimizerSpec(name, tuple(hyper_of(group) for group in optimizer.param_groups))


def hyper_of(group: Mapping[str, Any]) -> Hyper:
    """The hyper-parameters of one group, as plain numbers."""
    hyper: Hyper = {}
    for key, value in group.items():
        if key in HOW_NOT_WHAT or key == "initial_lr":
            continue
        if isinstance(value, Tensor):
            value = value.item()
        if isinstance(value, tuple | list):
            hyper[key] = tuple(float(item) for item in value)
        elif value is None or isinstance(value, bool | int | float):
            hyper[key] = value
    return hyper


def parse(text: str) -> OptimizerSpec:
    """'sgd:lr=0.1,momentum=0.9' -> a spec with one group holding every hyper-parameter, defaults included."""
    name, arguments = spec.split(text)
    if name not in ELEMENTWISE:
        raise ConfigError(f"unknown optimizer {name!r} (known: {', '.join(ELEMENTWISE)})")
    hyper = {key: _read(value, f"{name}:{key}") for key, value in arguments.items()}
    try:
        # As defaults, not as a group: torch checks only those.
        make: Callable[..., torch.optim.Optimizer] = ELEMENTWISE[name]
        described = describe(make([torch.zeros(1)], **hyper))
        if any(isinstance(value, float) and not math.isfinite(value) for value in described.groups[0].values()):
            raise ValueError("numbers must be finite")
        return described
    except (ValueError, TypeError) as error:
        reason = str(error).removeprefix(f"{ELEMENTWISE[name].__name__}.__init__() ")
        raise ConfigError(f"optimizer {text!r}: {reason}") from None


def _read(text: str, label: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    try:
        numbers = tuple(float(part) for part in text.split(":"))
    except ValueError:
        raise ConfigError(f"{label}={text} is not a number (nor true, false, or a:b for a pair)") from None
    return numbers if len(numbers) > 1 else numbers[0]


class SliceOptimizer:
    """One shard's slice of the parameters, and the optimizer that steps it.

    It goes over the slice piece by piece, so that taking the mean of several gradients and stepping are one pass
    through memory. A gradient is handed in cut into the same pieces (`cut`). With `threads`, a mean of several is
    taken by so many at once: those who sent the gradients wait for it, so their cores are free.
    """

    def __init__(self, layout: Layout, part: slice, values: Tensor, spec: OptimizerSpec, threads: int = 1) -> None:
        self.values = values
        self.pieces = layout.pieces(part, PIECE)
        self.steppers: list[Stepper] = []
        make = SGDStepper if spec.name == "sgd" else TorchStepper
        for piece, tensor in zip(self.pieces, self.cut(values), strict=True):
            self.steppers.append(make(tensor, spec.name, dict(spec.groups[piece.group])))
        longest = max((piece.length for piece in self.pieces), default=0)
        bounds = [round(len(self.pieces) * thread / threads) for thread in range(threads + 1)]
        self.parts = [range(*bound) for bound in pairwise(bounds)]
        """The pieces of each thread."""
        self.scratch = [torch.empty(longest, dtype=values.dtype) for _ in self.parts]
        self.pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def cut(self, flat: Tensor) -> list[Tensor]:
        """The pieces of a vector as long as the slice, as views."""
        return [flat[piece.offset : piece.offset + piece.length] for piece in self.pieces]

    def set_hyper(self, groups: Sequence[Hyper]) -> None:
        """Take over hyper-parameters a scheduler has changed on the worker."""
        for piece, stepper in zip(self.pieces, self.steppers, strict=True):
            stepper.hyper.update(groups[piece.group])

    def apply(
        self,
        gradients: Sequence[Sequence[Tensor]],
        weight: float,
        absent: Sequence[frozenset[int]] = (),
        targets: Sequence[Sequence[Tensor]] = (),
    ) -> None:
        """One step on the mean of `gradients` (each in pieces) at `weight` times the learning rate.

        `absent` names, for each gradient, the tensors that have none. As in torch, a tensor without any
        gradient is left alone, momentum and weight decay included; one that only some workers miss counts
        as zero for those. The new values are also written to `targets` (each in pieces; the gradients themselves may
        be among them), each piece while it is still in the cache.
        """
        missing = frozenset[int]().union(*absent).intersection(*absent) if any(absent) else frozenset()

        def step(thread: int, indices: Iterable[int]) -> None:
            for index in indices:
                stepper = self.steppers[index]
                if self.pieces[index].entry not in missing:
                    stepper.step(self._mean(gradients, index, self.scratch[thread]), weight)
                for target in targets:
                    target[index].copy_(stepper.values)

        if self.pool is None or len(gradients) == 1:
            step(0, range(len(self.pieces)))
        else:
            others = [self.pool.submit(step, thread, self.parts[thread]) for thread in range(1, len(self.parts))]
            step(0, self.parts[0])
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
        return state

    def load_state(self, state: State) -> None:
        """Take over what `state` gave."""
        for index, (piece, stepper) in enumerate(zip(self.pieces, self.steppers, strict=True)):
            if state[THERE][index]:
                where = slice(piece.offset, piece.offset + piece.length)
                stepper.load_state(
                    {
                        name: value[where].clone() if name not in SCALARS else value[index].clone()
                        for name, value in state.items()
                        if name != THERE
                    }
                )

    def _mean(self, gradients: Sequence[Sequence[Tensor]], index: int, scratch: Tensor) -> Tensor:
        if len(gradients) == 1:
            return gradients[0][index]
        first, second = gradients[0][index], gradients[1][index]
        total = torch.add(first, second, out=scratch[: len(first)])
        for gradient in gradients[2:]:
            total += gradient[index]
        return total.div_(len(gradients))


class Stepper(Protocol):
    """Steps one piece."""

    values: Tensor
    hyper: Hyper

    def step(self, gradient: Tensor, weight: float) -> None: ...

    def state(self) -> State: ...

    def load_state(self, state: State) -> None: ...


class SGDStepper:
    """torch.optim.SGD on one piece: the same operations in the same order, without the bookkeeping around them."""

    def __init__(self, values: Tensor, name: str, hyper: Hyper) -> None:
        self.values = values
        self.hyper = hyper
        self.momentum: Tensor | None = None

    def step(self, gradient: Tensor, weight: float) -> None:
        hyper = self.hyper
        if hyper["maximize"]:
            gradient = -gradient
        if hyper["weight_decay"]:
            gradient = gradient.add(self.values, alpha=hyper["weight_decay"])  # type: ignore[arg-type]
        factor = hyper["momentum"]
        if factor:
            if self.momentum is None:
                self.momentum = gradient.clone()
            else:
                self.momentum.mul_(factor).add_(gradient, alpha=1 - hyper["dampening"])  # type: ignore[arg-type, operator]
            gradient = gradient.add(self.momentum, alpha=factor) if hyper["nesterov"] else self.momentum  # type: ignore[arg-type]
        self.values.add_(gradient, alpha=-hyper["lr"] * weight)  # type: ignore[operator]

    def state(self) -> State:
        return {} if self.momentum is None else {"momentum_buffer": self.momentum}

    def load_state(self, state: State) -> None:
        self.momentum = state.get("momentum_buffer")


class TorchStepper:
    """Any other elementwise optimizer on one piece: torch's own."""

    def __init__(self, values: Tensor, name: str, hyper: Hyper) -> None:
        self.values = values
        self.hyper = hyper
        self.optimizer = OptimizerSpec(name, (hyper,)).build([[values]])
        for check in CHECKS_OF_CUDA:
            setattr(self.optimizer, check, lambda: None)

    def step(self, gradient: Tensor, weight: float) -> None:
        (group,) = self.optimizer.param_groups
        group.update(self.hyper)
        group["lr"] = self.hyper["lr"] * weight  # type: ignore[operator]
        self.values.grad = gradient
        self.optimizer.step()
        self.values.grad = None

    def state(self) -> State:
        return dict(self.optimizer.state[self.values])

    def load_state(self, state: State) -> None:
        self.optimizer.state[self.values].update(state)
