"""The scheduler that plans barriers: it monitors, predicts and plans, for all shards at once.

(Zhao et al. 2021, Figure 5.) *Monitor*: each push of each worker is noted, until everybody has made two since the last
barrier. *Predict*: from a worker's latest push on, its next `lookahead` iterations end one predicted interval after the
other. *Plan*: one end of each worker is chosen so that the first to arrive waits least (`policies/zipline.py`), and the
shards are told. The plan is over when everybody in it has come to its stop or is gone; then it begins again.
`core/planned_barrier.py` says why this cannot hang.

An interval with a barrier in it says how long a worker waited, not how fast it is: it is never looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.core.actions import Send
from paceline.core.events import NotifyArrived, ViewChanged
from paceline.core.machine import Machine, require
from paceline.core.messages import Members, Node, Plan, Process

PUSHES = 2
"""Each worker must have made so many pushes since the barrier: an interval lies between two of them."""
GRACE = 0.1
"""An iteration of which less than this share is left may be over before the plan arrives, so nobody stops at it."""
DUE = 1e-6
"""With a lookahead of 1 there is no other. Only an iteration that is due, but for rounding, is left out: its worker is
taken to have pushed at this same instant."""


class IntervalPredictor(Protocol):
    """Predicts how long a worker's next iterations will take, from how long those before took."""

    def note(self, interval_s: float) -> None: ...

    def next_s(self) -> float: ...


class ChosenBarrier(Protocol):
    """A barrier: when the last worker arrives, how long the first then has waited, and the index of each one's stop."""

    @property
    def time(self) -> float: ...

    @property
    def wait(self) -> float: ...

    @property
    def iterations(self) -> Sequence[int]: ...


ChooseBarrier = Callable[[list[list[float]]], ChosenBarrier]
"""Chooses, of the predicted ends of each worker's iterations, those that are closest together."""


class BarrierScheduler(Machine):
    def __init__(
        self, lookahead: int, predictor: Callable[[], IntervalPredictor], choose: ChooseBarrier, members: Members
    ) -> None:
        super().__init__()
        self.lookahead = lookahead
        self.predictor = predictor
        self.choose = choose
        self.shards = [Node("server", shard) for shard in range(members.servers)]
        self.now = 0.0
        self.view_number = 0
        self.members: set[Process] = set()
        self.number = 0
        """The number of the last plan."""
        self.planned = False
        """Whether a plan is under way."""
        self.stops: dict[Process, int] = {}
        """The stops of those in the plan who have not come to theirs."""
        self.monitored: set[Process] = set()
        """The members that have made too few pushes since the barrier."""
        self.at: dict[Process, int] = {}
        """The iteration each process asked for last, also of those whom no view has named yet."""
        self.predictors: dict[Process, IntervalPredictor] = {}
        self.pushes: dict[Process, int] = {}
        """How many pushes each process has made since the barrier; `last` has the time of the last."""
        self.last: dict[Process, float] = {}

    def on_view_changed(self, event: ViewChanged) -> None:
        if event.view.number <= self.view_number:
            return
        self.now = event.at
        self.view_number, self.members = event.view.number, set(event.view.members)
        newest = dict(event.view.members)
        for process in [process for process in self.at if process[1] < newest.get(process[0], 0)]:
            del self.at[process], self.predictors[process]
            self.pushes.pop(process, None)
            self.last.pop(process, None)
        self.stops = {process: stop for process, stop in self.stops.items() if process in self.members}
        self.monitored = {process for process in self.members if self.pushes.get(process, 0) < PUSHES}

    def on_notify_arrived(self, event: NotifyArrived) -> None:
        """Notes a push. The iterations of a worker's notices rise: one that does not is a copy."""
        process, iteration = (event.notify.worker, event.notify.incarnation), event.notify.iteration
        if iteration <= self.at.get(process, -1):
            return
        self.now = event.at
        self.at[process] = iteration
        predictor = self.predictors.setdefault(process, self.predictor())
        if process in self.last:
            predictor.note(event.at - self.last[process])
        self.last[process] = event.at
        self.pushes[process] = self.pushes.get(process, 0) + 1
        if self.pushes[process] >= PUSHES:
            self.monitored.discard(process)
        if iteration >= self.stops.get(process, iteration + 1):
            del self.stops[process]

    def settle(self) -> None:
        if self.planned and not self.stops:
            self.planned = False
            self.pushes.clear()
            self.last.clear()
            self.monitored = set(self.members)
        if not self.planned and not self.monitored and len(self.members) > 1:
            self.plan()

    def plan(self) -> None:
        """Chooses where everybody is to stop, and tells the shards."""
        processes = sorted(self.members)
        firsts, rows = zip(*map(self.predict, processes), strict=True)
        barrier = self.choose(list(rows))
        stops = [first + index for first, index in zip(firsts, barrier.iterations, strict=True)]
        self.number += 1
        self.planned = True
        self.stops = dict(zip(processes, stops, strict=True))
        told = tuple((*process, stop) for process, stop in self.stops.items())
        plan = Plan(self.number, told, barrier.time, barrier.wait)
        self.actions += [Send(shard, plan) for shard in self.shards]

    def predict(self, process: Process) -> tuple[int, list[float]]:
        """Returns the first iteration a worker can be stopped at, and when it will ask for that and the following
        ones."""
        interval, last, lookahead = self.predictors[process].next_s(), self.last[process], self.lookahead
        soon = self.now + (GRACE if lookahead > 1 else DUE) * interval
        first = self.at[process] + 1
        if last + interval >= soon:
            return first, [last + (1 + j) * interval for j in range(lookahead)]
        second_s = max(last + 2 * interval, soon)
        if lookahead == 1:
            return first + 1, [second_s]
        # Of two that end at the same time the later is chosen, so the first never is.
        return first, [second_s, *(second_s + j * interval for j in range(lookahead - 1))]

    def check(self) -> None:
        require(self.planned or not self.stops, f"{self.stops} although no plan is under way")
        require(not self.planned or bool(self.stops), f"plan {self.number} is over")
        for process, stop in self.stops.items():
            require(process in self.members, f"{process} is in the plan but no member")
            require(self.at[process] < stop, f"{process} is at {self.at[process]}, past its stop {stop}")
