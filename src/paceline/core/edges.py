"""A peer's edges: who its neighbours are as members come and go, and the first word on each new edge.

At the start (view 1) everybody begins with iteration 0 and equal parameters, and there is nothing to say. Later a view
may make new edges: to a peer that joined, or between two who were joined through one that is gone
(core/topology.py). On a new edge both ends say `Hello` first: in which iteration they are, and from which on they
send updates. Until a peer has heard that from every new neighbour it enters no iteration and averages nothing, so
nobody runs away from those who arrive. Then an in-neighbour's updates are waited for from its first on, and an
out-neighbour's tokens count from where it is.

A peer that joined says -1: it has no parameters. Neighbours that have send theirs at once; it begins with their mean,
in the largest of their iterations, and says `Hello` again. At least one neighbour of the joining must have
begun, and of those who join at once the others follow. (If all peers that had parameters die, a run is over.)

Views may be seen late, or skipped, on one end of an edge: who gets a `Hello` of a later view than it has said one in
answers with one, even if for it the edge had never gone; and one of a view still to come is kept, with what follows
it on that edge, until the view is there.
"""

from __future__ import annotations

from paceline.core.events import AckArrived, HelloArrived, TokenArrived, UpdateArrived
from paceline.core.messages import Hello, View
from paceline.core.topology import Neighbours, Topology, neighbours

JOINING = -1
NOT_A_MEMBER = -1

EdgeEvent = UpdateArrived | TokenArrived | AckArrived | HelloArrived
Process = tuple[int, int]
"""One life of a peer: its rank and its incarnation."""


class Edges:
    """What peer `rank` knows of its neighbours."""

    def __init__(self, rank: int, graph: Topology) -> None:
        self.rank = rank
        self.graph = graph
        self.view = View(0, ())
        self.incarnation = NOT_A_MEMBER
        self.known: Neighbours | None = None
        self.lives: dict[int, int] = {}
        """The neighbours, with their incarnations."""
        self.firsts: dict[int, int] = {}
        """in-neighbour -> the iteration of its first update."""
        self.heard: dict[int, int] = {}
        """neighbour -> the iteration it is known to have entered."""
        self.awaited: set[int] = set()
        """Neighbours that have not said in which iteration they are."""
        self.said: dict[int, int] = {}
        """neighbour -> the newest view this peer has said `Hello` in."""
        self.asking: set[int] = set()
        """Neighbours that have joined and ask for parameters."""
        self.early: dict[Process, list[EdgeEvent]] = {}
        """What came after a `Hello` of a view that is not here yet."""

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
        """Take a newer view; the in-neighbours that are gone and the neighbours with a new edge, in rank order."""
        self.view = view
        members = dict(view.members)
        if self.incarnation == NOT_A_MEMBER:
            self.incarnation = members.get(self.rank, NOT_A_MEMBER)
        before, ins, outs = self.lives, self.ins, self.outs
        if members.get(self.rank) != self.incarnation or self.incarnation == NOT_A_MEMBER:
            self.known, self.lives = None, {}
        else:
            alive = frozenset(rank for rank in members if rank < self.graph.size)
            self.known = neighbours(self.graph, alive)
            self.lives = {peer: members[peer] for peer in sorted({*self.ins, *self.outs})}
        for peer, life in before.items():
            if self.lives.get(peer) != life:
                self.heard.pop(peer, None)
                self.said.pop(peer, None)
                self.awaited.discard(peer)
                self.asking.discard(peer)
        gone = [peer for peer in ins if peer not in self.ins or self.lives[peer] != before[peer]]
        for peer in gone:
            self.firsts.pop(peer, None)
        new = {peer for peer, life in self.lives.items() if before.get(peer) != life}
        new.update(set(self.ins).difference(ins), set(self.outs).difference(outs))
        self.awaited |= new
        return gone, sorted(new)

    def begin(self) -> None:
        """All start together: nobody has anything to say."""
        self.firsts = dict.fromkeys(self.ins, 0)
        self.heard = dict.fromkeys(self.lives, 0)
        self.awaited.clear()

    def is_neighbour(self, sender: Process) -> bool:
        return self.lives.get(sender[0]) == sender[1]

    def keeps(self, sender: Process, event: EdgeEvent) -> bool:
        """Whether this speaks of an edge that a view still to come makes; then it is kept until that view."""
        if isinstance(event, HelloArrived) and event.hello.view > self.view.number:
            self.early.setdefault(sender, [])
        if sender not in self.early:
            return False
        self.early[sender].append(event)
        return True

    def due(self) -> list[EdgeEvent]:
        """What was kept for the view that has come now."""
        due: list[EdgeEvent] = []
        for sender, events in list(self.early.items()):
            if max(event.hello.view for event in events if isinstance(event, HelloArrived)) <= self.view.number:
                due += self.early.pop(sender)
        return due

    def hear(self, hello: Hello) -> bool:
        """Take a neighbour's hello; whether it wants an answer."""
        peer = hello.peer
        if hello.iteration == JOINING:
            self.asking.add(peer)
        else:
            self.asking.discard(peer)
            self.awaited.discard(peer)
            self.heard[peer] = hello.iteration
            if peer in self.ins:
                self.firsts[peer] = hello.first
        return hello.view > self.said.get(peer, 0)
