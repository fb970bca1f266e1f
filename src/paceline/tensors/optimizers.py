"""The optimizer lives on the server. It is built from a name and numbers, never from a pickle.

`OptimizerSpec` describes a `torch.optim` optimizer: its class by name, from an allow-list, and the
hyper-parameters of each group. `SliceOptimizer` steps one slice with it: torch's own code on views of the
slice, so BSP equals single-process training to the last rounding. All optimizers here are elementwise, so a
slice may begin and end anywhere within a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
        hyper[key] = tuple(float(item) for item in value) if isinstance(value, tuple | list) else value
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
        return describe(make([torch.zeros(1)], **hyper))
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
    """One shard's slice of the parameters, and the optimizer that steps it."""

    def __init__(self, layout: Layout, part: slice, values: Tensor, spec: OptimizerSpec) -> None:
        self.values = values
        self.pieces = layout.pieces(part)
        self.tensors = [values[piece.offset : piece.offset + piece.length] for piece in self.pieces]
        groups: list[list[Tensor]] = [[] for _ in spec.groups]
        for piece, tensor in zip(self.pieces, self.tensors, strict=True):
            groups[piece.group].append(tensor)
        self.optimizer = spec.build(groups) if self.pieces else None
        self.rates = [float(group["lr"]) for group in spec.groups]  # type: ignore[arg-type]

    def set_hyper(self, groups: Sequence[Hyper]) -> None:
        """Take over hyper-parameters a scheduler has changed on the worker."""
        self.rates = [float(hyper["lr"]) for hyper in groups]  # type: ignore[arg-type]
        if self.optimizer is not None:
            for group, hyper in zip(self.optimizer.param_groups, groups, strict=True):
                group.update(hyper)

    def apply(self, gradients: Sequence[Tensor], weight: float, absent: Sequence[frozenset[int]] | None = None) -> None:
        """One step on the mean of `gradients` (slices) at `weight` times the learning rate.

        `absent` names, for each gradient, the tensors that have none. As in torch, a tensor without any
        gradient is left alone, momentum and weight decay included; one that only some workers miss counts
        as zero for those.
        """
        if self.optimizer is None:
            return
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * weight
        mean = _mean(gradients)
        missing = frozenset[int]().union(*absent).intersection(*absent) if absent else frozenset[int]()
        for piece, tensor in zip(self.pieces, self.tensors, strict=True):
            there = piece.entry not in missing
            tensor.grad = mean[piece.offset : piece.offset + piece.length] if there else None
        self.optimizer.step()
        for tensor in self.tensors:
            tensor.grad = None


def _mean(gradients: Sequence[Tensor]) -> Tensor:
    if len(gradients) == 1:
        return gradients[0]
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    return total.div_(len(gradients))
