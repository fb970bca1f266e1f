"""The scheduler and the reducer of norms on the simulated clock: small messages in, small messages out.

They have no tensors; a message to them or from them travels as long as any other. With `scheduler_s` in the scenario
each message also keeps the scheduler busy for so long, in each direction, so that with many workers its answers queue
up: the price of one node that everything passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.core.actions import Park, Send, SetTimer
from paceline.core.events import TimerFired, arrival_of
from paceline.core.messages import Message, Node
from paceline.runtime.virtual.engine import MESSAGE, TIMER, Wire
from paceline.runtime.virtual.world import World


class VirtualCoordinator:
    """Carries out the actions of a node that only exchanges messages; each keeps it busy for `message_s`."""

    def __init__(
        self, world: World, node: Node, deliver: Callable[[Node, Message, float], None], message_s: float = 0.0
    ) -> None:
        messages_per_s = 1 / message_s if message_s else math.inf
        self.engine = world.engine
        self.deliver = deliver
        self.inward = Wire(world.plan.cluster.latency_s, messages_per_s)
        self.outward = Wire(world.plan.cluster.latency_s, messages_per_s)
        """Wires on which each message counts as one byte."""
        self.runner = world.runner(node, self)

    def receive(self, message: Message) -> None:
        """Puts a message that is sent now on the inward wire."""
        arrival = self.inward.arrival(self.engine.now, 1)
        self.engine.schedule(arrival, MESSAGE, self.runner.deliver, arrival_of(message, arrival))

    def send(self, action: Send) -> None:
        self.deliver(action.to, action.message, self.outward.arrival(self.engine.now, 1))

    def park(self, action: Park) -> None:
        """Does nothing: the worker waits for its release."""

    def set_timer(self, action: SetTimer) -> None:
        due = self.engine.now + action.after_s
        self.engine.schedule(due, TIMER, self.runner.deliver, TimerFired(due, action.timer))
