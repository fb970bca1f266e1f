"""What the driver tells a worker, and what follows from it. It is heard only in the thread that calls `step`."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from paceline.core.events import Event, ReleaseArrived
from paceline.runtime.live.protocol import resizing_messages, script_calls, wire
from paceline.runtime.live.trainer.participation import Participation
from paceline.runtime.live.trainer.run_connection import RunConnection
from paceline.runtime.live.worker.server_connections import ServerConnections

IDLE_S = 0.2
HEAR_S = 0.05
"""How long a worker may take to hear the driver: asking costs as much as a small exchange's arithmetic."""


class PushHold:
    """The driver's order not to push from some iteration on, if there is one.

    While the number of servers changes nothing is under way: what was pushed before is answered.
    """

    def __init__(self, run: RunConnection) -> None:
        self.run = run
        self.at: int | None = None
        """The first iteration that must not be pushed."""
        self.change = 0
        """Which change of servers that is for."""
        self.is_reported = False
        """Whether the driver knows that this worker stands still."""
        self.since_s = 0.0

    def begin(self, order: resizing_messages.Hold) -> None:
        self.at, self.change = order.at, order.change
        self.is_reported = False

    def end(self) -> None:
        """The servers have changed."""
        self.at = None

    def applies_to(self, iteration: int) -> bool:
        """Returns whether this iteration must not be pushed yet; if so, the driver is told once."""
        if self.at is None or iteration < self.at:
            return False
        if not self.is_reported:
            self.is_reported, self.since_s = True, self.run.now()
            self.run.send(resizing_messages.Held(self.change, self.run.rank, self.run.incarnation, iteration))
        return True


class DriverOrders:
    """The driver's orders to one worker, and what they have changed."""

    def __init__(self, run: RunConnection, connections: ServerConnections, deliver: Callable[[Event], None]) -> None:
        self.run = run
        self.connections = connections
        self.deliver = deliver
        self.participation = Participation(run, self.await_driver)
        self.hold = PushHold(run)
        self.heard_s = 0.0

    def hear(self) -> None:
        """Does all that the driver has said."""
        self.heard_s = time.monotonic()
        while (message := self.run.driver.receive()) is not None:
            self.handle_order(wire.decode_to_worker(message))

    def hear_if_due(self) -> None:
        if time.monotonic() - self.heard_s > HEAR_S:
            self.hear()

    def await_driver(self) -> None:
        """Does what the driver says next, if it says something soon."""
        if not self.run.driver.heard_some:
            self.run.waiter.wait(IDLE_S)
        if (message := self.run.driver.receive()) is not None:
            self.handle_order(wire.decode_to_worker(message))

    def handle_order(self, message: wire.ToWorker) -> None:
        if self.participation.end and not isinstance(message, script_calls.BarrierOpened):
            return
        match message:
            case wire.ServerRestarted(shard, endpoint):
                self.connections.follow_restart(shard, endpoint)
            case resizing_messages.Hold():
                self.hold.begin(message)
            case resizing_messages.Resliced():
                self.reslice(message)
            case wire.Released(release):
                self.deliver(ReleaseArrived(self.run.now(), release))
            case _:
                self.participation.handle_order(message)

    def reslice(self, order: resizing_messages.Resliced) -> None:
        """There are other servers, or these have other parts of the parameters: goes on with them."""
        self.connections.connect_all(order.assignment, order.endpoints)
        self.hold.end()
        self.connections.forget_sent()
        self.deliver(msgspec.structs.replace(order.event, at=self.run.now(), since=self.hold.since_s))
