"""What needs a core on the simulated clock, where a scenario says what exchanges cost ([costs]).

All processes share the cores: whoever needs one while there are fewer cores than such processes gets his part of them,
as from the scheduler of an operating system. Computing needs a core for `cpu_share` of its duration; where a live
worker would wait until its iteration has lasted as long as the scenario says, for `cpu_s`. Then the exchange costs the
worker `worker_s`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, NamedTuple

from paceline.cluster import Costs
from paceline.core.actions import Compute
from paceline.runtime.virtual.engine import MESSAGE, Callback, Engine
from paceline.runtime.virtual.worker import VirtualWorker


class Cores:
    """Some cores, shared in equal parts by whoever has work; nobody has more than one."""

    def __init__(self, engine: Engine, count: float | None) -> None:
        self.engine = engine
        self.count = math.inf if count is None else count
        self.done_s = 0.0
        """The processor seconds that somebody who had worked all the time would have got."""
        self.since_s = 0.0
        """When that was worked out last."""
        self.tasks: list[tuple[float, int, Callback, Any]] = []
        """Those who work: until when in `done_s`, and what then; the next first."""
        self.number = 0
        self.alarm = 0
        """The number of the one alarm that counts."""

    @property
    def rate(self) -> float:
        """The processor seconds that each gets in a second."""
        return min(1.0, self.count / len(self.tasks)) if self.tasks else 1.0

    def work(self, seconds: float, callback: Callback, argument: Any) -> None:
        """Calls `callback(argument)` when so many processor seconds have been spent."""
        if seconds <= 0:
            callback(argument)
            return
        self._go_on()
        self.number += 1
        heappush(self.tasks, (self.done_s + seconds, self.number, callback, argument))
        self._set_alarm()

    def _go_on(self) -> None:
        now = self.engine.now
        self.done_s += (now - self.since_s) * self.rate
        self.since_s = now

    def _set_alarm(self) -> None:
        self.alarm += 1
        if self.tasks:
            due = self.engine.now + max(0.0, self.tasks[0][0] - self.done_s) / self.rate
            # As a message: what servers have still to do when all workers are done is part of the run.
            self.engine.schedule(due, MESSAGE, self._ring, self.alarm)

    def _ring(self, alarm: int) -> None:
        if alarm != self.alarm:
            return  # somebody has come or gone since
        self._go_on()
        until, _, callback, argument = heappop(self.tasks)
        self.done_s = max(self.done_s, until)
        self._set_alarm()
        callback(argument)


class Stage(NamedTuple):
    """A computation that has had its core, and until when it lasts at least."""

    worker: VirtualWorker
    action: Compute
    not_before_s: float
    rest_s: float


class HostWork:
    """Has the computations and exchanges of a run wait for cores."""

    def __init__(self, engine: Engine, costs: Costs, peer_s: float = 0.0) -> None:
        """`peer_s` is what an exchange costs besides where there are no servers."""
        self.engine = engine
        self.costs = costs
        self.cores = Cores(engine, costs.cores)
        self.exchange_s = costs.worker_s + peer_s
        self.known: set[tuple[int, int]] = set()
        """The processes that have computed before."""

    def compute(self, worker: VirtualWorker, duration: float, action: Compute) -> None:
        """Has the worker finish a computation that takes so long on a core of its own."""
        costs, now = self.costs, self.engine.now
        first_s = 0.0 if worker.process in self.known else costs.first_s
        self.known.add(worker.process)
        if costs.cpu_s is not None:
            self.cores.work(costs.cpu_s + first_s, self._computed, Stage(worker, action, now + duration, 0.0))
        else:
            rest_s = duration * (1 - costs.cpu_share)
            self.cores.work(duration * costs.cpu_share + first_s, self._computed, Stage(worker, action, now, rest_s))

    def _computed(self, stage: Stage) -> None:
        over = max(self.engine.now + stage.rest_s, stage.not_before_s)
        stage.worker.at_own_time(over, stage.worker.hand_in, stage.action)

    def exchange(self, callback: Callable[[Compute], None], action: Compute) -> None:
        """Has a worker pay for its exchange, and calls `callback(action)` then."""
        self.cores.work(self.exchange_s, callback, action)
