"""Give up a computation whose parameters have become stale, and begin it again on fresh ones (SpecSync).

Sections and algorithms are those of Zhang et al. 2018 (IV and V). Three machines take part; the shards know nothing of
it (V.B: servers are agnostic). A pull that asks for the same
iteration once more is answered like any other, only never parked: its worker had been let through already.

    worker       push i, pull i+1; when all parameters are there: notify the scheduler, compute
    scheduler    on a notice: write down the time, and look again after ABORT_TIME; then, if *others* have given notice
                 more than m * ABORT_RATE times since (m: all workers that are not lost): tell the worker to re-sync
    worker       if it is still computing that iteration, and for the first time: abort, pull again, start over

A notice stands for a push, so the first iteration of an incarnation of a worker has none: nothing was pushed before it
(Algorithm 2, lines 2 and 8 to 10). There is one timer for each worker (V.B), which the next notice sets anew: when an
iteration is over sooner than ABORT_TIME, nobody is told to begin it again.

The window is open on the left and closed on the right: a notice that comes at the very instant at which the timer
fires counts. Such ties are usual in virtual time, since a tuned ABORT_TIME is a difference of two notices; runtimes
deliver messages before they fire timers.

An abort is never late by mistake: a computation that is done beats it, a re-sync for any other iteration is ignored,
and no iteration is aborted twice, so that every one comes to an end.

**Tuning.** Where ABORT_TIME and ABORT_RATE are not fixed, `tune` finds them from what the scheduler has seen, once an
epoch: when every live worker has given notice since the last time, and twice in its incarnation, so that its last
complete iteration is known (Algorithm 1; `policies/specsync_tuning.py`). Until then, and when `tune` finds nothing,
nobody speculates.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from paceline.core.actions import AbortCompute, Send, SetTimer
from paceline.core.events import ComputeAborted, GradientReady, NotifyArrived, ResyncArrived, TimerFired, ViewChanged
from paceline.core.machine import IllegalEvent, Machine, require
from paceline.core.messages import Members, Node, Notify, Resync
from paceline.core.scheduler import SCHEDULER
from paceline.core.worker import Worker

FEW = 64
"""So few notices are not worth looking through."""
MOST = 1000
"""So many notices for each live worker are kept for the next tuning, however long a worker is silent."""


class Speculation(NamedTuple):
    """When a worker's computation is looked at again, and how many pushes of others, as a share of m, end it."""

    abort_time_s: float
    abort_rate: float


class Iteration(NamedTuple):
    """A worker's last complete iteration, from notice to notice."""

    began_s: float
    span_s: float


class Notices(NamedTuple):
    """The notices the scheduler got: when, in order, and from whom."""

    times: Sequence[float]
    workers: Sequence[int]


Tune = Callable[[Notices, Mapping[int, Iteration], int], Speculation | None]
"""Maps the notices since the first of the live workers' last iterations began, these iterations, and m, to the
speculation from now on, if any."""


class SpeculativeWorker(Worker):
    """A worker that gives notice when it begins to compute, and begins again, once, if it is told to."""

    def __init__(self, rank: int, members: Members) -> None:
        super().__init__(rank, members)
        self.has_pushed = False
        self.aborting = False
        """Whether it was told to re-sync, and its computation has not ended yet in one way or the other."""

    def start(self) -> None:
        if self.attempt == 0 and self.has_pushed:
            self.actions.append(Send(SCHEDULER, Notify(self.rank, self.incarnation, self.iteration)))
        super().start()

    def on_resync_arrived(self, event: ResyncArrived) -> None:
        resync = event.resync
        meant = (resync.incarnation, resync.iteration) == (self.incarnation, self.iteration)
        if meant and self.computing and self.attempt == 0 and not self.aborting:
            self.aborting = True
            self.actions.append(AbortCompute(self.iteration, self.attempt))

    def on_compute_aborted(self, event: ComputeAborted) -> None:
        if not self.aborting or (event.iteration, event.attempt) != (self.iteration, self.attempt):
            raise IllegalEvent(
                f"worker {self.rank} did not abort attempt {event.attempt} at iteration {event.iteration}"
            )
        self.computing = self.aborting = False
        self.attempt += 1
        self.pull(list(range(len(self.shards))), self.iteration)

    def on_gradient_ready(self, event: GradientReady) -> None:
        super().on_gradient_ready(event)
        self.aborting = False
        self.has_pushed = True

    def check(self) -> None:
        super().check()
        require(self.computing or not self.aborting, f"worker {self.rank} aborts what it does not compute")
        require(self.attempt <= 1, f"worker {self.rank} is at attempt {self.attempt}")


class Watch(NamedTuple):
    """What a timer was set for: the iteration of `notice`, which began at `since_s`.

    It is judged by the rate that goes with its time, even if an epoch has ended since.
    """

    notice: Notify
    since_s: float
    speculation: Speculation


class Speculator(Machine):
    """The scheduler: it notes who begins an iteration, and has those begin again who began too soon."""

    def __init__(self, in_force: Speculation | None, tune: Tune | None) -> None:
        super().__init__()
        self.in_force = in_force
        """The speculation in force, or None while nobody is to speculate."""
        self.tune = tune
        self.view_number = 0
        self.incarnations: dict[int, int] = {}
        """The live members and their incarnations."""
        self.finished = 0
        """How many workers have done their iterations. They still count in m, as in the scale of a step."""
        self.times: list[float] = []
        self.workers: list[int] = []
        """Who gave the notice of each of `times`, as far back as a watch or the next tuning looks."""
        self.newest: dict[int, tuple[Notify, float]] = {}
        """The last notice of each worker, and its time."""
        self.iterations: dict[int, Iteration] = {}
        """The last complete iteration of each live worker that has given notice twice."""
        self.missing: set[int] = set()
        """Live workers that have not given notice in this epoch."""
        self.timers = 0
        self.watches: dict[int, Watch] = {}
        """timer -> what it was set for, for the last timer of each worker."""
        self.watched: dict[int, int] = {}
        """worker -> its last timer."""
        self.many = FEW
        """With so many notices it is time to forget some."""

    def on_view_changed(self, event: ViewChanged) -> None:
        if event.view.number <= self.view_number:
            return
        before, named = self.incarnations, dict(event.view.members)
        self.view_number, self.incarnations = event.view.number, named
        self.finished = len(event.view.finished)
        for worker in before:
            if named.get(worker) != before[worker]:
                self.missing.discard(worker)
                self.iterations.pop(worker, None)
        for worker, incarnation in named.items():
            if before.get(worker) != incarnation:
                self.missing.add(worker)

    def on_notify_arrived(self, event: NotifyArrived) -> None:
        notice, at = event.notify, event.at
        worker = notice.worker
        before = self.newest.get(worker)
        if before is not None and place(before[0]) >= place(notice):
            return
        self.times.append(at)
        self.workers.append(worker)
        self.newest[worker] = (notice, at)
        if self.incarnations.get(worker) != notice.incarnation:
            return  # it counts as a push, but its sender is no member
        if before is not None and before[0].incarnation == notice.incarnation and at > before[1]:
            self.iterations[worker] = Iteration(before[1], at - before[1])
        self.missing.discard(worker)
        if self.in_force is not None:
            self.timers += 1
            self.watches.pop(self.watched.get(worker, 0), None)
            self.watched[worker] = self.timers
            self.watches[self.timers] = Watch(notice, at, self.in_force)
            self.actions.append(SetTimer(self.timers, self.in_force.abort_time_s))

    def on_timer_fired(self, event: TimerFired) -> None:
        watch = self.watches.pop(event.timer, None)
        if watch is None:
            return  # the worker has given notice again
        notice = watch.notice
        here = self.incarnations.get(notice.worker) == notice.incarnation
        if not here or self.newest[notice.worker][0] != notice:
            return
        if self.uncovered(watch) > self.m * watch.speculation.abort_rate:
            resync = Resync(notice.worker, notice.incarnation, notice.iteration)
            self.actions.append(Send(Node("worker", notice.worker), resync))

    @property
    def m(self) -> int:
        return len(self.incarnations) + self.finished

    def uncovered(self, watch: Watch) -> int:
        """Returns how many pushes of others a worker would see if it began again now."""
        due_s = watch.since_s + watch.speculation.abort_time_s
        first, last = bisect_right(self.times, watch.since_s), bisect_right(self.times, due_s)
        return (last - first) - self.workers[first:last].count(watch.notice.worker)

    def settle(self) -> None:
        """Ends an epoch when everybody has given notice in it, and the spans of all are known."""
        if len(self.times) >= self.many:
            self.forget()
            self.many = 2 * len(self.times) + FEW
        if self.missing or not self.incarnations or self.iterations.keys() != self.incarnations.keys():
            return
        if self.tune is not None:
            self.in_force = self.tune(Notices(self.times, self.workers), self.iterations, self.m)
        self.missing = set(self.incarnations)
        self.forget()

    def forget(self) -> None:
        """Forgets the notices that neither a watch nor the next tuning may still ask for."""
        gone = len(self.times)
        if self.tune is not None:
            begun_s = min(map(self.next_began_s, self.incarnations), default=math.inf)
            gone = max(bisect_right(self.times, begun_s), gone - MOST * len(self.incarnations))
        oldest_s = min((watch.since_s for watch in self.watches.values()), default=math.inf)
        gone = min(gone, bisect_right(self.times, oldest_s))
        del self.times[:gone], self.workers[:gone]

    def next_began_s(self, worker: int) -> float:
        """Returns the earliest beginning of the iteration that will be this worker's last complete one at the next
        tuning.

        While one worker is silent others go on, and theirs move on with them. The silent one's does not, so there is a
        limit.
        """
        if worker not in self.missing and worker in self.iterations:
            return self.iterations[worker].began_s
        notice, at = self.newest.get(worker, (None, math.inf))
        return at if notice is not None and notice.incarnation == self.incarnations[worker] else math.inf

    def check(self) -> None:
        require(len(self.times) == len(self.workers), "each notice has a time and a worker")
        require(self.missing <= self.incarnations.keys(), f"{self.missing} are waited for, but some are no members")
        require(self.iterations.keys() <= self.incarnations.keys(), "iterations are kept of members only")


def place(notice: Notify) -> tuple[int, int]:
    """Returns the order of a worker's notices: one that does not rise is a copy, or comes from a former incarnation."""
    return notice.incarnation, notice.iteration
