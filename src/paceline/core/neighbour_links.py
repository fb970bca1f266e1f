"""A peer's links: who its neighbours are as members come and go, and the greeting on each new edge.

At the start (view 1) all peers begin with iteration 0 and equal parameters, and nothing has to be announced. Later a
view may make new edges: to a peer that joined, or between two that were joined through one that is gone
(`core/topology.py`). On a new edge both ends send `Hello` first, with the iteration they are in and the first one of
which they will send updates. Until a peer has that from every new neighbour it enters no iteration and averages
nothing, so it cannot run away from those who arrive. Then it waits for an in-neighbour's updates from the first
one on, and an out-neighbour's tokens count from where it is.

The `Hello` of a peer that joined has iteration -1: it has no parameters. Neighbours that have parameters send theirs at
once; the peer begins with their mean, in the largest of their iterations, and sends `Hello` again. At least one
neighbour of the joining must have begun; of those who join together the others follow. (If all peers that had
parameters die, a run is over.)

A view may arrive late, or be skipped, at one end of an edge. So a peer answers the `Hello` of a later view than its own
last one with another, even if for it the edge had never gone; and a `Hello` of a view still to come is deferred, with
what follows it on that edge, until the view is there.
"""

from __future__ import annotations

from paceline.core.events import AckArrived, HelloArrived, TokenArrived, UpdateArrived
from paceline.core.messages import Hello, Process, View
from paceline.core.topology import Neighbours, Topology, neighbours

JOINING = -1
NOT_A_MEMBER = -1

LinkEvent = UpdateArrived | TokenArrived | AckArrived | HelloArrived


class NeighbourLinks:
    """What peer `rank` knows of its neighbours."""

    def __init__(self, rank: int, graph: Topology) -> None:
        self.rank = rank
        self.graph = graph
        self.view = View(0, ())
        self.incarnation = NOT_A_MEMBER
        self.known: Neighbours | None = None
        self.incarnations: dict[int, int] = {}
        """The live neighbours and their incarnations."""
        self.firsts: dict[int, int] = {}
        """in-neighbour -> the iteration of the first update it sends on this edge."""
        self.entered: dict[int, int] = {}
        """neighbour -> the iteration it is known to have entered."""
        self.awaited: set[int] = set()
        """Neighbours that have not said in which iteration they are."""
        self.greeted: dict[int, int] = {}
        """neighbour -> the newest view in which this peer has sent it a `Hello`."""
        self.asking: set[int] = set()
        """Neighbours that have joined and ask for parameters."""
        self.deferred: dict[Process, list[LinkEvent]] = {}
        """Events that follow a `Hello` of a view that has not arrived here yet."""

    @property
    def ins(self) -> tuple[int, ...]:
        return self.known.ins[self.rank] if self.known is not None else ()

    @property
    def outs(self) -> tuple[int, ...]:
        return self.known.outs[self.rank] if self.known is not None else ()

    @property
    def weights(self) -> dict[int, float]:
        assert self.known is not None
        return self.known.weights[self.rank]

    def change(self, view: View) -> tuple[list[int], list[int]]:
        """Adopts a newer view; returns the in-neighbours that are gone and the neighbours with a new edge, in rank
        order."""
        self.view = view
        members = dict(view.members)
        if self.incarnation == NOT_A_MEMBER:
            self.incarnation = members.get(self.rank, NOT_A_MEMBER)
        before, ins, outs = self.incarnations, self.ins, self.outs
        if members.get(self.rank) != self.incarnation or self.incarnation == NOT_A_MEMBER:
            self.known, self.incarnations = None, {}
        else:
            alive = frozenset(rank for rank in members if rank < self.graph.size)
            self.known = neighbours(self.graph, alive)
            self.incarnations = {peer: members[peer] for peer in sorted({*self.ins, *self.outs})}
        for peer, incarnation in before.items():
            if self.incarnations.get(peer) != incarnation:
                self.entered.pop(peer, None)
                self.greeted.pop(peer, None)
                self.awaited.discard(peer)
                self.asking.discard(peer)
        gone = [peer for peer in ins if peer not in self.ins or self.incarnations[peer] != before[peer]]
        for peer in gone:
            self.firsts.pop(peer, None)
        new = {peer for peer, incarnation in self.incarnations.items() if before.get(peer) != incarnation}
        new.update(set(self.ins).difference(ins), set(self.outs).difference(outs))
        self.awaited |= new
        return gone, sorted(new)

    def begin(self) -> None:
        """Starts all peers together in iteration 0, with nothing to announce."""
        self.firsts = dict.fromkeys(self.ins, 0)
        self.entered = dict.fromkeys(self.incarnations, 0)
        self.awaited.clear()

    def is_neighbour(self, sender: Process) -> bool:
        return self.incarnations.get(sender[0]) == sender[1]

    def defers(self, sender: Process, event: LinkEvent) -> bool:
        """Whether the event is about an edge that a view still to come makes; then it is kept until that view."""
        if isinstance(event, HelloArrived) and event.hello.view > self.view.number:
            self.deferred.setdefault(sender, [])
        if sender not in self.deferred:
            return False
        self.deferred[sender].append(event)
        return True

    def take_deferred(self) -> list[LinkEvent]:
        """Returns the events that were deferred until the view that has come now."""
        due: list[LinkEvent] = []
        for sender, events in list(self.deferred.items()):
            if max(event.hello.view for event in events if isinstance(event, HelloArrived)) <= self.view.number:
                due += self.deferred.pop(sender)
        return due

    def note_hello(self, hello: Hello) -> bool:
        """Notes a neighbour's hello, and says whether it wants an answer."""
        peer = hello.peer
        if hello.iteration == JOINING:
            self.asking.add(peer)
        else:
            self.asking.discard(peer)
            self.awaited.discard(peer)
            self.entered[peer] = hello.iteration
            if peer in self.ins:
                self.firsts[peer] = hello.first
        return hello.view > self.greeted.get(peer, 0)
