"""Planned barriers (ElasticBSP): where they were to be, where they were, and what BSP would have waited instead.

All of it is what shard 0 saw. The *wait* of a barrier is that of the first worker to arrive at its stop (Zhao et al.
2021, eq. 2). BSP's is worked out from the same iterations: those that each worker in the plan made since the barrier
before, from answer to push, so without what it waited; as many rounds as the slowest has made, each as long as its
slowest, and the first of a round waits for the last.
"""

from __future__ import annotations

from msgspec import Struct

from paceline.core.actions import Answer
from paceline.core.events import PlanArrived, PullArrived, PullRepeated, PushArrived, PushRejected, ViewChanged
from paceline.core.messages import Node, Plan, Process
from paceline.core.trace import Record, Trace

SHARD = Node("server", 0)


class Barrier(Struct, frozen=True, gc=False):
    """One barrier: its plan, with the time and the wait that were predicted; when it was, and the waits there were."""

    number: int
    planned_s: float
    due_s: float
    planned_wait_s: float
    reached_s: float
    wait_s: float
    rounds: int
    """The iterations that the slowest worker has made since the barrier before."""
    bsp_wait_s: float
    """What BSP would have waited in them."""


class BarrierReader:
    """Reads the records of a shard, one after the other."""

    def __init__(self) -> None:
        self.barriers: list[Barrier] = []
        self.members: set[Process] = set()
        self.view_number = 0
        self.plan: Plan | None = None
        self.planned_s = 0.0
        self.stops: dict[Process, int] = {}
        self.arrived: dict[Process, float] = {}
        self.next: dict[Process, int] = {}
        self.answered: dict[Process, float] = {}
        self.took: dict[Process, list[float]] = {}
        """How long each worker's iterations since the last barrier took."""

    def take(self, record: Record) -> None:
        event = record.event
        match event:
            case ViewChanged(view=view) if view.number > self.view_number:
                self.view_number, self.members = view.number, set(view.members)
            case PushArrived(push=push) | PushRejected(push=push):
                process = (push.handle.source, push.handle.incarnation)
                if process in self.answered:
                    self.took.setdefault(process, []).append(event.at - self.answered.pop(process))
                self.come(process, push.handle.iteration + 1, event.at)
            case PullArrived(pull=pull) | PullRepeated(pull=pull):
                self.come((pull.worker, pull.incarnation), pull.iteration, event.at)
            case PlanArrived(plan=plan) if self.plan is None or plan.number > self.plan.number:
                self.plan, self.planned_s = plan, event.at
                self.stops = {(worker, incarnation): stop for worker, incarnation, stop in plan.stops}
                late = {process for process, stop in self.stops.items() if self.next.get(process, 0) >= stop}
                self.arrived = dict.fromkeys(late, event.at)
        if self.stops and all(process in self.arrived for process in self.stops.keys() & self.members):
            self.reach(event.at)
        for action in record.actions:
            if isinstance(action, Answer):
                self.answered[action.parameters.worker, action.parameters.incarnation] = event.at

    def come(self, process: Process, iteration: int, at: float) -> None:
        self.next[process] = max(self.next.get(process, 0), iteration)
        if process in self.stops and iteration >= self.stops[process]:
            self.arrived.setdefault(process, at)

    def reach(self, at: float) -> None:
        assert self.plan is not None
        present = self.stops.keys() & self.members
        took = [self.took.get(process, []) for process in present]
        rounds = min(map(len, took), default=0)
        self.barriers.append(
            Barrier(
                self.plan.number,
                self.planned_s,
                self.plan.due_s,
                self.plan.wait_s,
                at,
                at - min((self.arrived[process] for process in present), default=at),
                rounds,
                sum(max(times) - min(times) for times in zip(*(each[:rounds] for each in took), strict=True)),
            )
        )
        self.stops, self.took = {}, {}


def barriers(trace: Trace) -> list[Barrier]:
    """Returns the planned barriers of a run that were reached, in order; none under a policy that does not plan."""
    watch = BarrierReader()
    for record in trace.records:
        if record.node == SHARD:
            watch.take(record)
    return watch.barriers


def totals(found: list[Barrier]) -> dict[str, float]:
    """Returns the waits of all barriers together, in seconds: planned, as they were, and BSP's."""
    return {
        "count": len(found),
        "rounds": sum(barrier.rounds for barrier in found),
        "planned_wait_s": sum(barrier.planned_wait_s for barrier in found),
        "wait_s": sum(barrier.wait_s for barrier in found),
        "bsp_wait_s": sum(barrier.bsp_wait_s for barrier in found),
    }
