"""`paceline.Optimizer`: the one line that makes a training script distributed.

    opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), policy="ssp:staleness=3")

It is a `torch.optim.Optimizer` that shares the inner one's parameter groups, so schedulers and `zero_grad`
work as before. `step(closure)` computes, pushes the gradient, and returns when the parameters of the next
iteration are in the model. In a world of one it is the inner optimizer's own `step`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks as GLOBAL_AFTER
from torch.optim.optimizer import _global_optimizer_pre_hooks as GLOBAL_BEFORE

from paceline import policies, session
from paceline.core import spec
from paceline.core.policy import Policy
from paceline.errors import ConfigError, PacelineError
from paceline.tensors import state
from paceline.tensors.layout import layout_of
from paceline.tensors.optimizers import Extras, describe, hyper_of, read_extras
from paceline.tensors.steppers import Hyper

if TYPE_CHECKING:
    from paceline.runtime.live.peer.peer import LivePeer
    from paceline.runtime.live.worker.description import Described
    from paceline.runtime.live.worker.worker import LiveWorker


def read_options(text: str) -> Extras:
    """The options of `Optimizer` from their text."""
    _, arguments = spec.split(f"options:{text}") if text else ("", {})
    extras = read_extras(arguments, "paceline.Optimizer")
    if extras.schedule is not None and not extras.batch:
        raise ConfigError("a schedule counts samples: say how many a gradient stands for, as batch=64, in the options")
    return extras


def _as_is(value: Any) -> Any:
    """What a hyper-parameter is now: schedulers change one that is a tensor in place."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return tuple(map(_as_is, value)) if isinstance(value, tuple | list) else value


class Optimizer(torch.optim.Optimizer):
    """A torch optimizer whose steps are taken on the servers of a live run, or here by a peer if there are none.

    `policy` says who waits for whom (`paceline run --policy` beats it). `model` is optional: with it the saved
    parameters bear the model's names, and under specsync forward can be interrupted, not only backward. `overlap`
    sends gradients while backward runs; it refuses what changes them afterwards (accumulation, clipping, GradScaler).
    `options` are what happens around the optimizer, as text: "clip=1" (each worker bounds its gradient's norm),
    "ema=0.999" (the servers keep a moving average of the parameters, saved beside the model), "stretch=true" (betas
    to the power 1/N where gradients are applied on arrival), "schedule=cosine(samples=60000),batch=64" (a schedule
    that counts samples).

    Without servers, parameters lie in other memory after each step (docs/policies/hop.md), and under BSP with one
    server they move if that is restarted or gets company: hold on to parameters and the model, never across a step to a
    `state_dict()`, `.data`, `detach()` or `numpy()` of them, unless cloned.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        policy: str | Policy | None = None,
        model: nn.Module | None = None,
        overlap: bool = False,
        options: str | Extras = "",
    ) -> None:
        if not isinstance(inner, torch.optim.Optimizer):
            raise ConfigError(f"paceline.Optimizer wraps a torch.optim optimizer, got {type(inner).__name__}")
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.param_groups = inner.param_groups
        self.state = inner.state
        self._optimizer_step_pre_hooks = inner._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = inner._optimizer_step_post_hooks
        self.extras = read_options(options) if isinstance(options, str) else options
        self.pace = self.extras.pace()
        if overlap and self.extras.clip is not None:
            raise ConfigError("clip changes gradients after backward: overlap=True has sent them by then")
        chosen = policies.parse(policy) if policy is not None else None
        self.live = session.take_part(chosen, inner, self._step_inner)
        self.overlap = overlap
        self.steps = 0
        self.raw_hyper: list[list[Any]] = []
        self.hyper: tuple[Hyper, ...] = ()
        if self.live is not None:
            given = [tensor for group in self.param_groups for tensor in group["params"]]
            self.trained = [tensor for tensor in given if tensor.requires_grad]
            self.frozen = [tensor for tensor in given if not tensor.requires_grad]
            hyper = self.live.begin(self._describe(model), chosen, overlap)
            for group, current in zip(self.param_groups, hyper or (), strict=False):
                group.update(current)
        self.started = time.monotonic()

    def _describe(self, model: nn.Module | None) -> Described:
        from paceline.runtime.live.worker.description import Described

        given = dict(model.named_parameters()) if model is not None else {}
        names = {id(tensor): name for name, tensor in given.items()}
        triples = [
            (names.get(id(tensor), f"group{index}.{position}"), tensor, index)
            for index, group in enumerate(self.param_groups)
            for position, tensor in enumerate(group["params"])
        ]
        described = describe(self.inner, self.extras)
        assert self.live is not None
        slicing = self.live.config.slicing
        layout = layout_of((triple for triple in triples if triple[1].requires_grad), described.borders, slicing)
        described.check(layout)
        trained = {id(tensor) for tensor in self.trained}
        buffers = dict(model.named_buffers()) if model is not None else {}
        frozen = {name: tensor for name, tensor, _ in triples} | given
        others = {name: tensor for name, tensor in frozen.items() if id(tensor) not in trained} | buffers
        learned = state.from_torch(self.inner, self.trained, layout)
        every = model.named_parameters(remove_duplicate=False) if model is not None else ()
        aliases = {name: names[id(tensor)] for name, tensor in every if names[id(tensor)] != name}
        return Described(layout, self.trained, described, learned, others, buffers, aliases, model)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One iteration: run `closure` (zero_grad, forward, backward, return the loss), then exchange.

        Without a closure the gradients must be there already, as after `loss.backward()`.
        """
        if self.live is None or not self.live.has_servers:
            return self._step(closure)  # the inner one takes the step, and is watched
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks or GLOBAL_BEFORE or GLOBAL_AFTER
        watched = hooks or torch._C._autograd._profiler_enabled()
        return self._watched_step(closure) if watched else self._step(closure)

    # torch wraps `step` of every optimizer class in what calls hooks and is seen in profiles, unless it is marked as
    # wrapped already. Those are some twenty calls more, so it is done where there is somebody to notice.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        try:
            if self.live is None:
                return self._step_alone(closure) if self._scaler_allows() else None
            return self._step_live(self.live, closure)
        finally:
            torch.set_grad_enabled(before)

    _watched_step = torch.optim.Optimizer.profile_hook_step(_step)

    def _step_live(self, live: LiveWorker | LivePeer, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            loss = self._compute(closure)
        elif live.aborting is not None:
            live.aborting.warn()
        if self.overlap and getattr(self, "found_inf", None) is not None:
            raise PacelineError("a GradScaler changes gradients after backward: overlap=True has sent them by then")
        if not self._scaler_allows():
            self.skip_step()
            return loss
        if self.frozen:
            self._refuse_late_parameters()
        if self.extras.clip is not None:
            self._clip(self.extras.clip)
        live.slow_down(self.started)
        live.exchange([tensor.grad for tensor in self.trained], self._hyper())
        live.pass_slow_link()
        self.started = time.monotonic()
        return loss

    def _compute(self, closure: Callable[[], Any]) -> Any:
        try:
            with torch.enable_grad():
                if self.live is not None and self.live.aborting is not None:
                    return self.live.aborting.run(closure, self.started)
                return closure()
        except BaseException:
            if self.live is not None:
                self.live.forget_staged()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.live is not None:
            self.live.forget_staged()
            if self.live.aborting is not None:
                self.live.aborting.rewind.before_clearing()
        super().zero_grad(set_to_none)

    def _step_alone(self, closure: Callable[[], Any] | None) -> Any:
        """The inner optimizer's own step, with clipping and the schedule around it."""
        self.steps += 1
        if self.extras.clip is None and self.pace.schedule is None:
            return self.inner.step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.extras.clip is not None:
            self._clip(self.extras.clip)
        self._step_inner()
        return loss

    def _step_inner(self) -> None:
        """A step of the inner optimizer at the rate the schedule has come to."""
        if self.pace.schedule is None:
            self.inner.step()
            return
        self.pace.advance(1)
        rates = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate * self.pace.factor
        self.inner.step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate

    def _clip(self, norm: float) -> None:
        """Bound the norm of this worker's whole gradient, before it is sliced."""
        every = [tensor for group in self.param_groups for tensor in group["params"]]
        nn.utils.clip_grad_norm_(every, norm)

    def _refuse_late_parameters(self) -> None:
        """A parameter that was frozen when this optimizer was made is not on the servers."""
        if any(tensor.grad is not None for tensor in self.frozen):
            raise PacelineError(
                "a parameter that was frozen has a gradient: unfreeze before paceline.Optimizer is made"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "live", None) is not None:
            raise PacelineError("in a live run all parameter groups must be there when paceline.Optimizer is made")
        super().add_param_group(param_group)

    def skip_step(self) -> None:
        """An iteration without a gradient, so that nobody waits for this worker's."""
        if self.live is None:
            return
        self.live.slow_down(self.started)
        self.live.skip(self._hyper())
        self.started = time.monotonic()

    def _hyper(self) -> tuple[Hyper, ...]:
        """The groups' hyper-parameters; worked out anew only when a value has changed."""
        raw = [[_as_is(value) for key, value in group.items() if key != "params"] for group in self.param_groups]
        if raw != self.raw_hyper:
            self.raw_hyper = raw
            self.hyper = tuple(hyper_of(group) for group in self.param_groups)
        return self.hyper

    def _scaler_allows(self) -> bool:
        """What a GradScaler has found: False if it found inf; otherwise the gradients are scaled back here.

        A scaler calls the `step` of an optimizer that claims to support it also when it found inf, so that a live
        run learns of the skipped step.
        """
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and found_inf.item():
            return False
        if scale is not None:
            gradients = [tensor.grad for group in self.param_groups for tensor in group["params"]]
            torch._foreach_mul_([gradient for gradient in gradients if gradient is not None], 1.0 / scale.item())
        return True

    def state_dict(self) -> dict[str, Any]:
        """The state as the inner optimizer would have it; in a live run it is fetched from the servers, if any."""
        if self.live is not None and self.live.has_servers:
            states = state.to_torch(self.live.fetch_state(), self.live.layout)
            for tensor, learned in zip(self.trained, states, strict=True):
                if learned:
                    self.inner.state[tensor] = learned
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.live is not None and self.live.has_servers:
            raise PacelineError(
                "in a live run the state is on the servers: load it into the torch optimizer, then wrap that"
            )
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    @property
    def global_step(self) -> int:
        """The iteration this worker is about to compute. After a drop or a join it may jump ahead."""
        return self.live.iteration if self.live is not None else self.steps

    @property
    def dropped_share(self) -> float:
        """The share of the shards on which the last gradient did not count."""
        if self.live is None:
            return 0.0
        dropped = self.live.dropped
        return sum(dropped) / len(dropped)

    @property
    def step_was_dropped(self) -> bool:
        """Whether the last gradient counted nowhere."""
        return self.dropped_share == 1.0
