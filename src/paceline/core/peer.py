"""The machine of one peer under Hop: compute, exchange parameters with its neighbours, average, and again (003).

One iteration k, in parallel order (003, Figure 2b) and in serial order (2a):

    parallel: enter k, send x_k, compute on x_k, receive, average, apply the gradient
    serial:   enter k, compute on x_k, apply the gradient, send, receive, average

then the peer goes on to k+1. Which updates it needs and how it weighs them is in `core/updates.py`; who its neighbours
are, in `core/edges.py`. Three things may hold it back besides:

**Tokens** (003, 4.2), with `max_gap`. A peer starts with max_gap tokens from each out-neighbour, takes one of each when
it enters an iteration and sends one to each in-neighbour. A token says which iteration its sender has entered, so the
tokens in hand are what was heard of the out-neighbour, less the own iteration, plus max_gap: nothing to count, nothing
to lose. In hand + in flight = iter(j) - iter(i) + max_gap, always. The average comes before the wait for tokens.

**Acks** (NOTIFY-ACK, 003, 3.3): on from k only when every out-neighbour has averaged in k-1. The ack is sent at the
average, before waiting for one's own.

**Skipping** (003, 5). A peer whose out-neighbours are all at least `trigger` ahead jumps to k' at most `skip` ahead, to
where the slowest of them is, and not beyond k + max_gap + 1: an in-neighbour can be no further than k + max_gap while
this peer is at k, so later updates cannot come. It first averages what was sent in k'-1. Nobody waits for what it
skips: all who would have needed it have passed k'.

What a receiver is known to have passed is not sent to it.
"""

from __future__ import annotations

from enum import Enum

from paceline.core.actions import Apply, Compute, Drop, Reduce, Send, Wait
from paceline.core.edges import JOINING, EdgeEvent, Edges, Process
from paceline.core.events import (
    AckArrived,
    GradientReady,
    GradientRejected,
    HelloArrived,
    TokenArrived,
    UpdateArrived,
    ViewChanged,
)
from paceline.core.machine import IllegalEvent, Machine, require
from paceline.core.messages import Ack, Handle, Hello, Node, PeerMessage, Token, Update
from paceline.core.topology import Topology
from paceline.core.updates import Rules, UpdateQueue

ATTEMPT = 0


class Phase(Enum):
    """Where in its iteration a peer is."""

    OUTSIDE = "no member, or waiting for parameters to begin with"
    COMPUTING = "computing the gradient"
    RECEIVING = "waiting for updates of its iteration"
    LEAVING = "averaged, waiting for tokens or acks"
    JUMPING = "waiting for updates of the iteration before the one it jumps to"


class Peer(Machine):
    def __init__(self, rank: int, graph: Topology, rules: Rules) -> None:
        super().__init__()
        self.rank = rank
        self.rules = rules
        self.edges = Edges(rank, graph)
        self.queue = UpdateQueue(rules)
        self.phase = Phase.OUTSIDE
        self.iteration = 0
        self.averaged = -1
        """The iteration of the last average."""
        self.target = 0
        """The iteration it jumps to."""
        self.version = 0
        """Steps of the optimizer so far."""
        self.sent = 0
        """Parameters named so far: each sending has a handle of its own."""
        self.gradient: Handle | None = None
        """Computed and not applied yet."""
        self.acked: dict[int, int] = {}
        """out-neighbour -> the last iteration it has averaged in."""
        self.seeds: dict[int, Handle] = {}
        """Parameters to begin with, by neighbour."""
        self.waiting = ""
        """The reason given last."""
        self.steady = True
        """Only the first view so far: the bounds of 003, Table 1 hold."""

    # Facts.

    def on_view_changed(self, event: ViewChanged) -> None:
        if event.view.number <= self.edges.view.number:
            return
        edges = self.edges
        gone, new = edges.change(event.view)
        for peer in gone:
            for handle in self.queue.forget(peer):
                self.drop(handle, f"peer {peer} is no neighbour any more")
        for peer in set(self.acked).difference(edges.outs):
            del self.acked[peer]
        for peer, seed in list(self.seeds.items()):
            if not edges.is_neighbour((peer, seed.incarnation)):
                self.drop(self.seeds.pop(peer), f"peer {peer} is no neighbour any more")
        if edges.known is None:
            self.stop()
            return
        if event.view.number == 1:
            edges.begin()
            self.acked = dict.fromkeys(edges.outs, -1)
            self.enter(0)
        else:
            self.steady = False
            for peer in new:
                self.say_hello(peer)
        for kept in edges.due():
            getattr(self, self.METHODS[type(kept)])(kept)

    def stop(self) -> None:
        """The view does not name this peer (any more)."""
        self.phase = Phase.OUTSIDE
        if self.gradient is not None:
            self.drop(self.gradient, "this peer was given up")
            self.gradient = None

    def on_hello_arrived(self, event: HelloArrived) -> None:
        hello = event.hello
        if not self.is_heard((hello.peer, hello.incarnation), event):
            return
        if self.edges.hear(hello):
            self.say_hello(hello.peer)
        if hello.iteration == JOINING and self.phase is not Phase.OUTSIDE:
            self.send(hello.peer, self.parameters())
        if hello.peer in self.edges.outs:
            self.acked[hello.peer] = max(self.iteration, hello.iteration - 1)

    def on_update_arrived(self, event: UpdateArrived) -> None:
        handle = event.update.handle
        sender = handle.source
        if not self.is_heard((sender, handle.incarnation), event):
            if (sender, handle.incarnation) not in self.edges.early:
                self.drop(handle, f"peer {sender} is no neighbour")
        elif self.phase is Phase.OUTSIDE and sender not in self.seeds:
            self.seeds[sender] = handle
        elif sender not in self.edges.ins:
            self.drop(handle, f"peer {sender} is no in-neighbour")
        elif self.queue.is_late(handle, self.averaged):
            self.drop(handle, f"late: of iteration {handle.iteration}, averaged is {self.averaged}")
        else:
            for replaced in self.queue.add(handle):
                self.drop(replaced, f"another one of peer {sender} is there")

    def on_token_arrived(self, event: TokenArrived) -> None:
        token = event.token
        if self.is_heard((token.peer, token.incarnation), event) and token.peer not in self.edges.awaited:
            self.edges.heard[token.peer] = max(self.edges.heard[token.peer], token.iteration)

    def on_ack_arrived(self, event: AckArrived) -> None:
        ack = event.ack
        if self.is_heard((ack.peer, ack.incarnation), event) and ack.peer in self.acked:
            self.acked[ack.peer] = max(self.acked[ack.peer], ack.iteration)

    def is_heard(self, sender: Process, event: EdgeEvent) -> bool:
        """Whether the sender is a neighbour now. What speaks of a view still to come is kept."""
        return not self.edges.keeps(sender, event) and self.edges.is_neighbour(sender)

    def on_gradient_ready(self, event: GradientReady) -> None:
        self.take_gradient(event, "")

    def on_gradient_rejected(self, event: GradientRejected) -> None:
        """Its step is left out, and parameters are exchanged all the same."""
        self.take_gradient(event, event.reason)

    def take_gradient(self, event: GradientReady | GradientRejected, refusal: str) -> None:
        gradient = Handle(self.rank, self.edges.incarnation, event.iteration, self.version, sum(event.nbytes))
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
        self.say_why()

    def advance(self) -> bool:
        """Do what the state allows; whether it changed."""
        if self.phase is Phase.OUTSIDE:
            return self.begin()
        if self.phase is Phase.COMPUTING or self.edges.awaited:
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
        """Begin with the mean of the neighbours' parameters, when all that have any have sent them."""
        edges = self.edges
        begun = [peer for peer in edges.lives if peer in edges.heard]
        others = all(peer in edges.heard or peer in edges.asking for peer in edges.lives)
        if not begun or not others or not all(peer in self.seeds for peer in begun):
            return False
        handles = tuple(self.seeds.pop(peer) for peer in begun)
        iteration = max(edges.heard[peer] for peer in begun)
        self.averaged = iteration - 1
        for handle in self.queue.forget_late(self.averaged):
            self.drop(handle, f"late: of iteration {handle.iteration}, this peer begins with {iteration}")
        self.actions.append(Reduce(iteration - 1, handles, (1.0 / len(handles),) * len(handles), 0.0))
        self.enter(iteration, joining=True)
        return True

    def average(self, k: int, then: Phase) -> bool:
        """Average the updates of iteration k, if they are there."""
        if not self.queue.is_enough(k, self.edges.firsts):
            return False
        average = self.queue.take(k, self.edges.weights)
        self.actions.append(Reduce(k, average.handles, average.weights, average.own))
        for handle in average.late:
            self.drop(handle, f"late: of iteration {handle.iteration}, averaged is {k}")
        self.averaged = k
        self.phase = then
        self.apply()
        if self.rules.acks:
            self.tell(self.edges.ins, Ack(self.rank, self.edges.incarnation, k))
        return True

    def apply(self) -> None:
        if self.gradient is not None:
            self.version += 1
            self.actions.append(Apply((self.gradient,), 1.0, self.version))
            self.gradient = None

    def lacking(self) -> list[int]:
        """The out-neighbours whose tokens or acks keep the peer in its iteration."""
        if self.rules.acks:
            return [peer for peer in self.edges.outs if self.acked[peer] < self.iteration - 1]
        if self.rules.max_gap is not None:
            return [peer for peer in self.edges.outs if self.tokens(peer) < 1]
        return []

    def tokens(self, peer: int) -> int:
        """The tokens in hand from an out-neighbour."""
        assert self.rules.max_gap is not None
        return self.edges.heard[peer] - self.iteration + self.rules.max_gap

    def jump(self) -> int:
        """How many iterations to go on; 1 unless it skips some."""
        rules = self.rules
        if rules.skip is None or rules.max_gap is None or not self.edges.outs:
            return 1
        behind = min(self.tokens(peer) for peer in self.edges.outs) - rules.max_gap
        return min(rules.skip, behind, rules.max_gap + 1) if behind >= rules.trigger else 1

    def enter(self, iteration: int, joining: bool = False) -> None:
        self.iteration = iteration
        self.phase = Phase.COMPUTING
        self.waiting = ""
        if joining:
            for peer in self.edges.lives:
                asked = peer in self.edges.asking
                self.say_hello(peer, first=iteration)
                if asked:
                    self.send(peer, self.parameters())
            self.acked = dict.fromkeys(self.edges.outs, iteration)
        elif self.rules.max_gap is not None and iteration:
            self.tell(self.edges.ins, Token(self.rank, self.edges.incarnation, iteration))
        if not self.rules.serial:
            self.send_update()
        self.actions.append(Compute(iteration, ATTEMPT))

    # Words.

    def send_update(self) -> None:
        """To all out-neighbours but those that are known to have passed this iteration by more than the slack."""
        passed = self.iteration + self.rules.slack
        wanting = [peer for peer in self.edges.outs if self.edges.heard.get(peer, 0) <= passed]
        if wanting:
            self.tell(wanting, self.parameters())

    def parameters(self) -> Update:
        """The parameters as they are now, under a name of their own."""
        self.sent += 1
        return Update(Handle(self.rank, self.edges.incarnation, self.iteration, self.sent, 0))

    def say_hello(self, peer: int, first: int | None = None) -> None:
        edges = self.edges
        edges.said[peer] = edges.view.number
        if self.phase is Phase.OUTSIDE:
            iteration = first = JOINING
        else:
            iteration = self.iteration
            if first is None:
                first = iteration if self.rules.serial and self.phase is Phase.COMPUTING else iteration + 1
        self.send(peer, Hello(self.rank, edges.incarnation, iteration, first, edges.view.number))

    def tell(self, peers: list[int] | tuple[int, ...], message: PeerMessage) -> None:
        for peer in peers:
            self.send(peer, message)

    def send(self, peer: int, message: PeerMessage) -> None:
        self.actions.append(Send(Node("peer", peer), message))

    def drop(self, handle: Handle, reason: str) -> None:
        self.actions.append(Drop(handle, reason))

    def behind(self) -> list[int]:
        """The neighbours that must get further before this peer does: who is done never will."""
        if self.phase in (Phase.OUTSIDE, Phase.COMPUTING) or self.edges.awaited:
            return []
        if self.phase is Phase.LEAVING:
            return self.lacking()
        return self.queue.missing(self.wanted, self.edges.firsts)

    @property
    def wanted(self) -> int:
        """The iteration whose updates it waits for."""
        return self.iteration if self.phase is Phase.RECEIVING else self.target - 1

    def say_why(self) -> None:
        """Why it does not go on, once for each reason."""
        if self.phase in (Phase.OUTSIDE, Phase.COMPUTING):
            return
        peers = sorted(self.edges.awaited) or self.behind()
        if self.edges.awaited:
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
        room = (1 + self.rules.max_gap) * len(self.edges.ins)
        require(len(self.queue) <= room, f"peer {self.rank} holds {len(self.queue)} updates, there is room for {room}")
        for peer in self.edges.outs:
            require(self.tokens(peer) >= 0, f"peer {self.rank} has {self.tokens(peer)} tokens of peer {peer}")
