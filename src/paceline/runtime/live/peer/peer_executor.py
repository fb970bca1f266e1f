"""Carries out what a peer's machine orders: it averages, steps, sends, and lets the script compute."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.actions import Apply, Compute, Drop, Reduce, Send, Wait
from paceline.core.messages import Ack, Hello, Offer, Reply, Token, Update
from paceline.runtime.execution import NoSuchAction
from paceline.runtime.live.peer.neighbours import Neighbours
from paceline.runtime.live.peer.peer_parameters import PeerParameters


class PeerExecutor:
    """Carries out the actions of one peer's machine."""

    def __init__(
        self, rank: int, neighbours: Neighbours, parameters: PeerParameters, optimizer_step: Callable[[], None]
    ) -> None:
        """`optimizer_step` has the user's own optimizer step, with the gradients that are there."""
        self.rank = rank
        self.neighbours = neighbours
        self.parameters = parameters
        self.optimizer_step = optimizer_step
        self.ordered: Compute | None = None
        """The computation that is ordered and not done."""
        self.holds_parameters = False
        """Whether the model has had parameters of the run."""
        self.changed = False
        """Whether the parameters have changed since this peer last left them for the average."""
        self.dropped = False
        """Whether the last gradient was not used."""
        self.waits = ""
        """Why the machine waits."""
        self.staleness = 0
        """By how many iterations the oldest parameters in the last average were behind."""

    def take_order(self) -> Compute:
        """The computation that was ordered is done; returns it."""
        ordered = self.ordered
        assert ordered is not None
        self.ordered = None
        self.dropped = True
        return ordered

    def compute(self, action: Compute) -> None:
        self.ordered = action
        self.holds_parameters = True

    def send(self, action: Send) -> None:
        message = action.message
        if not isinstance(message, Update | Token | Ack | Hello | Offer | Reply):
            raise NoSuchAction(f"a peer cannot {action}")
        self.neighbours.write(action.to.rank, message, self.parameters.publish)

    def reduce(self, action: Reduce) -> None:
        inbox = self.neighbours.inbox
        self.changed = True
        self.parameters.average(action.own, [inbox.held[handle] for handle in action.handles], action.weights)
        self.staleness = max((max(0, action.iteration - handle.iteration) for handle in action.handles), default=0)
        for handle in action.handles:
            inbox.release(handle)

    def apply(self, action: Apply) -> None:
        self.changed = True
        self.parameters.step(self.optimizer_step)
        self.dropped = False

    def drop(self, action: Drop) -> None:
        """Releases parameters of a neighbour that are not used, or leaves out this peer's own gradient."""
        if action.handle.source != self.rank:
            self.neighbours.inbox.release(action.handle)

    def wait(self, action: Wait) -> None:
        self.waits = action.reason
