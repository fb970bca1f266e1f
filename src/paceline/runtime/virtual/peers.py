"""A virtual run without servers: peers that exchange parameters over a simulated network.

A peer that is to compute an iteration beyond the last one is done: it computes no more but stays a member, for others
may still need its answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.core.actions import Apply, Drop, Reduce, Send, Wait
from paceline.core.events import ViewChanged, arrival_of
from paceline.core.messages import Message, View
from paceline.runtime.execution import handle_of
from paceline.runtime.virtual.backend import Backend
from paceline.runtime.virtual.engine import MESSAGE, Engine
from paceline.runtime.virtual.network import Network
from paceline.runtime.virtual.simulation import Simulation
from paceline.runtime.virtual.worker import VirtualWorker
from paceline.runtime.virtual.world import SimulationPlan

Carry = Callable[[int, int, Message, Any], None]


class VirtualPeer(VirtualWorker):
    """Carries out the actions of one peer. Its parameters, if there are any, are the backend's."""

    role = "peer"

    def __init__(self, *given: Any, carry: Carry) -> None:
        super().__init__(*given)
        self.carry = carry

    def apply(self, action: Apply) -> None:
        self.backend.apply(self.rank, action)

    def reduce(self, action: Reduce) -> None:
        self.backend.reduce(self.rank, action)

    def drop(self, action: Drop) -> None:
        self.backend.drop(self.rank, action.handle)

    def wait(self, action: Wait) -> None:
        """Does nothing: the peer waits for its next event."""

    def send(self, action: Send) -> None:
        handle = handle_of(action.message)
        values = self.backend.snapshot(self.rank, handle) if handle is not None else None
        self.carry(self.rank, action.to.rank, action.message, values)

    def take(self, message: Message, values: Any) -> None:
        """Delivers a message that has arrived to the machine, and keeps the parameters that came with it."""
        handle = handle_of(message)
        if handle is not None:
            self.backend.keep(self.rank, handle, values)
        self.deliver(arrival_of(message, self.engine.now))


class PeerSimulation(Simulation):
    """One run of peers."""

    workers: dict[int, VirtualPeer]  # type: ignore[assignment]

    def __init__(self, plan: SimulationPlan, backend: Backend | None = None, engine: Engine | None = None) -> None:
        super().__init__(plan, backend, engine)
        self.network = Network(plan.cluster)
        self.goodbyes = False

    def make_worker(self, rank: int, incarnation: int) -> VirtualPeer:
        return VirtualPeer(self.world, rank, incarnation, self.faults, self.may_begin, carry=self.carry)

    def may_begin(self, worker: VirtualWorker, iteration: int) -> bool:
        """Returns whether the peer is to compute this iteration.

        Rounds differ in length, and neighbours wait for each other's: so a peer that has done its local steps goes on
        until all have.
        """
        goes_on = super().may_begin(worker, iteration)
        return goes_on or (worker.rounds is not None and not self.engine.over)

    def announce(self, view: View, joining: object = ()) -> None:
        """Announces the view to all peers."""
        self.world.announce(view)
        arrival = self.engine.now + self.plan.cluster.latency_s
        for peer in self.workers.values():
            self.engine.schedule(arrival, MESSAGE, peer.deliver, ViewChanged(arrival, view))

    def carry(self, sender: int, to: int, message: Message, values: Any) -> None:
        """Brings a message from one peer to another, with parameters if it names some."""
        nbytes = 0 if handle_of(message) is None else self.world.slice_bytes[0]
        arrival = self.network.arrival(self.engine.now, sender, to, nbytes)
        self.engine.schedule(arrival, MESSAGE, self.arrive, (to, message, values))

    def arrive(self, what: tuple[int, Message, Any]) -> None:
        to, message, values = what
        if to in self.workers:
            self.workers[to].take(message, values)
