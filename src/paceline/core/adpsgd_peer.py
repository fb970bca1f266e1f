"""The machine of one peer under AD-PSGD: average with one random neighbour at a time, whatever its iteration.

In each iteration a peer computes a gradient and meanwhile offers its parameters to a neighbour drawn at random, who
answers with its own, as they were, and both take the mean: atomic for the pair, so the average of all peers stays. Then
the gradient, computed on the parameters from before, is applied. (Lian et al. 2018, Algorithm 1; Luo et al. 2019,
section 5.)

Between an offer and its answer the parameters must not change, so a peer that has an offer out cannot serve others. If
it made them wait, offers in a circle would wait for ever: the paper's deadlock. On a bipartite graph one side offers
and the other only answers, as AD-PSGD has it, so that cannot be. On other graphs everybody offers, and here a
peer that is busy says so: the one who asked goes on without. Two offers that cross are each other's answers.

Whoever joins asks its neighbours for parameters and begins with the first that come, in their sender's iteration.
"""

from __future__ import annotations

from paceline.core import events
from paceline.core.actions import Apply, Compute, Drop, Reduce, Send, Wait
from paceline.core.machine import IllegalEvent, Machine, require
from paceline.core.messages import Handle, Hello, Node, Offer, PeerMessage, Reply, Update, View
from paceline.core.pull_gate import coin
from paceline.core.topology import Topology, neighbours, sides

ATTEMPT = 0
JOINING = -1
NOBODY = -1
GOSSIP_STREAM = 77


class ADPSGDPeer(Machine):
    def __init__(self, rank: int, graph: Topology, seed: int) -> None:
        super().__init__()
        self.rank = rank
        self.graph = graph
        self.seed = seed
        self.view = View(0, ())
        self.incarnation = JOINING
        self.members: dict[int, int] = {}
        self.newest: dict[int, int] = {}
        """The newest incarnation of each rank that has been a member."""
        self.neighbours: dict[int, int] = {}
        """The live neighbours and their incarnations."""
        self.begun = False
        self.iteration = 0
        self.computing = False
        self.gradient: Handle | None = None
        self.offered = NOBODY
        """The neighbour that has this peer's offer and has not answered. It answers as long as it is a member, even if
        the edge is gone."""
        self.offers = False
        """Whether this side of the graph makes offers."""
        self.version = 0
        self.sent = 0
        self.deferred: list[events.OfferArrived] = []
        """Offers of peers that no view here has named yet: an answer would not reach them."""
        self.asking: dict[int, int] = {}
        """rank -> incarnation of those who asked for parameters before this peer had any, or before a view named
        them."""

    # Events.

    def on_view_changed(self, event: events.ViewChanged) -> None:
        if event.view.number <= self.view.number:
            return
        self.view = event.view
        members_before, members = self.members, dict(event.view.members)
        self.members = members
        self.newest.update(members)
        if self.incarnation == JOINING:
            self.incarnation = members.get(self.rank, JOINING)
        if self.incarnation == JOINING or members.get(self.rank) != self.incarnation:
            self.stop()
            return
        alive = frozenset(rank for rank in members if rank < self.graph.size)
        before = self.neighbours
        self.neighbours = {peer: members[peer] for peer in neighbours(self.graph, alive).ins[self.rank]}
        side = sides(self.graph, alive)
        self.offers = bool(self.neighbours) and (side is None or side[self.rank] == 0)
        if self.offered != NOBODY and members.get(self.offered) != members_before.get(self.offered):
            self.offered = NOBODY  # it will not answer: go on without
        if event.view.number == 1:
            self.begun = True
            self.enter(0)
        elif not self.begun:
            hello = Hello(self.rank, self.incarnation, JOINING, JOINING, self.view.number)
            for peer, incarnation in self.neighbours.items():
                if before.get(peer) != incarnation:
                    self.send(peer, hello)
        self.answer_joiners()
        deferred, self.deferred = self.deferred, []
        for offer in deferred:
            self.on_offer_arrived(offer)

    def stop(self) -> None:
        self.begun, self.computing, self.offered, self.neighbours = False, False, NOBODY, {}
        if self.gradient is not None:
            self.actions.append(Drop(self.gradient, "this peer was given up"))
            self.gradient = None

    def on_hello_arrived(self, event: events.HelloArrived) -> None:
        self.asking[event.hello.peer] = event.hello.incarnation
        self.answer_joiners()

    def answer_joiners(self) -> None:
        """Sends parameters to those who asked for them and are neighbours by now."""
        if not self.begun:
            return
        for peer, incarnation in list(self.asking.items()):
            if self.neighbours.get(peer, JOINING) >= incarnation:
                del self.asking[peer]
                if self.neighbours[peer] == incarnation:
                    self.send(peer, Update(self.parameters()))

    def on_update_arrived(self, event: events.UpdateArrived) -> None:
        handle = event.update.handle
        if self.begun or self.incarnation == JOINING:
            self.actions.append(Drop(handle, "this peer has parameters already"))
            return
        self.begun = True
        self.actions.append(Reduce(handle.iteration, (handle,), (1.0,), 0.0))
        self.enter(handle.iteration)
        self.answer_joiners()

    def on_offer_arrived(self, event: events.OfferArrived) -> None:
        handle = event.offer.handle
        sender = handle.source
        if self.incarnation == JOINING or self.newest.get(sender, JOINING) < handle.incarnation:
            self.deferred.append(event)
        elif not self.begun or self.members.get(sender) != handle.incarnation:
            self.decline(handle, "this peer has no parameters yet" if not self.begun else f"peer {sender} is gone")
        elif self.offered == sender:
            self.offered = NOBODY
            self.average(handle)
        elif self.offered != NOBODY:
            self.decline(handle, f"this peer waits for the answer of peer {self.offered}")
        else:
            answer = Reply(self.rank, self.incarnation, handle.iteration, self.parameters())
            self.send(sender, answer)
            self.average(handle)

    def decline(self, handle: Handle, reason: str) -> None:
        self.actions.append(Drop(handle, reason))
        self.send(handle.source, Reply(self.rank, self.incarnation, handle.iteration, None))

    def on_reply_arrived(self, event: events.ReplyArrived) -> None:
        reply = event.reply
        due = self.offered == reply.peer and self.members.get(reply.peer) == reply.incarnation
        if due and reply.iteration == self.iteration:
            self.offered = NOBODY
            if reply.handle is not None:
                self.average(reply.handle)
        elif reply.handle is not None:
            self.actions.append(Drop(reply.handle, "this peer went on without it"))

    def on_gradient_ready(self, event: events.GradientReady) -> None:
        self.finish_computing(event, "")

    def on_gradient_rejected(self, event: events.GradientRejected) -> None:
        """Leaves the step out; parameters are exchanged all the same."""
        self.finish_computing(event, event.reason)

    def finish_computing(self, event: events.GradientReady | events.GradientRejected, refusal: str) -> None:
        handle = Handle(self.rank, self.incarnation, event.iteration, self.version, sum(event.nbytes))
        if not self.begun:
            self.actions.append(Drop(handle, "this peer was given up"))
            return
        if not self.computing or (event.iteration, event.attempt) != (self.iteration, ATTEMPT):
            raise IllegalEvent(f"peer {self.rank} is not computing attempt {event.attempt} of {event.iteration}")
        self.computing = False
        if refusal:
            self.actions.append(Drop(handle, refusal))
        else:
            self.gradient = handle
        if self.offered != NOBODY:
            reason = f"waits on peer {self.offered} to answer"
            self.actions.append(Wait(self.iteration, reason, (self.offered,)))

    # Rules.

    def settle(self) -> None:
        if not self.begun or self.computing or self.offered != NOBODY:
            return
        if self.gradient is not None:
            self.version += 1
            self.actions.append(Apply((self.gradient,), 1.0, self.version))
            self.gradient = None
        self.enter(self.iteration + 1)

    def enter(self, iteration: int) -> None:
        self.iteration = iteration
        if self.offers:
            draw = coin(self.seed, GOSSIP_STREAM, self.rank, self.incarnation, iteration)
            self.offered = list(self.neighbours)[int(draw * len(self.neighbours))]
            self.send(self.offered, Offer(self.parameters()))
        self.computing = True
        self.actions.append(Compute(iteration, ATTEMPT))

    def average(self, handle: Handle) -> None:
        self.actions.append(Reduce(self.iteration, (handle,), (0.5,), 0.5))

    def parameters(self) -> Handle:
        self.sent += 1
        return Handle(self.rank, self.incarnation, self.iteration, self.sent, 0)

    def send(self, peer: int, message: PeerMessage) -> None:
        self.actions.append(Send(Node("peer", peer), message))

    def check(self) -> None:
        require(not (self.computing and self.gradient is not None), "it computes while its gradient waits")
        require(self.offered == NOBODY or self.offered in self.members, f"peer {self.offered} is no member")
        require(self.begun or self.offered == NOBODY, "it has no parameters and offers them")
