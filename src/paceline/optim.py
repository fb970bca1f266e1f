"""`paceline.Optimizer`: the one line that makes a training script distributed.

    opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), policy="ssp:staleness=3")

It is a `torch.optim.Optimizer` that shares the inner one's parameter groups, so schedulers and `zero_grad`
work as before. `step(closure)` computes, pushes the gradient, and returns when the parameters of the next
iteration are in the model. In a world of one it is the inner optimizer's own `step`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline import policies, session
from paceline.core.policy import Policy
from paceline.errors import ConfigError, PacelineError
from paceline.tensors.layout import layout_of
from paceline.tensors.optimizers import describe, hyper_of


class Optimizer(torch.optim.Optimizer):
    """A torch optimizer whose steps are taken on the servers of a live run.

    `policy` says who waits for whom (`paceline run --policy` beats it). `model` is optional: with it the
    saved parameters bear the model's names.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, policy: str | Policy | None = None, model: nn.Module | None = None
    ) -> None:
        if not isinstance(inner, torch.optim.Optimizer):
            raise ConfigError(f"paceline.Optimizer wraps a torch.optim optimizer, got {type(inner).__name__}")
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.param_groups = inner.param_groups
        self.state = inner.state
        chosen = policies.parse(policy) if policy is not None else None
        self.live = session.init().live
        self.steps = 0
        if self.live is not None:
            names = {id(tensor): name for name, tensor in model.named_parameters()} if model is not None else {}
            trained = [
                (names.get(id(tensor), f"group{index}.{position}"), tensor, index)
                for index, group in enumerate(self.param_groups)
                for position, tensor in enumerate(group["params"])
                if tensor.requires_grad
            ]
            self.trained: list[Tensor] = [tensor for _, tensor, _ in trained]
            self.live.begin(layout_of(trained), self.trained, describe(inner), chosen)
        self.started = time.monotonic()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One iteration: run `closure` (zero_grad, forward, backward, return the loss), then exchange.

        Without a closure the gradients must be there already, as after `loss.backward()`.
        """
        if self.live is None:
            self.steps += 1
            return self.inner.step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.live.slow_down(self.started)
        hyper = tuple(hyper_of(group) for group in self.param_groups)
        self.live.exchange([tensor.grad for tensor in self.trained], hyper)
        self.started = time.monotonic()
        return loss

    # torch wraps `step` of every optimizer class in a profiler range, unless it is marked as wrapped already.
    step.hooked = True  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        self._refuse_while_live("saved")
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._refuse_while_live("loaded")
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def _refuse_while_live(self, done: str) -> None:
        if self.live is not None:
            raise PacelineError(f"in a live run the optimizer's state is on the servers: it cannot be {done} here")

    @property
    def global_step(self) -> int:
        """The iteration this worker is about to compute. After a drop or a join it may jump ahead."""
        return self.live.machine.iteration if self.live is not None else self.steps

    @property
    def dropped_share(self) -> float:
        """The share of the shards on which the last gradient did not count."""
        if self.live is None:
            return 0.0
        dropped = self.live.machine.dropped
        return sum(dropped) / len(dropped)

    @property
    def step_was_dropped(self) -> bool:
        """Whether the last gradient counted nowhere."""
        return self.dropped_share == 1.0
