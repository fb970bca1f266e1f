"""The elementwise optimizers of torch.optim on a piece of a slice, each step one pass over memory (`_passes.c`).

torch's own code goes over parameters, gradient and state once for each operation; Adam has a dozen. Here the sum of the
gradients, clipping, weight decay, state, step, moving average and writing the new values out are one pass. What differs
from kind to kind is a row of coefficients, made here for each step. Names of states and formulas are torch's, so that a
checkpoint means the same and results agree with torch's to the rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.tensors import fused_kernels
from paceline.tensors.optimizer_catalogue import CATALOGUE
from paceline.tensors.piece_optimizers import Hyper, MovingAverage, State, StepSchedule, is_plain, stretch

Coefficients = tuple[float, ...]
OWN = 8
"""So many coefficients of its own a kind may have (`_passes.c`)."""
STATES = 3
"""So many vectors of state a kind may have."""


class StepCount:
    """How far a piece is: its steps, and the product that NAdam keeps of them."""

    def __init__(self, step: int = 0, mu_product: float = 1.0) -> None:
        self.step = step
        self.mu_product = mu_product


class Kind(NamedTuple):
    """One of the compiled kinds: what `_passes.c` calls it, which states these hyper-parameters need, each in its
    place, and the coefficients at a learning rate and a step."""

    number: int
    states: Callable[[dict[str, Any]], Sequence[str]]
    coefficients: Callable[[dict[str, Any], float, StepCount], Coefficients]
    scalars: tuple[str, ...] = ("step",)
    """The numbers that torch keeps beside the states."""


def _sgd_states(hyper: dict[str, Any]) -> Sequence[str]:
    return ("momentum_buffer",) if hyper["momentum"] else ()


def _sgd(hyper: dict[str, Any], lr: float, at: StepCount) -> Coefficients:
    """The first step begins with the gradient itself, whatever the dampening."""
    momentum, share = hyper["momentum"], hyper.get("share", 1.0)
    kept, taken = (0.0, share) if at.step == 1 else (momentum, (1 - hyper["dampening"]) * share)
    return -lr, kept, taken, momentum, share


def _adam_states(hyper: dict[str, Any]) -> Sequence[str]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if hyper["amsgrad"] else ("exp_avg", "exp_avg_sq")


def _adam(hyper: dict[str, Any], lr: float, at: StepCount) -> Coefficients:
    beta1, beta2 = hyper["betas"]
    scale = 1 / math.sqrt(1 - beta2**at.step)
    return -lr / (1 - beta1**at.step), 1 - beta1, beta2, 1 - beta2, scale, hyper["eps"]


def _adagrad(hyper: dict[str, Any], lr: float, at: StepCount) -> Coefficients:
    return -lr / (1 + (at.step - 1) * hyper["lr_decay"]), hyper["eps"]


def _rmsprop_states(hyper: dict[str, Any]) -> Sequence[str]:
    return "square_avg", "grad_avg" if hyper["centered"] else "", "momentum_buffer" if hyper["momentum"] else ""


def _rmsprop(hyper: dict[str, Any], lr: float, at: StepCount) -> Coefficients:
    return -lr, hyper["alpha"], 1 - hyper["alpha"], hyper["eps"], hyper["momentum"]


def _adadelta(hyper: dict[str, Any], lr: float, at: StepCount) -> Coefficients:
    return -lr, hyper["rho"], 1 - hyper["rho"], hyper["eps"]


def _adamax(hyper: dict[str, Any], lr: float, at: StepCount) -> Coefficients:
    beta1, beta2 = hyper["betas"]
    return -lr / (1 - beta1**at.step), 1 - beta1, beta2, hyper["eps"]


def _nadam(hyper: dict[str, Any], lr: float, at: StepCount) -> Coefficients:
    beta1, beta2 = hyper["betas"]
    mu, following = (beta1 * (1 - 0.5 * 0.96 ** (step * hyper["momentum_decay"])) for step in (at.step, at.step + 1))
    at.mu_product *= mu
    of_gradient = -lr * (1 - mu) / (1 - at.mu_product)
    of_mean = -lr * following / (1 - at.mu_product * following)
    return of_gradient, 1 - beta1, beta2, 1 - beta2, 1 / math.sqrt(1 - beta2**at.step), hyper["eps"], of_mean


def _radam(hyper: dict[str, Any], lr: float, at: StepCount) -> Coefficients:
    beta1, beta2 = hyper["betas"]
    correction = 1 - beta2**at.step
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * at.step * beta2**at.step / correction
    rectifier = 0.0
    if length > 5:
        ratio = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        rectifier = math.sqrt(ratio * correction)
    return -lr / (1 - beta1**at.step), 1 - beta1, beta2, 1 - beta2, hyper["eps"], rectifier


def _two_averages(hyper: dict[str, Any]) -> Sequence[str]:
    return "exp_avg", "exp_avg_sq"


KINDS = {
    "sgd": Kind(0, _sgd_states, _sgd, ()),
    "adam": Kind(3, _adam_states, _adam),
    "adamw": Kind(3, _adam_states, _adam),
    "adagrad": Kind(4, lambda hyper: ("sum",), _adagrad),
    "rmsprop": Kind(5, _rmsprop_states, _rmsprop),
    "adadelta": Kind(6, lambda hyper: ("square_avg", "acc_delta"), _adadelta),
    "adamax": Kind(7, lambda hyper: ("exp_avg", "exp_inf"), _adamax),
    "nadam": Kind(8, _two_averages, _nadam, ("step", "mu_product")),
    "radam": Kind(9, _two_averages, _radam),
}


def can_step(name: str, values: Tensor) -> bool:
    """Whether there is a compiled kind of this name for such values."""
    return name in KINDS and fused_kernels.are_compiled() and fused_kernels.is_plain_float32(values)


class FusedPieceOptimizer:
    """Steps one piece with one of the compiled kinds; `average`, if there is one, follows the values."""

    def __init__(
        self, values: Tensor, name: str, hyper: Hyper, step_schedule: StepSchedule, average: MovingAverage | None = None
    ) -> None:
        self.values = values
        self.name = name
        self.kind = KINDS[name]
        self.hyper = hyper
        self.step_schedule = step_schedule
        self.average = average
        self.at = StepCount()
        self.states: dict[str, Tensor] = {}

    def step(
        self, gradients: Sequence[Tensor], targets: Sequence[Tensor], weight: float, clip: float, scratch: Tensor
    ) -> None:
        coefficients = self._coefficients(weight, self.step_schedule.factor, clip, len(gradients))
        self._run(gradients, targets, coefficients, each=False)

    def step_on_each(self, gradients: Sequence[Tensor], weights: Sequence[float], factors: Sequence[float]) -> None:
        """Steps on one gradient after the other; each is overwritten by the values after it."""
        rows = [self._coefficients(weight, factor) for weight, factor in zip(weights, factors, strict=True)]
        self._run(gradients, (), [number for row in rows for number in row], each=True)

    def _coefficients(self, weight: float, factor: float, clip: float = 1.0, count: int = 1) -> list[float]:
        hyper: dict[str, Any] = self.hyper
        if self.step_schedule.stretch and weight != 1:
            hyper = dict(hyper)
            stretch(hyper, CATALOGUE[self.name].stretched, weight)
        if self.name != "sgd" or hyper["momentum"]:  # SGD's buffer begins with the first step that has momentum
            self.at.step += 1
        lr = hyper["lr"] * weight * factor
        if is_plain(self.name, hyper):  # as where a step goes by runs: divided with the rate
            lr, clip, count = lr * clip / count, 1.0, 1
        decay, shrink = hyper.get("weight_decay", 0.0), 1.0
        if decay and (self.name == "adamw" or hyper.get("decoupled_weight_decay")):
            decay, shrink = 0.0, 1 - lr * decay
        sign = -1.0 if hyper.get("maximize") else 1.0
        following = self.average.share(weight) if self.average is not None else 0.0
        own = self.kind.coefficients(hyper, lr, self.at)
        return [clip, float(count), sign, decay, shrink, following, *own, *[0.0] * (OWN - len(own))]

    def _run(self, gradients: Sequence[Tensor], targets: Sequence[Tensor], row: list[float], each: bool) -> None:
        number = self.kind.number
        if self.name == "sgd" and self.hyper["momentum"]:
            number += 2 if self.hyper["nesterov"] else 1
        names = self.kind.states(self.hyper)
        states = [self._state(name) if name else None for name in (*names, *[""] * (STATES - len(names)))]
        average = self.average.values if self.average is not None else None
        fused_kernels.optimize(number, self.values, states, average, gradients, targets, row, each)

    def _state(self, name: str) -> Tensor:
        state = self.states.get(name)
        if state is None:
            first: Any = self.hyper.get("initial_accumulator_value", 0.0) if name == "sum" else 0.0
            state = self.states[name] = torch.full_like(self.values, first)
        return state

    def state(self) -> State:
        numbers = {"step": float(self.at.step), "mu_product": self.at.mu_product}
        if not (self.at.step or self.states):
            return {}
        return self.states | {name: torch.tensor(numbers[name]) for name in self.kind.scalars}

    def load_state(self, state: State) -> None:
        self.at = StepCount(int(state.get("step", 1)), float(state.get("mu_product", 1.0)))
        self.states = {name: value for name, value in state.items() if value.dim()}
