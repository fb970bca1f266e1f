"""LR schedulers that go on with a run: `scheduler = opt.attach(StepLR(opt, 30))`.

A scheduler lives in the script, and every worker has its own. What `state_dict` says of those that are attached goes
into the run's checkpoints, as plain data (numbers, texts, lists), together with the rates they have set. It is that of
the worker with the lowest rank, whose rates the servers use too. A run that is resumed, and a worker that joins or is
started again, has its schedulers go on from there.

A state belongs to an iteration of its worker, and a checkpoint, or a joiner, may be some iterations further. A
scheduler that is stepped after every iteration is stepped as often as is missing. One that is stepped now and then, or
needs to be told something (`ReduceLROnPlateau`), stays as it was: each of its steps is told at once. (If the run is
stopped in the very `step` after which the script would have stepped it, that is not made up for.)
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.runtime.live.protocol import wire

logger = logging.getLogger(__name__)

TELL_S = 0.5
"""How often the states of schedulers that are stepped after every iteration are told."""
SET_BY_SCHEDULERS = ("lr", "initial_lr", "max_lr", "min_lr", "momentum", "betas", "max_momentum", "base_momentum")
"""What schedulers of torch set in parameter groups."""
SCALARS = (bool, int, float, str)

Scheduler = TypeVar("Scheduler", bound=Any)


class SchedulerState(Struct, frozen=True):
    """The state of one scheduler as plain data."""

    kind: str
    state: dict[str, Any]
    every_step: bool
    """Whether it is stepped once in every iteration."""


class States(Struct, frozen=True):
    """The states of a worker's schedulers when it is about to push the gradient of `iteration`."""

    iteration: int
    schedulers: tuple[SchedulerState, ...]
    groups: tuple[dict[str, Any], ...]
    """What the schedulers have set in each parameter group."""


class Attached:
    """A scheduler, and its state when it was last read."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.kind = type(scheduler).__name__
        self.state = self.read()
        self.stepped = self.every_step = False
        """Whether it has changed since the last iteration, and whether it had before that, too."""
        try:
            inspect.signature(scheduler.step).bind()
            self.needs_nothing = True
        except TypeError:
            self.needs_nothing = False

    def read(self) -> dict[str, Any]:
        """Returns its present state as plain data."""
        try:
            return {str(name): plain(value) for name, value in self.scheduler.state_dict().items()}
        except ValueError as error:
            raise ConfigError(f"{self.kind} cannot be kept in checkpoints: its state holds {error}") from None

    def note_changes(self) -> bool:
        """Notes its present state; returns whether the run must be told at once."""
        before, self.state = self.state, self.read()
        stepped = before != self.state
        every_step = stepped and self.stepped and self.needs_nothing
        must_be_told = every_step != self.every_step or (stepped and not every_step)
        self.stepped, self.every_step = stepped, every_step
        return must_be_told

    def restore(self, kept: SchedulerState) -> None:
        """Has it go on from this state; raises `ValueError` if the state cannot be one of this scheduler."""
        if kept.kind != self.kind:
            raise ValueError(f"a {kept.kind}")
        present = self.scheduler.state_dict()
        state = {name: like(value, present[name]) for name, value in kept.state.items() if name in present}
        self.scheduler.load_state_dict({**present, **state})


class LRSchedulers:
    """The schedulers that were attached to an optimizer."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        iteration: Callable[[], int] = lambda: 0,
        keep: Callable[[bytes], None] = lambda states: None,
        begin: wire.Begin | None = None,
        rank: int = 0,
    ) -> None:
        """`keep` has the run keep states, which belong to an `iteration` of this worker; `begin` says how the run
        begins, or goes on, for it. In a world of one there is nothing of these.
        """
        self.optimizer = optimizer
        self.iteration = iteration
        self.keep = keep
        self.attached: list[Attached] = []
        self.told_s = 0.0
        self.warned = False
        self.kept: States | None = None
        """The states that the run has kept."""
        self.goes_on = begin is not None and iteration() > 0
        self.may_warn = begin is not None and (not begin.resumed or rank == 0)
        """Whether this worker warns: one is enough if all of them begin."""
        if begin is not None and begin.schedulers:
            with contextlib.suppress(msgspec.MsgspecError):  # then nothing was kept
                self.kept = msgspec.msgpack.decode(begin.schedulers, type=States)

    def attach(self, scheduler: Scheduler) -> Scheduler:
        """Has a scheduler go on with the run."""
        self.attached.append(Attached(scheduler))
        if self.goes_on:
            self._restore()
        return scheduler

    def _restore(self) -> None:
        """Restores all that are attached: the last one may have set the rates to its beginning."""
        kept = self.kept.schedulers if self.kept is not None else ()
        if len(kept) < len(self.attached):
            self._warn(f"nothing was kept of its {self.attached[-1].kind}, which begins afresh")
            return
        assert self.kept is not None
        try:
            for attached, state in zip(self.attached, kept, strict=False):
                attached.restore(state)
            for group, values in zip(self.optimizer.param_groups, self.kept.groups, strict=True):
                for name in [name for name in SET_BY_SCHEDULERS if name in values]:
                    set_value(group, name, values[name])
        except ValueError as error:
            self._warn(f"its {self.attached[-1].kind} begins afresh: kept was {error}")
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are stepped before the optimizer
            for _ in range(self.kept.iteration, self.iteration()):
                for attached, state in zip(self.attached, kept, strict=False):
                    if state.every_step:
                        attached.scheduler.step()
        for attached in self.attached:
            attached.state = attached.read()

    def report(self) -> None:
        """An iteration is about to be pushed: has the run keep what is new."""
        if not self.attached:
            if self.goes_on and not self.warned and any("initial_lr" in g for g in self.optimizer.param_groups):
                self.warned = True
                self._warn(
                    "an LR scheduler begins afresh unless the script sees to it: "
                    "opt.attach(scheduler) has it go on with the run"
                )
            return
        due = [attached.note_changes() for attached in self.attached]
        now = time.monotonic()
        if any(due) or (now - self.told_s > TELL_S and any(attached.stepped for attached in self.attached)):
            self.told_s = now
            self._tell()

    def report_last(self) -> None:
        """The worker leaves: steps of schedulers since its last iteration belong to the one it does not do."""
        if self.attached and any(attached.state != attached.read() for attached in self.attached):
            for attached in self.attached:
                attached.state = attached.read()
            self._tell()

    def _tell(self) -> None:
        groups = tuple(
            {name: plain(group[name]) for name in SET_BY_SCHEDULERS if name in group}
            for group in self.optimizer.param_groups
        )
        states = tuple(SchedulerState(each.kind, each.state, each.every_step) for each in self.attached)
        self.keep(msgspec.msgpack.encode(States(self.iteration(), states, groups)))

    def _warn(self, what: str) -> None:
        if self.may_warn:
            logger.warning(f"WARNING: this run goes on at iteration {self.iteration()}: {what}")


def plain(value: Any) -> Any:
    """Returns a value of a state as numbers, texts, lists and dicts, or raises `ValueError` with its type."""
    if isinstance(value, Tensor):
        return value.tolist()
    if value is None or type(value) in SCALARS:
        return value
    if isinstance(value, dict) and all(isinstance(key, int | str) for key in value):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, SCALARS):
        return next(kind for kind in SCALARS if isinstance(value, kind))(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a scalar of NumPy
        return plain(value.item())
    raise ValueError(f"a {type(value).__name__}")


def like(value: Any, present: Any) -> Any:
    """Returns a plain value in the types of the present one; raises `ValueError` if it cannot be in its place."""
    if isinstance(present, Tensor):
        return present.new_tensor(value)
    if isinstance(present, dict) and isinstance(value, dict):
        return type(present)({key: like(each, present.get(key)) for key, each in value.items()})
    if isinstance(present, list | tuple) and isinstance(value, list):
        there = [*present, *[None] * max(0, len(value) - len(present))]
        return type(present)([like(each, before) for each, before in zip(value, there, strict=False)])
    if value is None or present is None:
        return value
    scalars = isinstance(value, SCALARS) and isinstance(present, SCALARS)
    if scalars and isinstance(value, str) == isinstance(present, str):
        return value
    raise ValueError(f"a {type(value).__name__} in place of a {type(present).__name__}")


def set_value(group: dict[str, Any], name: str, value: Any) -> None:
    """Sets a value of a parameter group; a tensor stays the tensor it is."""
    present = group.get(name)
    if isinstance(present, Tensor):
        present.fill_(value)
    else:
        group[name] = like(value, present)
