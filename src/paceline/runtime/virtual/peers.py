"""A virtual run without servers: peers with parameters and an optimizer each, on a simulated network.

What is evaluated, and what a run leaves, is the average of the live peers' parameters. A peer that is to compute an
iteration beyond the last one is done: it computes no more but stays a member, for others may still need its answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.actions import Apply, Compute, Drop, Reduce, Send, Wait
from paceline.core.events import ViewChanged
from paceline.core.messages import Handle, Message, Node, View
from paceline.runtime.driver import Seat, event_of, handle_of
from paceline.runtime.virtual.engine import MESSAGE
from paceline.runtime.virtual.network import Network
from paceline.runtime.virtual.nodes import VirtualWorker
from paceline.runtime.virtual.simulation import Plan, Simulation, Watcher
from paceline.tensors.slices import SliceOptimizer

WHOLE = 0
"""A peer's gradient is one slice."""


class VirtualPeer(VirtualWorker):
    """One peer: its parameters, its optimizer, and what has come from others and is not averaged yet."""

    simulation: PeerSimulation

    def __init__(self, simulation: PeerSimulation, rank: int, incarnation: int) -> None:
        super().__init__(simulation, rank, incarnation)
        self.values = simulation.initial.clone()
        whole = simulation.shards[WHOLE]
        self.optimizer = SliceOptimizer(simulation.layout, whole, self.values, simulation.plan.optimizer)
        self.mail: dict[Handle, Tensor] = {}
        self.begun = False
        """It has parameters to compute with: one that joins has none until its neighbours have sent it some."""
        self.named: tuple[Handle | None, Tensor] = (None, self.values)
        """What was sent last: neighbours that are sent the same share one copy."""

    def compute(self, action: Compute) -> None:
        simulation = self.simulation
        self.begun = True
        if simulation.iterations is not None and action.iteration >= simulation.iterations:
            simulation.finished = True
            simulation.done.add((self.rank, self.incarnation))
            simulation.consider_end()
            return
        self.computing = action
        samples = simulation.dealer.deal(self.rank, action.iteration)
        simulation.gradients.order((self.rank, self.incarnation, action.iteration), self.values.clone(), samples)
        duration = self.compute_s()
        now = simulation.engine.now
        simulation.strike_at_iteration(self, action.iteration, now + 0.5 * duration)
        self.at_own_time(now + duration, lambda: self.finish(action))

    def apply(self, action: Apply) -> None:
        gradients = [self.simulation.gradients.take(handle, WHOLE) for handle in action.handles]
        self.optimizer.apply([self.optimizer.cut(gradient) for gradient in gradients], action.weight)
        self.simulation.applied += 1
        self.simulation.consider_evaluation()

    def reduce(self, action: Reduce) -> None:
        self.values.mul_(action.own)
        for handle, weight in zip(action.handles, action.weights, strict=True):
            self.values.add_(self.mail.pop(handle), alpha=weight)

    def drop(self, action: Drop) -> None:
        if action.handle.source == self.rank:
            self.simulation.gradients.discard(action.handle)
        else:
            del self.mail[action.handle]

    def wait(self, action: Wait) -> None:
        """It does so by itself."""

    def send(self, action: Send) -> None:
        message = action.message
        handle = handle_of(message)
        values = None
        if handle is not None:
            if self.named[0] != handle:
                self.named = (handle, self.values.clone())
            values = self.named[1]
        self.simulation.carry(self, action.to.rank, message, values)

    def take(self, message: Message, values: Tensor | None, at: float) -> None:
        """A message has arrived."""
        handle = handle_of(message)
        if handle is not None and values is not None and self.alive:
            self.mail[handle] = values
        self.tell(event_of(message, at))


class PeerSimulation(Simulation):
    workers: dict[int, VirtualPeer]  # type: ignore[assignment]

    def __init__(self, plan: Plan, watch: Watcher | None = None) -> None:
        super().__init__(plan, watch)
        self.initial = self.flat.clone()
        self.network = Network(plan.cluster)
        self.applied = 0
        self.done: set[tuple[int, int]] = set()
        """(rank, incarnation) of those that have done their iterations; they stay members."""
        self.evaluated = "the average of the peers"

    def admit(self, ranks: list[int]) -> None:
        joining = {rank: self.authority.next_incarnation(rank) for rank in ranks}
        for rank, incarnation in joining.items():
            peer = VirtualPeer(self, rank, incarnation)
            machine = self.plan.policy.machine("peer", rank, self.members, self.seed)
            machine.checks = True
            peer.seat = Seat(Node("peer", rank), incarnation, machine, peer, self.record)
            self.workers[rank] = peer
        self.announce(self.authority.admit(joining), self.engine.now)

    def training(self) -> list[int]:
        return [rank for rank, incarnation in self.authority.members.items() if (rank, incarnation) not in self.done]

    def announce(self, view: View, when: float) -> None:
        arrival = when + self.cluster.latency_s
        for peer in self.workers.values():
            self.engine.tell(arrival, MESSAGE, peer.tell, ViewChanged(arrival, view))

    def carry(self, sender: VirtualPeer, to: int, message: Message, values: Tensor | None) -> None:
        """Bring a message from one peer to another; to nobody, if the other is gone by then."""
        nbytes = self.slice_bytes[WHOLE] if values is not None else 0
        arrival = self.network.arrival(self.engine.now, sender.rank, to, nbytes)

        def arrive() -> None:
            if to in self.workers:
                self.workers[to].take(message, values, arrival)

        self.engine.at(arrival, MESSAGE, arrive)

    def consumed(self) -> int:
        return self.applied

    def updates(self) -> int:
        return self.applied // self.members.workers

    def evaluate(self) -> None:
        if self.workers:
            stacked = torch.stack([peer.values for peer in self.holders()])
            torch.mean(stacked, 0, out=self.flat)
            apart = torch.linalg.vector_norm(stacked - self.flat, dim=1).mean()
            self.consensus.append((self.engine.now, float(apart)))
        super().evaluate()

    def holders(self) -> list[VirtualPeer]:
        """Whose parameters count: of those who are there, the ones that have begun; at the start all are alike."""
        peers = list(self.workers.values())
        return [peer for peer in peers if peer.begun] or peers

    def average(self) -> dict[str, Tensor]:
        """The mean of the peers' moving averages, if they keep any."""
        kept = [peer.optimizer.average for peer in self.holders() if peer.optimizer.average is not None]
        return self.layout.named(torch.stack(kept).mean(0)) if kept else {}
