"""`paceline.Optimizer`: the one line that makes a training script distributed.

    opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), policy="ssp:staleness=3")

It is a `torch.optim.Optimizer` that shares the inner one's parameter groups, so schedulers and `zero_grad`
work as before. `step(closure)` computes, pushes the gradient, and returns when the parameters of the next
iteration are in the model. In a world of one it is the inner optimizer's own `step`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks as GLOBAL_AFTER
from torch.optim.optimizer import _global_optimizer_pre_hooks as GLOBAL_BEFORE

from paceline import session
from paceline.core import spec
from paceline.core.local_steps import LocalSteps, make
from paceline.core.policy import Policy
from paceline.errors import ConfigError, PacelineError
from paceline.half_precision import Masters, need_masters
from paceline.local_training import RoundsAlone, averaged_buffers, check_options, outer_of
from paceline.lr_schedulers import LRSchedulers, Scheduler
from paceline.optimizer_steps import LiveSteps, StepsHere, check_weight, tensors_of, trained_and_frozen
from paceline.policies import with_local_steps
from paceline.runtime.live.system.training_end import Stopped
from paceline.tensors import state
from paceline.tensors.layout import layout_of
from paceline.tensors.optimizers import Extras, describe, read_extras

if TYPE_CHECKING:
    from paceline.runtime.live.trainer.model_description import ModelDescription


def choose(
    policy: str | Policy | None, local_steps: int | str | None, every_s: float | None, outer: str | None
) -> tuple[Policy | None, LocalSteps | None]:
    """Returns the policy that a script chooses, if one, and its local steps, if any."""
    if policy is None:
        return None, make(local_steps, every_s, outer)
    return with_local_steps.parse(policy, local_steps, every_s, outer)


def read_options(text: str) -> Extras:
    """Returns the options of `Optimizer` from their text."""
    _, arguments = spec.split(f"options:{text}") if text else ("", {})
    extras = read_extras(arguments, "paceline.Optimizer")
    if extras.schedule is not None and not extras.batch:
        raise ConfigError("a schedule counts samples: say how many a gradient stands for, as batch=64, in the options")
    return extras


class Optimizer(torch.optim.Optimizer):
    """A torch optimizer whose steps are taken on the servers of a live run, or here by a peer if there are none.

    `policy` says who waits for whom (`paceline run --policy` beats it), and whether a step on arrival takes lr/N or, as
    with "asp:scale=none", the whole learning rate. `model` is optional: with it the saved
    parameters bear the model's names, and under specsync forward can be interrupted, not only backward. `overlap`
    sends gradients while backward runs; it refuses what changes them afterwards (accumulation, clipping, GradScaler).
    `options` are what happens around the optimizer, as text: "clip_mean=1" (the servers bound the norm of the mean
    gradient, as `clip_grad_norm_` does in one process), "clip=1" (each worker bounds its own gradient's norm),
    "ema=0.999" (the servers keep a moving average of the parameters, saved beside the model), "stretch=true" (betas
    to the power 1/N where gradients are applied on arrival), "schedule=cosine(samples=60000),batch=64" (a schedule
    that counts samples).

    `local_steps` has each worker train alone, with the inner optimizer, for rounds of so many steps between exchanges:
    a number, or "auto". `every_s` is the length of a round in seconds instead. What a round has learned is stepped on
    by the servers' optimizer, `outer`: "nesterov(lr=0.7,momentum=0.9)" if none is named, "average", or any other
    (docs/local-steps.md). `paceline run --local-steps` beats these, and they may be in the policy's text.

    Without servers, parameters lie in other memory after each step (docs/policies/hop.md), and under BSP with one
    server they move if that is restarted or gets company: hold on to parameters and the model, never across a step to a
    `state_dict()`, `.data`, `detach()` or `numpy()` of them, unless cloned.
    """

    _step_supports_amp_scaling = True
    live: LiveSteps | None
    """The steps of a live run; None in a world of one."""
    next_weight: float | None = None
    """What the gradient of the next step weighs, if `step` is not told: for loops that are not the script's."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        policy: str | Policy | None = None,
        model: nn.Module | None = None,
        overlap: bool = False,
        options: str | Extras = "",
        local_steps: int | str | None = None,
        every_s: float | None = None,
        outer: str | None = None,
    ) -> None:
        if not isinstance(inner, torch.optim.Optimizer):
            raise ConfigError(f"paceline.Optimizer wraps a torch.optim optimizer, got {type(inner).__name__}")
        self.share(inner)
        extras = read_options(options) if isinstance(options, str) else options
        chosen, local = choose(policy, local_steps, every_s, outer)
        if overlap and extras.clip is not None:
            raise ConfigError("clip changes gradients after backward: overlap=True has sent them by then")
        run = session.run_of_worker()
        self.world = session.init()
        if run is not None and run.config.local_steps is not None:
            local = run.config.local_steps
        if local is not None:
            check_options(extras, overlap)
        alone = RoundsAlone(inner, local) if local is not None and run is None else None
        self.here = StepsHere(inner, extras, alone)
        self.looks_for_end = False
        """Whether the script has asked for `done`: then it goes on when the run has ended."""
        self.sends_early = overlap and run is not None
        if run is None:
            self.schedulers = LRSchedulers(inner)
            return
        described = self._describe(model, extras, run.config.slicing, local)
        if overlap and self.masters is not None:
            raise ConfigError("overlap=True sends float32 gradients while backward runs: these parameters are halves")
        step = self.here.scheduled_step
        if local is None:
            participant, begin = session.take_part(run, described, chosen, overlap, inner, step)
        else:
            participant, begin = session.take_part_in_rounds(run, described, chosen, inner, step, local)
        for group, current in zip(self.param_groups, (begin.hyper if local is None else None) or (), strict=False):
            group.update(current)
        participation = participant.participation
        self.schedulers = LRSchedulers(
            inner, lambda: participant.iteration, participation.keep_schedulers, begin, run.rank
        )
        participation.before_leaving = self.schedulers.report_last
        self.live = LiveSteps(participant, inner, extras.clip, self.schedulers)
        if self.masters is not None:
            self.live.follow(self.masters)

    def share(self, inner: torch.optim.Optimizer) -> None:
        """Makes this an optimizer that has the groups, the state and the hooks of another."""
        self.live = None
        torch.optim.Optimizer.__init__(self, inner.param_groups, inner.defaults)
        self.inner = inner
        self.param_groups = inner.param_groups
        self.state = inner.state
        self._optimizer_step_pre_hooks = inner._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = inner._optimizer_step_post_hooks

    def _describe(
        self, model: nn.Module | None, extras: Extras, slicing: str, local: LocalSteps | None
    ) -> ModelDescription:
        from paceline.runtime.live.trainer.model_description import ModelDescription

        given = dict(model.named_parameters()) if model is not None else {}
        names = {id(tensor): name for name, tensor in given.items()}
        triples = [
            (names.get(id(tensor), f"group{index}.{position}"), tensor, index)
            for index, group in enumerate(self.param_groups)
            for position, tensor in enumerate(group["params"])
        ]
        trained, _ = trained_and_frozen(self.inner)
        self.masters = Masters(trained) if need_masters(trained) else None
        if local is not None and self.masters is not None:
            raise ConfigError(
                "local steps are taken by the script's optimizer, in float32: these parameters are halves"
            )
        own = self.masters.masters if self.masters is not None else trained
        places = [(name, group) for name, tensor, group in triples if tensor.requires_grad]
        travels = [(name, tensor, group) for (name, group), tensor in zip(places, own, strict=True)]
        buffers = dict(model.named_buffers()) if model is not None else {}
        if local is None:
            described = describe(self.inner, extras)
        else:
            count = len(self.param_groups)
            averaged = averaged_buffers(local, buffers, trained)
            travels += [(name, tensor, count) for name, tensor in averaged]
            described = outer_of(local, extras, count, buffers=bool(averaged))
        layout = layout_of(travels, described.borders, slicing)
        described.check(layout)
        tensors = [tensor for _, tensor, _ in travels]
        ids = {id(tensor) for tensor in (*trained, *tensors)}
        buffers = {name: tensor for name, tensor in buffers.items() if id(tensor) not in ids}
        frozen = {name: tensor for name, tensor, _ in triples} | given
        others = {name: tensor for name, tensor in frozen.items() if id(tensor) not in ids} | buffers
        learned = state.from_torch(self.inner, trained, layout) if local is None else state.nothing(layout)
        every = model.named_parameters(remove_duplicate=False) if model is not None else ()
        aliases = {name: names[id(tensor)] for name, tensor in every if names[id(tensor)] != name}
        rounded = self.masters is not None
        return ModelDescription(layout, tensors, described, learned, others, buffers, aliases, model, local, rounded)

    def step(self, closure: Callable[[], Any] | None = None, weight: float | None = None) -> Any:
        """One iteration: run `closure` (zero_grad, forward, backward, return the loss), then exchange.

        Without a closure the gradients must be there already, as after `loss.backward()`. `weight` is how much the
        gradient counts beside the others', as its tokens; if it is not given, the samples drawn from a
        `paceline.Sampler` for this step, and 1 without one.
        """
        weight = self.next_weight if weight is None else weight
        if weight is not None:
            check_weight(weight)
        if self.live is None or self.live.participant.steps_here:
            return self._step(closure, weight)  # the inner one takes the step, and is watched
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks or GLOBAL_BEFORE or GLOBAL_AFTER
        watched = hooks or torch._C._autograd._profiler_enabled()
        return self._watched_step(closure, weight) if watched else self._step(closure, weight)

    # torch wraps `step` of every optimizer class in what calls hooks and is seen in profiles, unless it is marked as
    # wrapped already. Those are some twenty calls more, so it is done where there is somebody to notice.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Callable[[], Any] | None = None, weight: float | None = None) -> Any:
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        try:
            if self.world.stopping and self._has_ended():
                self.world.end.check()
                return None
            if self.live is None:
                return self.here.step(closure) if self._scaler_allows() else self.here.skip()
            self.live.acquire()
            try:
                loss = self.live.compute(closure)
                if self._scaler_allows():
                    self._take_part(self.live, partial(self.live.exchange, weight))
                else:
                    self.skip_step()
                return loss
            finally:
                self.live.release()
        finally:
            torch.set_grad_enabled(before)

    _watched_step = torch.optim.Optimizer.profile_hook_step(_step)

    def _take_part(self, live: LiveSteps, exchange: Callable[[], None]) -> None:
        """Does an exchange of this iteration; if the run has ended in it, so has this script's training."""
        try:
            exchange()
        except Stopped as stopped:
            if not (self.looks_for_end and stopped.whole):
                raise
            live.participant.retire()
        live.begin_iteration()

    def _has_ended(self) -> bool:
        """The run is to end: returns whether this script's training has; a script that does not look is ended here."""
        if not self.looks_for_end:
            raise Stopped
        if self.live is not None:
            self.live.participant.retire()
        return True

    @property
    def done(self) -> bool:
        """Whether the run has ended: its target is reached, or somebody has called `paceline.stop()` or pressed Ctrl-C.

        `while not opt.done:` has a script go on after its loop then. One that never asks is ended by `step`; once it
        has asked, `step` returns at the end of an iteration as ever, and does nothing from then on.
        """
        self.looks_for_end = True
        return self.world.stopping and self._has_ended()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.live is not None:
            self.live.participant.forget_gradients()
        super().zero_grad(set_to_none)

    def attach(self, scheduler: Scheduler) -> Scheduler:
        """Have an LR scheduler go on with the run: `scheduler = opt.attach(StepLR(opt, 30))`.

        Its state is in the run's checkpoints, and it is given back when the run is resumed, and to a worker that joins
        or is started again. Attach all of a script's schedulers, in the same order on every worker.
        """
        return self.schedulers.attach(scheduler)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.live is not None:
            raise PacelineError("in a live run all parameter groups must be there when paceline.Optimizer is made")
        super().add_param_group(param_group)

    def skip_step(self) -> None:
        """An iteration without a gradient, so that nobody waits for this worker's."""
        if self.world.stopping and self._has_ended():
            self.world.end.check()
            return
        if self.live is None:
            self.here.skip()
            return
        self.live.acquire()
        try:
            self._take_part(self.live, self.live.skip)
        finally:
            self.live.release()

    def _scaler_allows(self) -> bool:
        """What a GradScaler has found: False if it found inf; otherwise the gradients are scaled back here.

        A scaler calls the `step` of an optimizer that claims to support it also when it found inf, so that a live
        run learns of the skipped step.
        """
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and self.sends_early:
            raise PacelineError("a GradScaler changes gradients after backward: overlap=True has sent them by then")
        if found_inf is not None and found_inf.item():
            return False
        if scale is not None:
            gradients = [tensor.grad for tensor in tensors_of(self.param_groups)]
            torch._foreach_mul_([gradient for gradient in gradients if gradient is not None], 1.0 / scale.item())
        return True

    def state_dict(self) -> dict[str, Any]:
        """The state as the inner optimizer would have it; in a live run it is fetched from the servers, if any."""
        if self.live is not None:
            for tensor, learned in self.live.fetch_state():
                if learned:
                    self.inner.state[tensor] = learned
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.live is not None and not self.live.participant.steps_here:
            raise PacelineError(
                "in a live run the state is on the servers: load it into the torch optimizer, then wrap that"
            )
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    @property
    def global_step(self) -> int:
        """The iteration this worker is about to compute. After a drop or a join it may jump ahead."""
        return self.live.participant.iteration if self.live is not None else self.here.count

    @property
    def at_round_end(self) -> bool:
        """Whether the model is what the last exchange gave, with no local step since; always, without local steps."""
        rounds = self.here.rounds if self.live is None else self.live.participant
        return getattr(rounds, "steps_since_exchange", 0) == 0

    @property
    def dropped_share(self) -> float:
        """The share of the shards on which the last gradient did not count."""
        if self.live is None:
            return 0.0
        dropped = self.live.participant.dropped
        return sum(dropped) / len(dropped)

    @property
    def step_was_dropped(self) -> bool:
        """Whether the last gradient counted nowhere."""
        return self.dropped_share == 1.0
