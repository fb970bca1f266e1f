"""The scheduler that plans barriers: it monitors, predicts and plans, for all shards at once (002, Figure 5).

*Monitor*: each push of each worker is noted, until everybody has made two since the last barrier. *Predict*: from a
worker's latest push on, its next `lookahead` iterations end one predicted interval after the other. *Plan*: one end
of each worker is chosen so that the first to arrive waits least (`policies/zipline.py`), and the shards are told. The
plan is over when everybody in it has come to its stop or is gone; then it begins again. `core/planning.py` says why
this cannot hang.

An interval with a barrier in it says how long a worker waited, not how fast it is: it is never looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.core.actions import Send
from paceline.core.events import NotifyArrived, ViewChanged
from paceline.core.machine import Machine, require
from paceline.core.messages import Members, Node, Plan
from paceline.core.words import Process

PUSHES = 2
"""So many pushes of each worker since the barrier are waited for: an interval lies between two."""
GRACE = 0.1
"""An iteration of which less than this share is left may be over before the plan is there: nobody is to stop at it."""


class Predictor(Protocol):
    """How long a worker's next iterations will take, from how long those before took."""

    def note(self, interval_s: float) -> None: ...

    def next_s(self) -> float: ...


class Meeting(Protocol):
    """What was chosen: when the last one is there, how long the first then has waited, and each one's index."""

    @property
    def time(self) -> float: ...

    @property
    def wait(self) -> float: ...

    @property
    def iterations(self) -> Sequence[int]: ...


Choose = Callable[[list[list[float]]], Meeting]
"""Of each worker's predicted ends, the ones closest together."""


class Planner(Machine):
    def __init__(self, lookahead: int, predictor: Callable[[], Predictor], choose: Choose, members: Members) -> None:
        super().__init__()
        self.lookahead = lookahead
        self.predictor = predictor
        self.choose = choose
        self.shards = [Node("server", shard) for shard in range(members.servers)]
        self.now = 0.0
        self.view_number = 0
        self.members: set[Process] = set()
        self.number = 0
        """Of the last plan."""
        self.planned = False
        """A plan is under way."""
        self.stops: dict[Process, int] = {}
        """Who has not come to its stop in it."""
        self.monitored: set[Process] = set()
        """The members that have made too few pushes since the barrier."""
        self.at: dict[Process, int] = {}
        """The iteration each asked for last; also of those whom no view has named yet."""
        self.paces: dict[Process, Predictor] = {}
        self.pushes: dict[Process, int] = {}
        """How many each has made since the barrier, and when the last was."""
        self.last: dict[Process, float] = {}

    def on_view_changed(self, event: ViewChanged) -> None:
        if event.view.number <= self.view_number:
            return
        self.now = event.at
        self.view_number, self.members = event.view.number, set(event.view.members)
        newest = dict(event.view.members)
        for process in [process for process in self.at if process[1] < newest.get(process[0], 0)]:
            del self.at[process], self.paces[process]
            self.pushes.pop(process, None)
            self.last.pop(process, None)
        self.stops = {process: stop for process, stop in self.stops.items() if process in self.members}
        self.monitored = {process for process in self.members if self.pushes.get(process, 0) < PUSHES}

    def on_notify_arrived(self, event: NotifyArrived) -> None:
        """A worker has pushed. What it says rises: something that does not is a copy."""
        process, iteration = (event.notify.worker, event.notify.incarnation), event.notify.iteration
        if iteration <= self.at.get(process, -1):
            return
        self.now = event.at
        self.at[process] = iteration
        pace = self.paces.setdefault(process, self.predictor())
        if process in self.last:
            pace.note(event.at - self.last[process])
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
        """Choose where everybody is to stop, and tell the shards."""
        processes = sorted(self.members)
        firsts, rows = zip(*map(self.predict, processes), strict=True)
        meeting = self.choose(list(rows))
        stops = [first + index for first, index in zip(firsts, meeting.iterations, strict=True)]
        self.number += 1
        self.planned = True
        self.stops = dict(zip(processes, stops, strict=True))
        told = tuple((*process, stop) for process, stop in self.stops.items())
        plan = Plan(self.number, told, meeting.time, meeting.wait)
        self.actions += [Send(shard, plan) for shard in self.shards]

    def predict(self, process: Process) -> tuple[int, list[float]]:
        """The first iteration this worker can be stopped at, and when it will ask for that and the following ones."""
        interval, last = self.paces[process].next_s(), self.last[process]
        soon = self.now + GRACE * interval
        skipped = 1 if last + interval < soon else 0
        first = max(last + (1 + skipped) * interval, soon)
        return self.at[process] + 1 + skipped, [first + j * interval for j in range(self.lookahead)]

    def check(self) -> None:
        require(self.planned or not self.stops, f"{self.stops} although no plan is under way")
        require(not self.planned or bool(self.stops), f"plan {self.number} is over")
        for process, stop in self.stops.items():
            require(process in self.members, f"{process} is in the plan but no member")
            require(self.at[process] < stop, f"{process} is at {self.at[process]}, past its stop {stop}")
