"""The scheduler on the simulated clock: small messages in, small messages out, one after the other.

It has no tensors; a message to it or from it travels as long as any other. With `scheduler_s` in the scenario each
message also keeps it busy for so long, in each direction, so that with many workers its answers queue up: the price
of one node that everything passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.cluster import Cluster
from paceline.core.actions import Send, SetTimer
from paceline.core.events import NotifyArrived, PullArrived, RiseArrived, TimerFired
from paceline.core.messages import FromScheduler, Message, Node, Notify, Plan, Pull, Release, Resync, Rise
from paceline.runtime.driver import NoSuchAction, SchedulerCarrier, Seat
from paceline.runtime.virtual.engine import MESSAGE, TIMER, Engine, Wire

Deliver = Callable[[Node, FromScheduler | Plan, float], None]
"""Hand a message to a worker or a shard; it has left the scheduler's side at the time given."""


class VirtualScheduler(SchedulerCarrier):
    def __init__(self, engine: Engine, cluster: Cluster, deliver: Deliver) -> None:
        per_second = 1 / cluster.scheduler_s if cluster.scheduler_s else math.inf
        self.engine = engine
        self.deliver = deliver
        self.inward = Wire(cluster.latency_s, per_second)
        self.outward = Wire(cluster.latency_s, per_second)
        """Wires on which each message counts as one byte."""
        self.seat: Seat

    def receive(self, message: Message) -> None:
        """Take what a worker or a shard sends now."""
        arrival = self.inward.arrival(self.engine.now, 1)
        match message:
            case Pull():
                self.engine.tell(arrival, MESSAGE, self.seat.tell, PullArrived(arrival, message))
            case Rise():
                self.engine.tell(arrival, MESSAGE, self.seat.tell, RiseArrived(arrival, message))
            case Notify():
                self.engine.tell(arrival, MESSAGE, self.seat.tell, NotifyArrived(arrival, message))
            case _:
                raise NoSuchAction(f"nobody sends a scheduler {message}")

    def send(self, action: Send) -> None:
        if not isinstance(action.message, Release | Resync | Plan):
            raise NoSuchAction(f"a scheduler cannot {action}")
        self.deliver(action.to, action.message, self.outward.arrival(self.engine.now, 1))

    def set_timer(self, action: SetTimer) -> None:
        due = self.engine.now + action.after_s
        self.engine.tell(due, TIMER, self.seat.tell, TimerFired(due, action.timer))
