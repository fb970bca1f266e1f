"""SGD with Nesterov momentum whose momentum moves once for all workers' pushes: delayed Nesterov (Liu et al. 2024).

A step of weight 1, on the mean of everybody's gradients, is that of `torch.optim.SGD` with `nesterov=True`. Where each
of N pushes is a step of weight 1/N, a momentum that moved with each would go N times as far on gradients that do not
know of each other, and diverges. Here each push only moves the parameters, and when those that have come weigh as much
as a whole step their mean moves the momentum:

    each push          x -= lr w g
    the N-th, besides  m = momentum m + mean of the N;   x -= lr momentum m

torch has none, so this is ours, an ordinary `torch.optim.Optimizer`. It is the usual outer optimizer of local steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

WHOLE = 1 - 1e-6
"""Pushes that weigh so much together are a whole step, but for rounding."""


class Nesterov(torch.optim.Optimizer):
    """A group may have a `weight`, how much of a step the next one is; without, it is a whole one."""

    def __init__(self, params: ParamsT, lr: float = 0.7, momentum: float = 0.9) -> None:
        if lr < 0:
            raise ValueError(f"lr={lr} is out of range: 0 or more")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum} is out of range: 0 up to, not including, 1")
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    self._step(tensor, tensor.grad, group)
        return loss

    def _step(self, tensor: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        lr, momentum, weight = group["lr"], group["momentum"], group.get("weight", 1.0)
        state = self.state[tensor]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(tensor)
            state["pushed"] = torch.zeros_like(tensor)
            state["seen"] = torch.zeros(())
        pushed, buffer = state["pushed"], state["momentum_buffer"]
        tensor.add_(gradient, alpha=-lr * weight)
        pushed.add_(gradient, alpha=weight)
        seen = float(state["seen"]) + weight
        if seen >= WHOLE:
            buffer.mul_(momentum).add_(pushed, alpha=1 / seen)
            tensor.add_(buffer, alpha=-lr * momentum)
            pushed.zero_()
            seen = 0.0
        state["seen"].fill_(seen)
