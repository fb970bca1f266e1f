"""LARS (You et al. 2017): SGD whose step on a tensor is in proportion to the tensor's own norm.

torch has none, so this is ours, an ordinary `torch.optim.Optimizer`. For a matrix or larger the gradient, weight
decay included, is scaled by trust * |w| / (|g| + weight_decay * |w|); biases and the like (one dimension or none)
step as under SGD, as is usual. The norms are of whole tensors, so a server must hold whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT


class LARS(torch.optim.Optimizer):
    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        trust: float = 0.01,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("trust", trust)):
            if value < 0:
                raise ValueError(f"{name}={value} is out of range: 0 or more")
        for name, value in (("momentum", momentum), ("dampening", dampening)):
            if not 0 <= value < 1:
                raise ValueError(f"{name}={value} is out of range: 0 up to, not including, 1")
        values = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, values)

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
        decay = group["weight_decay"]
        update = gradient.add(tensor, alpha=decay)
        if tensor.dim() > 1:
            size, slope = torch.linalg.vector_norm(tensor), torch.linalg.vector_norm(gradient)
            trust = group["trust"] * size / (slope + decay * size)
            update.mul_(torch.where((size > 0) & (slope > 0), trust, torch.ones_like(trust)))
        if group["momentum"]:
            state = self.state[tensor]
            buffer = state.setdefault("momentum_buffer", torch.zeros_like(tensor))
            update = buffer.mul_(group["momentum"]).add_(update, alpha=1 - group["dampening"])
        tensor.add_(update, alpha=-group["lr"])
