"""The machine of one peer under Hop: compute, exchange parameters with its neighbours, average, and again.

Sections and figures are those of Luo et al. 2019.

One iteration k, in parallel order (Figure 2b) and in serial order (2a):

    parallel: enter k, send x_k, compute on x_k, receive, average, apply the gradient
    serial:   enter k, compute on x_k, apply the gradient, send, receive, average

then the peer goes on to k+1. Which updates it needs and how it weighs them is in `core/update_queue.py`; who its
neighbours are, in `core/neighbour_links.py`. Three things may hold it back besides:

**Tokens** (4.2), with `max_gap`. A peer starts with max_gap tokens from each out-neighbour, takes one of each when it
enters an iteration and sends one to each in-neighbour. A token says which iteration its sender has entered, so the
tokens in hand are the out-neighbour's iteration, as far as it is known, less the own iteration, plus max_gap: nothing
has to be counted, and nothing can be lost. In hand + in flight = iter(j) - iter(i) + max_gap, always. The average comes
before the wait for tokens.

**Acks** (NOTIFY-ACK, 3.3): on from k only when every out-neighbour has averaged in k-1. The ack is sent at the
average, before waiting for one's own.

**Skipping** (5). A peer whose out-neighbours are all at least `trigger` ahead jumps to k' at most `skip` ahead, to
where the slowest of them is, and not beyond k + max_gap + 1: an in-neighbour can be no further than k + max_gap while
this peer is at k, so later updates cannot come. It first averages what was sent in k'-1. Nobody waits for what it
skips: all who would have needed it have passed k'.

What a receiver is known to have passed is not sent to it.
"""

from __future__ import annotations

from enum import Enum

from paceline.core import events
from paceline.core.actions import Apply, Compute, Drop, Reduce, Send, Wait
from paceline.core.machine import IllegalEvent, Machine, require
from paceline.core.messages import Ack, Handle, Hello, Node, PeerMessage, Process, Token, Update
from paceline.core.neighbour_links import JOINING, LinkEvent, NeighbourLinks
from paceline.core.push_weights import UNKNOWN
from paceline.core.topology import Topology
from paceline.core.update_queue import HopRules, UpdateQueue

ATTEMPT = 0


class Phase(Enum):
    """Where in its iteration a peer is."""

    OUTSIDE = "no member, or waiting for parameters to begin with"
    COMPUTING = "computing the gradient"
    RECEIVING = "waiting for updates of its iteration"
    LEAVING = "averaged, waiting for tokens or acks"
    JUMPING = "waiting for updates of the iteration before the one it jumps to"


class HopPeer(Machine):
    def __init__(self, rank: int, graph: Topology, rules: HopRules) -> None:
        super().__init__()
        self.rank = rank
        self.rules = rules
        self.links = NeighbourLinks(rank, graph)
        self.queue = UpdateQueue(rules)
        self.phase = Phase.OUTSIDE
        self.iteration = 0
        self.averaged = -1
        """The iteration of the last average."""
        self.target = 0
        """The iteration the peer jumps to."""
        self.version = 0
        """The number of optimizer steps so far."""
        self.sent = 0
        """The number of handles given to parameters so far: each sending has one of its own."""
        self.gradient: Handle | None = None
        """The gradient that was computed and is not applied yet."""
        self.weight = UNKNOWN
        """The weight of the last gradient that was applied."""
        self.acked: dict[int, int] = {}
        """out-neighbour -> the last iteration in which it averaged this peer's update."""
        self.seeds: dict[int, Handle] = {}
        """neighbour -> its parameters, of which a joining peer takes the mean to begin with."""
        self.waiting = ""
        """The reason for waiting that was reported last."""
        self.steady = True
        """Whether there has been only the first view, so that the bounds of Luo et al. 2019, Table 1 hold."""

    # Events.

    def on_view_changed(self, event: events.ViewChanged) -> None:
        if event.view.number <= self.links.view.number:
            return
        links = self.links
        gone, new = links.change(event.view)
        for peer in gone:
            for handle in self.queue.forget(peer):
                self.drop(handle, f"peer {peer} is no neighbour any more")
        for peer in set(self.acked).difference(links.outs):
            del self.acked[peer]
        for peer, seed in list(self.seeds.items()):
            if not links.is_neighbour((peer, seed.incarnation)):
                self.drop(self.seeds.pop(peer), f"peer {peer} is no neighbour any more")
        if links.known is None:
            self.stop()
            return
        if event.view.number == 1:
            links.begin()
            self.acked = dict.fromkeys(links.outs, -1)
            self.enter(0)
        else:
            self.steady = False
            for peer in new:
                self.send_hello(peer)
        for kept in links.take_deferred():
            getattr(self, self.METHODS[type(kept)])(kept)

    def stop(self) -> None:
        """Leaves the run: the view does not name this peer (any more)."""
        self.phase = Phase.OUTSIDE
        if self.gradient is not None:
            self.drop(self.gradient, "this peer was given up")
            self.gradient = None

    def on_hello_arrived(self, event: events.HelloArrived) -> None:
        hello = event.hello
        if not self.is_from_neighbour((hello.peer, hello.incarnation), event):
            return
        if self.links.note_hello(hello):
            self.send_hello(hello.peer)
        if hello.iteration == JOINING and self.phase is not Phase.OUTSIDE:
            self.send(hello.peer, self.parameters())
        if hello.peer in self.links.outs:
            self.acked[hello.peer] = max(self.iteration, hello.iteration - 1)

    def on_update_arrived(self, event: events.UpdateArrived) -> None:
        handle = event.update.handle
        sender = handle.source
        if not self.is_from_neighbour((sender, handle.incarnation), event):
            if (sender, handle.incarnation) not in self.links.deferred:
                self.drop(handle, f"peer {sender} is no neighbour")
        elif self.phase is Phase.OUTSIDE and sender not in self.seeds:
            self.seeds[sender] = handle
        elif sender not in self.links.ins:
            self.drop(handle, f"peer {sender} is no in-neighbour")
        elif self.queue.is_late(handle, self.averaged):
            self.drop(handle, f"late: of iteration {handle.iteration}, averaged is {self.averaged}")
        else:
            for replaced in self.queue.add(handle):
                self.drop(replaced, f"another one of peer {sender} is there")

    def on_token_arrived(self, event: events.TokenArrived) -> None:
        token = event.token
        if self.is_from_neighbour((token.peer, token.incarnation), event) and token.peer not in self.links.awaited:
            self.links.entered[token.peer] = max(self.links.entered[token.peer], token.iteration)

    def on_ack_arrived(self, event: events.AckArrived) -> None:
        ack = event.ack
        if self.is_from_neighbour((ack.peer, ack.incarnation), event) and ack.peer in self.acked:
            self.acked[ack.peer] = max(self.acked[ack.peer], ack.iteration)

    def is_from_neighbour(self, sender: Process, event: LinkEvent) -> bool:
        """Whether the sender is a neighbour now. An event about a view still to come is deferred until then."""
        return not self.links.defers(sender, event) and self.links.is_neighbour(sender)

    def on_gradient_ready(self, event: events.GradientReady) -> None:
        self.finish_computing(event, "", event.weight)

    def on_gradient_rejected(self, event: events.GradientRejected) -> None:
        """Leaves the step out; parameters are exchanged all the same."""
        self.finish_computing(event, event.reason)

    def finish_computing(
        self, event: events.GradientReady | events.GradientRejected, refusal: str, weight: float = UNKNOWN
    ) -> None:
        nbytes = sum(event.nbytes)
        gradient = Handle(self.rank, self.links.incarnation, event.iteration, self.version, nbytes, weight)
        if self.phase is Phase.OUTSIDE:
            self.drop(gradient, "this peer was given up")
            return
        if self.phase is not Phase.COMPUTING or (event.iteration, event.attempt) != (self.iteration, ATTEMPT):
            raise IllegalEvent(f"peer {self.rank} is not computing attempt {event.attempt} of {event.iteration}")
        self.phase = Phase.RECEIVING
        if refusal:
            self.drop(gradient, refusal)
        else:
            self.gradient = gradient
        if self.rules.serial:
            self.apply()
            self.send_update()

    # Rules.

    def settle(self) -> None:
        while self.advance():
            pass
        self.report_wait()

    def advance(self) -> bool:
        """Does what the state allows, and says whether anything changed."""
        if self.phase is Phase.OUTSIDE:
            return self.begin()
        if self.phase is Phase.COMPUTING or self.links.awaited:
            return False
        if self.phase is Phase.RECEIVING:
            return self.average(self.iteration, Phase.LEAVING)
        if self.phase is Phase.JUMPING:
            if not self.average(self.target - 1, Phase.COMPUTING):
                return False
            self.enter(self.target)
            return True
        if self.lacking():
            return False
        jump = self.jump()
        if jump > 1:
            self.target = self.iteration + jump
            self.phase = Phase.JUMPING
        else:
            self.enter(self.iteration + 1)
        return True

    def begin(self) -> bool:
        """Begins with the mean of the neighbours' parameters, once all neighbours that have any have sent them."""
        links = self.links
        begun = [peer for peer in links.incarnations if peer in links.entered]
        others = all(peer in links.entered or peer in links.asking for peer in links.incarnations)
        if not begun or not others or not all(peer in self.seeds for peer in begun):
            return False
        handles = tuple(self.seeds.pop(peer) for peer in begun)
        iteration = max(links.entered[peer] for peer in begun)
        self.averaged = iteration - 1
        for handle in self.queue.forget_late(self.averaged):
            self.drop(handle, f"late: of iteration {handle.iteration}, this peer begins with {iteration}")
        self.actions.append(Reduce(iteration - 1, handles, (1.0 / len(handles),) * len(handles), 0.0))
        self.enter(iteration, joining=True)
        return True

    def average(self, k: int, then: Phase) -> bool:
        """Averages the updates of iteration k, if they are there."""
        if not self.queue.is_enough(k, self.links.firsts):
            return False
        average = self.queue.pop_average(k, self.links.weights, self.weight)
        self.actions.append(Reduce(k, average.handles, average.weights, average.own))
        for handle in average.late:
            self.drop(handle, f"late: of iteration {handle.iteration}, averaged is {k}")
        self.averaged = k
        self.phase = then
        self.apply()
        if self.rules.acks:
            self.broadcast(self.links.ins, Ack(self.rank, self.links.incarnation, k))
        return True

    def apply(self) -> None:
        if self.gradient is not None:
            self.version += 1
            self.actions.append(Apply((self.gradient,), 1.0, self.version))
            self.weight = self.gradient.weight
            self.gradient = None

    def lacking(self) -> list[int]:
        """Returns the out-neighbours whose tokens or acks keep the peer in its iteration."""
        if self.rules.acks:
            return [peer for peer in self.links.outs if self.acked[peer] < self.iteration - 1]
        if self.rules.max_gap is not None:
            return [peer for peer in self.links.outs if self.tokens(peer) < 1]
        return []

    def tokens(self, peer: int) -> int:
        """Returns how many tokens of an out-neighbour this peer holds."""
        assert self.rules.max_gap is not None
        return self.links.entered[peer] - self.iteration + self.rules.max_gap

    def jump(self) -> int:
        """Returns how many iterations to go on: 1, unless the peer skips some."""
        rules = self.rules
        if rules.skip is None or rules.max_gap is None or not self.links.outs:
            return 1
        behind = min(self.tokens(peer) for peer in self.links.outs) - rules.max_gap
        return min(rules.skip, behind, rules.max_gap + 1) if behind >= rules.trigger else 1

    def enter(self, iteration: int, joining: bool = False) -> None:
        self.iteration = iteration
        self.phase = Phase.COMPUTING
        self.waiting = ""
        if joining:
            for peer in self.links.incarnations:
                asked = peer in self.links.asking
                self.send_hello(peer, first=iteration)
                if asked:
                    self.send(peer, self.parameters())
            self.acked = dict.fromkeys(self.links.outs, iteration)
        elif self.rules.max_gap is not None and iteration:
            self.broadcast(self.links.ins, Token(self.rank, self.links.incarnation, iteration))
        if not self.rules.serial:
            self.send_update()
        self.actions.append(Compute(iteration, ATTEMPT))

    # Messages.

    def send_update(self) -> None:
        """Sends the parameters to all out-neighbours but those known to have passed this iteration by more than the
        slack."""
        passed = self.iteration + self.rules.slack
        wanting = [peer for peer in self.links.outs if self.links.entered.get(peer, 0) <= passed]
        if wanting:
            self.broadcast(wanting, self.parameters())

    def parameters(self) -> Update:
        """Names the parameters as they are now by a new handle."""
        self.sent += 1
        return Update(Handle(self.rank, self.links.incarnation, self.iteration, self.sent, 0, self.weight))

    def send_hello(self, peer: int, first: int | None = None) -> None:
        links = self.links
        links.greeted[peer] = links.view.number
        if self.phase is Phase.OUTSIDE:
            iteration = first = JOINING
        else:
            iteration = self.iteration
            if first is None:
                first = iteration if self.rules.serial and self.phase is Phase.COMPUTING else iteration + 1
        self.send(peer, Hello(self.rank, links.incarnation, iteration, first, links.view.number))

    def broadcast(self, peers: list[int] | tuple[int, ...], message: PeerMessage) -> None:
        for peer in peers:
            self.send(peer, message)

    def send(self, peer: int, message: PeerMessage) -> None:
        self.actions.append(Send(Node("peer", peer), message))

    def drop(self, handle: Handle, reason: str) -> None:
        self.actions.append(Drop(handle, reason))

    @property
    def is_overtaken(self) -> bool:
        """Whether it computes, and an in-neighbour is known to be further: others may be waiting for it. In serial
        order the update of an iteration says that it was computed, in parallel order that it was begun."""
        sent = [*self.queue.newest.values(), *(first - 1 for first in self.links.firsts.values())]
        return self.phase is Phase.COMPUTING and max(sent, default=-1) > self.iteration - self.rules.serial

    def behind(self) -> list[int]:
        """Returns the neighbours that must get further before this peer does; a neighbour that is done never will."""
        if self.phase in (Phase.OUTSIDE, Phase.COMPUTING) or self.links.awaited:
            return []
        if self.phase is Phase.LEAVING:
            return self.lacking()
        return self.queue.missing(self.wanted, self.links.firsts)

    @property
    def wanted(self) -> int:
        """The iteration whose updates the peer waits for."""
        return self.iteration if self.phase is Phase.RECEIVING else self.target - 1

    def report_wait(self) -> None:
        """Reports why the peer does not go on, once for each reason."""
        if self.phase in (Phase.OUTSIDE, Phase.COMPUTING):
            return
        peers = sorted(self.links.awaited) or self.behind()
        if self.links.awaited:
            what = "to say where they are"
        elif self.phase is Phase.LEAVING:
            what = "to acknowledge" if self.rules.acks else f"{self.rules.max_gap} behind"
        else:
            what = f"for the update of iteration {self.wanted}"
        if what != self.waiting:
            self.waiting = what
            on = f"waits on peer{'s' * (len(peers) > 1)} {', '.join(map(str, peers))}"
            self.actions.append(Wait(self.iteration, f"{on}, {what}", tuple(peers)))

    # Invariants.

    def check(self) -> None:
        require(self.averaged <= self.iteration, f"{self.averaged} is averaged in iteration {self.iteration}")
        require(not self.seeds or self.phase is Phase.OUTSIDE, f"parameters to begin with are left: {self.seeds}")
        require((self.gradient is not None) <= (self.phase is Phase.RECEIVING), "a gradient waits outside its place")
        for handle in self.queue.handles():
            require(not self.queue.is_late(handle, self.averaged), f"{handle} is late and still here")
        if not self.steady or self.phase is Phase.OUTSIDE or self.rules.max_gap is None:
            return
        room = (1 + self.rules.max_gap) * len(self.links.ins)
        require(len(self.queue) <= room, f"peer {self.rank} holds {len(self.queue)} updates, there is room for {room}")
        for peer in self.links.outs:
            require(self.tokens(peer) >= 0, f"peer {self.rank} has {self.tokens(peer)} tokens of peer {peer}")
