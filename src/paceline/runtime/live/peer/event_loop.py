"""How a peer hears its neighbours and the driver, and tells its machine what it heard.

A view is told to the machine after everything that neighbours have sent before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum, auto

from paceline.core.events import Event, ViewChanged, arrival_of
from paceline.core.hop_peer import HopPeer
from paceline.core.messages import View
from paceline.errors import PacelineError
from paceline.runtime.execution import MachineRunner
from paceline.runtime.live.messaging.senders import Process
from paceline.runtime.live.peer.neighbours import Neighbours
from paceline.runtime.live.protocol import lease_messages, wire
from paceline.runtime.live.protocol.configuration import Endpoint
from paceline.runtime.live.trainer.participation import Participation
from paceline.runtime.live.trainer.run_connection import RunConnection

IDLE_S = 0.2
"""How long a peer waits at a time."""


class MembershipState(Enum):
    """What a peer is to its run."""

    MEMBER = auto()
    LEAVING = auto()
    """It is done, and stays until no view names it any more."""
    RELEASED = auto()
    """It was leaving, and is no member any more: all are done that needed it."""
    REMOVED = auto()
    """The driver has removed it from the run."""


class EventLoop:
    """Delivers to a peer's machine what neighbours and the driver say."""

    def __init__(
        self, run: RunConnection, neighbours: Neighbours, runner: MachineRunner, participation: Participation
    ) -> None:
        self.run = run
        self.neighbours = neighbours
        self.runner = runner
        self.participation = participation
        self.view = View(0, ())
        self.membership = MembershipState.MEMBER
        self.done: set[Process] = set()
        """Members that have sent all they will ever send."""
        self.passed_over: set[Process] = set()
        """Those of them that the driver was asked to remove, since this peer would wait for them."""
        self.leases: deque[lease_messages.LeaseAnswer] = deque()
        """Samples for the sampler, which belongs to the script's thread."""

    def hear(self, timeout_s: float) -> bool:
        """Takes what neighbours and the driver have said, neighbours first; returns whether anything was there."""
        driver = self.run.driver
        ready = self.run.waiter.wait(0.0 if self.neighbours.has_unread or driver.heard_some else timeout_s)
        orders = []
        if driver in ready or driver.heard_some:
            while (message := driver.receive()) is not None:
                orders.append(wire.decode_to_worker(message))
        if any(isinstance(order, wire.NewView | wire.Done) for order in orders):
            self.neighbours.receive_all()
        heard = bool(ready)
        for said in self.neighbours.read():
            heard = True
            self.deliver(arrival_of(said, self.run.now()))
        for order in orders:
            self.handle_order(order)
        return heard

    def deliver(self, event: Event) -> None:
        """Has the machine handle an event, and sends what it orders."""
        self.runner.deliver(event)
        self.neighbours.flush()

    def handle_order(self, message: wire.ToWorker) -> None:
        """Does what the driver says."""
        match message:
            case wire.NewView(view, endpoints):
                self.see(view, endpoints)
            case wire.Done(processes):
                self.done.update(processes)
            case lease_messages.LeaseAnswer():
                self.leases.append(message)
            case _:
                self.participation.handle_order(message)

    def see(self, view: View, endpoints: Sequence[Endpoint]) -> None:
        """Takes a newer view, and where its members are."""
        if view.number <= self.view.number:
            return
        self.view = view
        members = dict(view.members)
        if members.get(self.run.rank) == self.run.incarnation:
            self.neighbours.change(members, endpoints)
            self.deliver(ViewChanged(self.run.now(), view))
        elif self.membership in (MembershipState.LEAVING, MembershipState.RELEASED):
            self.membership = MembershipState.RELEASED
        else:
            self.membership = MembershipState.REMOVED
            raise PacelineError(f"peer {self.run.rank} was given up: it is no member of view {view.number} any more")

    def await_samples(self) -> None:
        """Gives the sampler the driver's answers, for which it waits a little if there are none."""
        if not self.leases:
            self.hear(IDLE_S)
        while self.leases:
            self.participation.leases.receive(self.leases.popleft())

    def pass_over_done(self) -> None:
        """Has the driver remove neighbours that are done, if this peer would wait for nobody else, and for ever."""
        machine = self.runner.machine
        behind = machine.behind() if isinstance(machine, HopPeer) else []
        processes = {(rank, self.neighbours.members[rank]) for rank in behind}
        if processes <= self.done:
            for process in sorted(processes - self.passed_over):
                self.run.send(wire.Without(*process))
            self.passed_over |= processes

    @property
    def is_leaving(self) -> bool:
        """Whether this peer is done and has to stay for others."""
        return self.membership is MembershipState.LEAVING and not self.run.driver.gone
