"""The steps of `paceline.Optimizer`: in a world of one, and in a live run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.core.messages import MOST_WEIGHT
from paceline.errors import ConfigError, PacelineError
from paceline.half_precision import Masters, widened
from paceline.local_training import RoundsAlone
from paceline.lr_schedulers import LRSchedulers
from paceline.tensors.optimizers import Extras, hyper_of
from paceline.tensors.piece_optimizers import Hyper

if TYPE_CHECKING:
    from paceline.runtime.live.trainer.participant import Participant

Groups = list[dict[str, Any]]


class StepsHere:
    """Takes the steps of the inner optimizer, with clipping and the schedule around them."""

    def __init__(self, inner: torch.optim.Optimizer, extras: Extras, rounds: RoundsAlone | None = None) -> None:
        """With `rounds` there are exchanges, with nobody, where a live run has them."""
        self.rounds = rounds
        self.inner = inner
        self.clips = [norm for norm in (extras.clip, extras.clip_mean) if norm is not None]
        self.step_schedule = extras.step_schedule()
        self.count = 0

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Takes a step in a world of one."""
        loss = self._step(closure)
        if self.rounds is not None:
            self.rounds.note_step()
        return loss

    def skip(self) -> None:
        """Leaves a step out in a world of one; in a round of local steps it counts."""
        if self.rounds is not None:
            self.count += 1
            self.rounds.note_step()

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        self.count += 1
        if not self.clips and self.step_schedule.schedule is None:
            return self.inner.step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for norm in self.clips:  # one worker's gradient is the mean
            clip(self.inner.param_groups, norm)
        self.scheduled_step()
        return loss

    def scheduled_step(self) -> None:
        """Takes a step at the rate the schedule has come to."""
        groups = self.inner.param_groups
        if self.step_schedule.schedule is None:
            self.inner.step()
            return
        self.step_schedule.advance(1)
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * self.step_schedule.factor
        self.inner.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


class LiveSteps:
    """Takes the steps of a live run: one at a time, in one thread."""

    def __init__(
        self, participant: Participant, inner: torch.optim.Optimizer, norm: float | None, schedulers: LRSchedulers
    ) -> None:
        """`norm` bounds this worker's whole gradient, before it is sliced."""
        self.participant = participant
        self.inner = inner
        self.norm = norm
        self.schedulers = schedulers
        self.trained, self.frozen = trained_and_frozen(inner)
        self.hyper = HyperParameters()
        self.stepping = threading.RLock()
        """Held by the thread that is in a step."""
        self.started = time.monotonic()
        """When the present iteration began."""
        self.masters: Masters | None = None
        """The float32 masters of parameters in half precision."""

    def follow(self, masters: Masters) -> None:
        """Has the model have what the servers answer for its masters, rounded."""
        self.masters = masters
        masters.round()
        self.participant.after_load(masters.round)

    def gradients(self) -> list[Tensor | None]:
        """Returns the gradients of the trained tensors, as they are pushed."""
        if self.masters is None:
            return [tensor.grad for tensor in self.trained]
        self.masters.check()
        return [widened(tensor.grad) for tensor in self.trained]

    def acquire(self) -> None:
        """Begins a step, unless one is under way in another thread."""
        if not self.stepping.acquire(blocking=False):
            raise PacelineError(
                "step was called from several threads at once: a worker has one gradient and one model at a time; call "
                "step from one thread, or hold a lock from zero_grad to the end of step"
            )

    def release(self) -> None:
        """Ends a step."""
        self.stepping.release()

    def compute(self, closure: Callable[[], Any] | None) -> Any:
        """Runs the closure, and returns what it does."""
        if closure is None:
            self.participant.note_missing_closure()
            return None
        barrier = self.participant.participation.barrier
        barrier.in_step = True
        self.participant.clock.prepared()
        try:
            with torch.enable_grad():
                return self.participant.run_closure(closure, self.started)
        finally:
            barrier.in_step = False

    def exchange(self, weight: float | None = None) -> None:
        """Hands the gradients in; returns when the model holds the parameters of the next iteration."""
        self.check_frozen()
        groups = self.inner.param_groups
        if self.norm is not None:
            clip(groups, self.norm)
        clock = self.participant.clock
        clock.computed()
        self.schedulers.report()
        self.participant.slow_down(self.started)
        clock.injected()
        self.participant.exchange(self.gradients(), self.hyper.of(groups), weight)
        self.participant.pass_slow_link()

    def check_frozen(self) -> None:
        """Refuses a gradient of a parameter that was frozen."""
        if self.frozen and any(tensor.grad is not None for tensor in self.frozen):
            raise PacelineError(
                "a parameter that was frozen has a gradient: unfreeze before paceline.Optimizer is made, and freeze "
                "it after that until it is to be trained"
            )

    def skip(self) -> None:
        """Hands in an iteration without a gradient."""
        self.participant.clock.computed()
        self.schedulers.report()
        self.participant.slow_down(self.started)
        self.participant.clock.injected()
        self.participant.skip(self.hyper.of(self.inner.param_groups))

    def begin_iteration(self) -> None:
        """The script is about to compute."""
        self.started = time.monotonic()

    def fetch_state(self) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """Yields what servers' optimizers have learned, by trained tensor; nothing without servers."""
        if states := self.participant.fetch_state():
            yield from zip(self.trained, states, strict=True)


class HyperParameters:
    """The hyper-parameters of parameter groups, worked out anew only when a value has changed."""

    def __init__(self) -> None:
        self.raw: list[list[Any]] = []
        self.known: tuple[Hyper, ...] = ()

    def of(self, groups: Groups) -> tuple[Hyper, ...]:
        """Returns the hyper-parameters of these groups."""
        raw = [[_as_is(value) for key, value in group.items() if key != "params"] for group in groups]
        if raw != self.raw:
            self.raw = raw
            self.known = tuple(hyper_of(group) for group in groups)
        return self.known


def _as_is(value: Any) -> Any:
    """Returns what a hyper-parameter is now: schedulers change one that is a tensor in place."""
    if isinstance(value, Tensor):
        return value.tolist()
    return tuple(map(_as_is, value)) if isinstance(value, tuple | list) else value


def tensors_of(groups: Groups) -> list[Tensor]:
    """Returns the tensors of these parameter groups."""
    return [tensor for group in groups for tensor in group["params"]]


def trained_and_frozen(inner: torch.optim.Optimizer) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Returns an optimizer's tensors that take gradients, and those that do not."""
    every = tensors_of(inner.param_groups)
    return [tensor for tensor in every if tensor.requires_grad], [each for each in every if not each.requires_grad]


def check_weight(weight: float) -> None:
    """Refuses what no gradient can weigh."""
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not number or not 0 < weight <= MOST_WEIGHT:
        raise ConfigError(f"weight={weight!r} is out of range: a number above 0, at most {MOST_WEIGHT:g}")


def clip(groups: Groups, norm: float) -> None:
    """Bounds the norm of the whole gradient."""
    nn.utils.clip_grad_norm_(tensors_of(groups), norm)
