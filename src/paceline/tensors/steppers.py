"""One piece of a slice, stepped: torch's own optimizers, and SGD without the bookkeeping around it.

`weight` says how much of a step this one is: 1 for the mean of everybody's gradients, 1/N for one of N. The learning
rate is scaled by it. If time is stretched, so is what the optimizer remembers: a decay d becomes d ** weight, so N
steps of weight 1/N forget as much as one step of weight 1.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.tensors.kinds import KINDS
from paceline.tensors.schedules import Schedule

State = dict[str, Tensor]
Value = float | int | bool | str | tuple[float | None, ...] | None
Hyper = dict[str, Value]

SCALARS = ("step", "mu_product", "eta", "mu")
"""State that is one number for a tensor, not one for each element."""
CHECKS_OF_CUDA = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")
"""What torch's optimizers ask before each step: whether CUDA captures a graph. In a server asking would start CUDA,
and fail in one forked from a process that has used it."""


class Pace:
    """What all pieces of a slice share: the schedule, the samples used so far, whether time is stretched."""

    def __init__(self, schedule: Schedule | None = None, batch: int = 0, stretch: bool = False) -> None:
        self.schedule = schedule
        self.batch = batch
        self.stretch = stretch
        self.samples = 0
        self.factor = 1.0

    def advance(self, gradients: int) -> None:
        """A step on so many gradients comes next."""
        if self.schedule is not None:
            self.factor = self.schedule.factor(self.samples)
        self.samples += gradients * self.batch


class Stepper(Protocol):
    """Steps one piece, given flat."""

    values: Tensor
    hyper: Hyper

    def step(self, gradient: Tensor, weight: float, count: int = 1) -> None:
        """On the mean of `count` gradients, given their sum, which is the stepper's to change if they are several."""

    def state(self) -> State: ...

    def load_state(self, state: State) -> None: ...


class SGDStepper:
    """torch.optim.SGD on one piece: the same operations in the same order, without the bookkeeping around them."""

    def __init__(self, values: Tensor, hyper: Hyper, pace: Pace) -> None:
        self.values = values
        self.hyper = hyper
        self.pace = pace
        self.momentum: Tensor | None = None

    def step(self, gradient: Tensor, weight: float, count: int = 1) -> None:
        hyper: dict[str, Any] = self.hyper
        if self.is_plain():
            # Divided with the rate: one pass less over the gradient.
            self.values.add_(gradient, alpha=-hyper["lr"] * weight * self.pace.factor / count)
            return
        gradient = mean(gradient, count)
        if hyper["maximize"]:
            gradient = -gradient
        if hyper["weight_decay"]:
            gradient = gradient.add(self.values, alpha=hyper["weight_decay"])
        if hyper["momentum"]:
            gradient = self.remember(gradient, weight, hyper)
        self.values.add_(gradient, alpha=-hyper["lr"] * weight * self.pace.factor)

    def is_plain(self) -> bool:
        """Whether a step is no more than the gradient, scaled."""
        return not (self.hyper["maximize"] or self.hyper["weight_decay"] or self.hyper["momentum"])

    def remember(self, gradient: Tensor, weight: float, hyper: dict[str, Any]) -> Tensor:
        factor, share = hyper["momentum"], 1.0
        if self.pace.stretch and weight != 1:
            factor, share = stretch_momentum(factor, weight)
            gradient = gradient * share
        if self.momentum is None:
            self.momentum = gradient.clone()
        else:
            self.momentum.mul_(factor).add_(gradient, alpha=1 - hyper["dampening"])
        return gradient.add(self.momentum, alpha=factor) if hyper["nesterov"] else self.momentum

    def state(self) -> State:
        return {} if self.momentum is None else {"momentum_buffer": self.momentum}

    def load_state(self, state: State) -> None:
        self.momentum = state.get("momentum_buffer")


class TorchStepper:
    """Any other optimizer on one piece: torch's own, or ours in torch's form. `shape` is the tensor's, if whole."""

    def __init__(self, values: Tensor, name: str, hyper: Hyper, pace: Pace, shape: tuple[int, ...] | None) -> None:
        self.values = values
        self.kind = KINDS[name]
        self.hyper = hyper
        self.pace = pace
        self.tensor = values if shape is None else values.view(shape)
        make: Any = self.kind.cls
        self.optimizer: torch.optim.Optimizer = make([{"params": [self.tensor], **hyper}])
        for check in CHECKS_OF_CUDA:
            setattr(self.optimizer, check, lambda: None)

    def step(self, gradient: Tensor, weight: float, count: int = 1) -> None:
        gradient = mean(gradient, count)
        (group,) = self.optimizer.param_groups
        group.update(self.hyper)
        before = self.values.clone() if self.kind.blended and weight != 1 else None
        group["lr"] *= self.pace.factor if self.kind.blended else weight * self.pace.factor
        if self.pace.stretch and weight != 1:
            self.stretch(group, weight)
        self.tensor.grad = gradient.view(self.tensor.shape)
        self.optimizer.step()
        self.tensor.grad = None
        if before is not None:
            self.values.copy_(before.lerp(self.values, weight))

    def stretch(self, group: dict[str, Any], weight: float) -> None:
        for key in self.kind.stretched:
            value = group[key]
            if key == "momentum" and "dampening" in group and value:
                group[key], share = stretch_momentum(value, weight)
                group["dampening"] = 1 - (1 - group["dampening"]) * share
            elif isinstance(value, tuple):
                group[key] = tuple(decay**weight for decay in value)
            else:
                group[key] = value**weight

    def state(self) -> State:
        return {
            name: value if name in SCALARS else padded(value, self.values.numel())
            for name, value in self.optimizer.state[self.tensor].items()
        }

    def load_state(self, state: State) -> None:
        shape = tuple(self.tensor.shape)
        shaped = {name: value if name in SCALARS else unpadded(name, value, shape) for name, value in state.items()}
        self.optimizer.state[self.tensor].update(shaped)


class AveragingStepper:
    """Another stepper, and the moving average of its values."""

    def __init__(self, inner: Stepper, average: Tensor, decay: float, stretch: bool) -> None:
        self.inner = inner
        self.values = inner.values
        self.hyper = inner.hyper
        self.state = inner.state
        self.load_state = inner.load_state
        self.average = average
        self.decay = decay
        self.stretch = stretch

    def step(self, gradient: Tensor, weight: float, count: int = 1) -> None:
        self.inner.step(gradient, weight, count)
        self.average.lerp_(self.values, 1 - (self.decay**weight if self.stretch else self.decay))


def mean(total: Tensor, count: int) -> Tensor:
    """Of so many, in place of their sum; one alone is nobody's to change."""
    return total if count == 1 else total.div_(count)


def stretch_momentum(factor: float, weight: float) -> tuple[float, float]:
    """The momentum of a step of `weight`, and the share of its gradient that then goes in.

    A momentum buffer of torch's is a sum, not a mean: remembering longer would make it larger, hence the share.
    """
    stretched = factor**weight
    return stretched, (1 - stretched) / (1 - factor)


def padded(value: Tensor, numel: int) -> Tensor:
    """State of a tensor as a vector as long as the tensor: what is shorter (Adafactor's rows) is filled up."""
    flat = value.reshape(-1)
    return flat if len(flat) == numel else torch.cat([flat, flat.new_zeros(numel - len(flat))])


def unpadded(name: str, flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What `padded` was given, for a tensor of this shape."""
    if name == "row_var":
        shape = (*shape[:-1], 1)
    elif name == "col_var":
        shape = (*shape[:-2], 1, shape[-1])
    return flat[: torch.Size(shape).numel()].view(shape)
