"""One piece of a slice, stepped by torch's own optimizers. `fused_optimizers.py` has faster ones for most of them.

`weight` says how much of a step this one is: 1 for the mean of everybody's gradients, 1/N for one of N. The learning
rate is scaled by it. If time is stretched, so is what the optimizer remembers: a decay d becomes d ** weight, so N
steps of weight 1/N forget as much as one step of weight 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.tensors.fused_kernels import sum_into
from paceline.tensors.optimizer_catalogue import CATALOGUE, CatalogueEntry
from paceline.tensors.schedules import Schedule

State = dict[str, Tensor]
Value = float | int | bool | str | tuple[float | None, ...] | None
Hyper = dict[str, Value]

SCALARS = ("step", "mu_product", "eta", "mu", "seen")
"""The parts of a state that are one number for a tensor, not one for each element."""
CHECKS_OF_CUDA = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")
"""The checks with which torch's optimizers ask before each step whether CUDA captures a graph. In a server asking would
start CUDA, and fail in one forked from a process that has used it."""


class StepSchedule:
    """What all pieces of a slice share: the schedule, the samples used so far, whether time is stretched."""

    def __init__(self, schedule: Schedule | None = None, batch: int = 0, stretch: bool = False) -> None:
        self.schedule = schedule
        self.batch = batch
        self.stretch = stretch
        self.samples = 0
        self.factor = 1.0

    def advance(self, gradients: int) -> None:
        """Prepares a step on so many gradients."""
        if self.schedule is not None:
            self.factor = self.schedule.factor(self.samples)
        self.samples += gradients * self.batch


class MovingAverage:
    """The moving average of a piece's values."""

    def __init__(self, values: Tensor, decay: float, stretch: bool) -> None:
        self.values = values
        self.decay = decay
        self.stretch = stretch

    def share(self, weight: float) -> float:
        """Returns the share of the new values in the average after a step of this weight."""
        return 1 - (self.decay**weight if self.stretch else self.decay)


class PieceOptimizer(Protocol):
    """Steps one piece, given as a flat tensor."""

    values: Tensor
    hyper: Hyper

    def step(
        self, gradients: Sequence[Tensor], targets: Sequence[Tensor], weight: float, clip: float, scratch: Tensor
    ) -> None:
        """Steps on the mean of the gradients times `clip`, and writes the new values to all targets. The sum may need
        `scratch`, which may be the first gradient; targets may be among the gradients."""

    def state(self) -> State: ...

    def load_state(self, state: State) -> None: ...


class TorchPieceOptimizer:
    """Any other optimizer on one piece: torch's own, or ours in torch's form. `shape` is the tensor's, if it is
    whole."""

    def __init__(
        self,
        values: Tensor,
        name: str,
        hyper: Hyper,
        step_schedule: StepSchedule,
        average: MovingAverage | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self.values = values
        self.average = average
        self.kind = CATALOGUE[name]
        self.hyper = hyper
        self.step_schedule = step_schedule
        self.tensor = values if shape is None else values.view(shape)
        make: Any = self.kind.cls
        arguments = constructor_arguments(hyper)
        self.optimizer: torch.optim.Optimizer = make([{"params": [self.tensor], **hyper}], **arguments)
        for check in CHECKS_OF_CUDA:
            setattr(self.optimizer, check, lambda: None)

    def step(
        self, gradients: Sequence[Tensor], targets: Sequence[Tensor], weight: float, clip: float, scratch: Tensor
    ) -> None:
        gradient, count = sum_into(gradients, scratch), len(gradients)
        if clip != 1:
            gradient = torch.mul(gradient, clip, out=gradient if count > 1 else scratch[: len(gradient)])
        if count > 1:
            gradient.div_(count)
        (group,) = self.optimizer.param_groups
        before = self.values.clone() if self.kind.blended and weight != 1 else None
        share = set_group(group, self.hyper, self.kind, weight, self.step_schedule)
        if share != 1:
            gradient = gradient * share
        self.tensor.grad = gradient.view(self.tensor.shape)
        self.optimizer.step()
        self.tensor.grad = None
        if before is not None:
            self.values.copy_(before.lerp(self.values, weight))
        if self.average is not None:
            self.average.values.lerp_(self.values, self.average.share(weight))
        for target in targets:
            target.copy_(self.values)

    def state(self) -> State:
        return {
            name: value if name in SCALARS else padded(value, self.values.numel())
            for name, value in self.optimizer.state[self.tensor].items()
        }

    def load_state(self, state: State) -> None:
        shape = tuple(self.tensor.shape)
        shaped = {name: value if name in SCALARS else unpadded(name, value, shape) for name, value in state.items()}
        self.optimizer.state[self.tensor].update(shaped)


def set_group(
    group: dict[str, Any], hyper: Hyper, kind: CatalogueEntry, weight: float, step_schedule: StepSchedule
) -> float:
    """Gives a group of torch's the hyper-parameters of a step of this weight; returns what its gradient is multiplied
    by."""
    group.update(hyper)
    group["lr"] *= step_schedule.factor if kind.blended or kind.weighted else weight * step_schedule.factor
    if kind.weighted:
        group["weight"] = weight
    if not step_schedule.stretch or weight == 1:
        return 1.0
    stretch(group, kind.stretched, weight)
    share: float = group.pop("share", 1.0)
    if kind.cls is torch.optim.SGD:  # whose first step knows no dampening
        group["weight_decay"] *= share
        return share
    if share != 1:
        group["dampening"] = 1 - (1 - group["dampening"]) * share
    return 1.0


def constructor_arguments(hyper: Hyper) -> Hyper:
    """Returns what an optimizer's constructor must be told besides its groups: Adagrad makes its state at once, and
    looks there alone."""
    return {key: hyper[key] for key in ("initial_accumulator_value",) if key in hyper}


def is_plain(name: str, hyper: Hyper) -> bool:
    """Whether a step is no more than the gradient, scaled."""
    return name == "sgd" and not (hyper["maximize"] or hyper["weight_decay"] or hyper["momentum"])


def stretch(hyper: dict[str, Any], names: Sequence[str], weight: float) -> None:
    """Takes the decays of these names to the power `weight`; `share` is then the share of a gradient that a momentum
    buffer gets."""
    for name in names:
        value = hyper[name]
        if name == "momentum" and "dampening" in hyper:
            if value:
                hyper[name], hyper["share"] = stretch_momentum(value, weight)
        elif isinstance(value, tuple):
            hyper[name] = tuple(decay**weight for decay in value)
        else:
            hyper[name] = value**weight


def stretch_momentum(factor: float, weight: float) -> tuple[float, float]:
    """Returns the momentum of a step of `weight`, and the share of its gradient that then goes in.

    A momentum buffer of torch's is a sum, not a mean: a larger momentum would make it larger, hence the share.
    """
    stretched = factor**weight
    return stretched, (1 - stretched) / (1 - factor)


def padded(value: Tensor, numel: int) -> Tensor:
    """Returns the state of a tensor as a vector as long as the tensor; a shorter one (Adafactor's rows) is filled
    up."""
    flat = value.reshape(-1)
    return flat if len(flat) == numel else torch.cat([flat, flat.new_zeros(numel - len(flat))])


def unpadded(name: str, flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns what `padded` was given, for a tensor of this shape."""
    if name == "row_var":
        shape = (*shape[:-1], 1)
    elif name == "col_var":
        shape = (*shape[:-2], 1, shape[-1])
    return flat[: torch.Size(shape).numel()].view(shape)
