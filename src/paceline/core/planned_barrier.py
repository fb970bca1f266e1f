"""Barriers that are planned ahead, for the whole run at once: the machines of ElasticBSP (Zhao et al. 2021, section 3).

Between barriers everything is asynchronous. Where the next barrier is, is decided in one place:

    worker       pushes and pulls as ever, and tells the scheduler each time (`Notify`)
    scheduler    *monitors* until every worker has pushed twice since the last barrier, *predicts* when each will end
                 its next iterations, *plans* where each is to stop, and sends all shards that plan: for each worker
                 the iteration it may ask for but not get. It monitors again when all have come to their stops
    shard        parks whoever asks for its stop or more until all are at theirs. That is the *barrier*, and it has a
                 counter of its own: V is as ever what everybody has finished

Shards that planned for themselves would deadlock: one holds worker 0 until worker 1 has come to 8, another holds worker
1 at 7 until worker 0 has come further than the first lets it. With one plan a worker is held only at or past its stop,
nobody else waits for it there, and all shards will see it at its stop: whoever asks for c has pushed c - 1 to all and
asks all for c, or was promised c by those it does not ask (`core/progress.py`). So nobody waits for ever.

What is in flight. A plan travels while workers go on. The scheduler therefore leaves out an iteration that is about
to end, if there is another to choose (`core/barrier_scheduler.py`). If a plan comes late nevertheless:
- to some shards only: the worker is held by the others, and it needs the answers of all;
- to all of them, the worker having been answered everywhere: it counts as being at its stop, finishes the iteration
  it was given, and is held at its next pull if the others are not at their stops by then.
Once a shard has the plan it answers nobody at or past a stop, so nobody begins what lies behind it. A wrong prediction
or a late plan costs waiting, and never makes shards disagree.

Who comes and goes. A worker that is lost leaves the plan. One that joins while a plan is under way is not in it, and
waits for that barrier; while the scheduler only monitors there is none to wait for. A shard that comes back from a
checkpoint has no plan until the next, and holds nobody; the others do.
"""

from __future__ import annotations

import sys
from itertools import islice
from typing import TYPE_CHECKING

from paceline.core.actions import Park, Send
from paceline.core.events import GradientReady, PlanArrived
from paceline.core.machine import require
from paceline.core.messages import Members, Notify, Plan, Pull
from paceline.core.progress import NAMED, Progress, name_workers
from paceline.core.pull_gate import PullGate
from paceline.core.scheduler import SCHEDULER
from paceline.core.shard import Shard
from paceline.core.worker import Worker

if TYPE_CHECKING:
    from paceline.core.policy import CentralPolicy

NEVER = sys.maxsize
"""The V that frees a pull that waits for a barrier: none does."""


class NotifyingWorker(Worker):
    """A worker that tells the scheduler of each push, by the iteration it asks for next."""

    def on_gradient_ready(self, event: GradientReady) -> None:
        super().on_gradient_ready(event)
        self.actions.append(Send(SCHEDULER, Notify(self.rank, self.incarnation, self.iteration)))


class PlannedBarrier(PullGate):
    """The plan under way on one shard, if there is one: who is to stop where, and who is not there yet."""

    def __init__(self, policy: CentralPolicy) -> None:
        super().__init__(policy)
        self.plan: Plan | None = None
        self.stops: dict[int, int] = {}
        """The stops of the live workers in the plan."""
        self.awaited: dict[int, int] = {}
        """The stops of the workers that have not come to theirs."""

    def begin(self, plan: Plan, incarnations: dict[int, int], progress: Progress) -> None:
        self.plan = plan
        self.stops = {
            worker: stop for worker, incarnation, stop in plan.stops if incarnations.get(worker) == incarnation
        }
        self.awaited = {worker: stop for worker, stop in self.stops.items() if progress.next[worker] < stop}

    def may_pull(self, worker: int, i: int, progress: Progress) -> bool:
        """Lets workers pull up to their stop; one that is not in the plan has joined since, and waits."""
        return self.plan is None or i + 1 < self.stops.get(worker, 0)

    def freed_at(self, worker: int, i: int, V: int) -> int:
        return NEVER

    def forget(self, worker: int) -> None:
        self.stops.pop(worker, None)
        self.awaited.pop(worker, None)

    def why(self, worker: int) -> str:
        assert self.plan is not None
        missing = name_workers(self.names(), len(self.awaited))
        number = self.plan.number
        if worker not in self.stops:
            return f"joined during plan {number}, which waits for {missing}"
        return f"at stop {self.stops[worker]} of plan {number}, which waits for {missing}"

    def names(self) -> tuple[int, ...]:
        """Returns some of the workers that are awaited."""
        return tuple(sorted(islice(self.awaited, NAMED)))


class PlannedShard(Shard):
    """A shard whose parked pulls are freed by a planned barrier, not by V."""

    def __init__(self, policy: CentralPolicy, rank: int, members: Members, seed: int = 0) -> None:
        super().__init__(policy, rank, members, seed)
        self.plan_number = 0
        """The number of the last plan that arrived."""
        self.barriers = 0
        """How many barriers there have been."""

    def adopt(self, policy: CentralPolicy) -> None:
        super().adopt(policy)
        self.gate = self.barrier = PlannedBarrier(policy)

    def on_plan_arrived(self, event: PlanArrived) -> None:
        if event.plan.number <= self.plan_number:
            return
        self.now = event.at
        self.plan_number = event.plan.number
        self.barrier.begin(event.plan, self.incarnations, self.progress)
        self.free(f"not at its stop of plan {self.plan_number}")

    def park(self, pull: Pull, i: int, V: int) -> None:
        self.waiting[pull.worker] = pull
        self.parked.setdefault(NEVER, []).append(pull)
        names, count = self.barrier.names(), len(self.barrier.awaited)
        self.actions.append(Park(pull, self.barrier.why(pull.worker), names, count))

    def settle(self) -> None:
        super().settle()
        barrier = self.barrier
        if barrier.plan is None:
            return
        # Of those in the plan only the one whose message this is can have come to its stop by it.
        if self.mover in barrier.awaited and self.progress.next[self.mover] >= barrier.awaited[self.mover]:
            del barrier.awaited[self.mover]
        if not barrier.awaited:
            barrier.plan = None
            self.barriers += 1
            self.free(f"all are at their stops of plan {self.plan_number}")

    def free(self, reason: str) -> None:
        """Answers the pulls that the plan, or its end, lets pass."""
        for pull in list(self.waiting.values()):
            if self.barrier.may_pull(pull.worker, pull.iteration - 1, self.progress):
                self.release(pull, reason)
        self.parked = {NEVER: list(self.waiting.values())} if self.waiting else {}

    def check(self) -> None:
        super().check()
        barrier, at = self.barrier, self.progress.next
        if barrier.plan is None:
            require(not self.waiting, f"{list(self.waiting)} wait although no barrier is planned")
            return
        require(barrier.stops.keys() <= at.keys(), "somebody in the plan is no member")
        missing = {worker: stop for worker, stop in barrier.stops.items() if at[worker] < stop}
        require(barrier.awaited == missing, f"{missing} are not at their stops, the shard waits for {barrier.awaited}")
        require(bool(missing), f"plan {barrier.plan.number} waits for nobody")
        for worker, pull in self.waiting.items():
            stop = barrier.stops.get(worker, 0)
            require(pull.iteration >= stop, f"worker {worker} waits at {pull.iteration}, its stop is {stop}")
