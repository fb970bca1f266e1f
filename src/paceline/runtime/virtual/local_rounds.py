"""Rounds of local steps on the simulated clock: each step takes its own time, and the plan travels as messages do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from paceline.core.actions import Compute
from paceline.core.control.round_planner import EndRound, RoundBegun, RoundPlanner
from paceline.core.events import ViewChanged
from paceline.core.local_steps import LocalSteps
from paceline.core.messages import View
from paceline.core.rounds import Rounds
from paceline.policies import zipline
from paceline.runtime.virtual.backend import Backend
from paceline.runtime.virtual.batches import Batches
from paceline.runtime.virtual.engine import MESSAGE, Callback, Engine
from paceline.runtime.virtual.faults import FaultInjector

if TYPE_CHECKING:
    from paceline.runtime.virtual.worker import VirtualWorker
    from paceline.runtime.virtual.world import World


class Stepping(Protocol):
    """What rounds need of the worker whose steps they begin and end."""

    engine: Engine
    backend: Backend
    batches: Batches
    faults: FaultInjector
    process: tuple[int, int]
    rank: int
    alive: bool
    began: float
    samples: int

    def begin_samples(self) -> None: ...

    def next_duration(self) -> float: ...

    def at_own_time(self, due: float, method: Callback, argument: object = None) -> None: ...

    def end_local_step(self, action: Compute) -> None: ...


class LocalRounds:
    """The rounds of one worker: it begins each step, and ends the round that is over."""

    def __init__(self, worker: Stepping, world: World, local: LocalSteps) -> None:
        self.worker = worker
        self.world = world
        self.rounds = Rounds(local)
        self.done = 0
        """The local steps this worker has done, and counts as having done if it has joined later."""
        self.samples = 0
        """The samples that this round has used."""
        self.most = math.inf
        """The steps that are left to do."""

    def begin(self, action: Compute) -> None:
        """Begins a round: the worker has its parameters."""
        worker, now, rounds = self.worker, self.worker.engine.now, self.rounds
        rounds.begin(now)
        self.samples = 0
        left = math.inf if self.world.plan.iterations is None else self.world.plan.iterations - self.done
        self.most = left if left > 0 else math.inf
        worker.backend.begin_round(worker.process, action.iteration)
        if self.world.planning is not None:
            begun = RoundBegun(now, *worker.process, rounds.number, rounds.pace.step_s)
            self.world.planning.receive(begun)
        first_s = self.begin_step(action)
        if worker.faults.at_iteration:
            middle_s = 0.5 * first_s * max(rounds.local.steps, rounds.local.at_least)
            worker.faults.inject_at_iteration(worker.rank, action.iteration, now + middle_s)

    def begin_step(self, action: Compute) -> float:
        """Begins a step, and returns how long it takes."""
        worker = self.worker
        worker.begin_samples()
        worker.backend.local_step(worker.process, action.iteration, self.done, worker.samples)
        duration = worker.next_duration()
        worker.at_own_time(worker.engine.now + duration, worker.end_local_step, action)
        return duration

    def end_step(self, action: Compute) -> bool:
        """Ends a step, and begins the next unless the round is over."""
        worker, rounds = self.worker, self.rounds
        now = worker.engine.now
        worker.batches.note(worker.process, worker.samples, now - worker.began)
        self.done += 1
        self.samples += worker.samples
        over = rounds.end_step(now) or rounds.steps >= self.most
        if not over:
            self.begin_step(action)
        return over

    def hear(self, order: EndRound) -> None:
        """Takes the plan for a round, which has travelled to the worker."""
        if self.worker.alive:
            self.rounds.hear(order, self.worker.engine.now)


class RoundPlanning:
    """Whoever plans the rounds of all, at the end of a wire to each worker."""

    def __init__(self, world: World, local: LocalSteps, workers: Mapping[int, VirtualWorker]) -> None:
        self.engine = world.engine
        self.latency_s = world.plan.cluster.latency_s
        self.workers = workers
        self.machine = RoundPlanner(local, zipline.plan)
        self.machine.checks = world.plan.checked

    def receive(self, begun: RoundBegun) -> None:
        """Takes a worker's message, which is sent now."""
        self.engine.schedule(self.engine.now + self.latency_s, MESSAGE, self.take, begun)

    def announce(self, view: View) -> None:
        """Hears who takes part from now on."""
        at = self.engine.now + self.latency_s
        self.engine.schedule(at, MESSAGE, self.take, ViewChanged(at, view))

    def take(self, event: ViewChanged | RoundBegun) -> None:
        if isinstance(event, RoundBegun):
            # Who knows when a message was sent that took a known time could do better; a driver does not.
            event = RoundBegun(self.engine.now, event.worker, event.incarnation, event.round, event.step_s)
        for order in self.machine.handle(event):
            worker = self.workers.get(order.worker)
            if worker is not None and worker.incarnation == order.incarnation and worker.rounds is not None:
                self.engine.schedule(self.engine.now + self.latency_s, MESSAGE, worker.rounds.hear, order)
