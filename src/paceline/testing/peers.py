"""Random runs of peers: a fake wire that joins the machines of a policy without servers, and a judge.

    story = play_peers(Hop(graph="ring", staleness=2), peers=6, iterations=10, seed=7)

Each (sender, receiver) link is first in, first out, and has its own pace; computing takes as long as it likes. With
`faults`, peers are killed (what they had sent may still arrive, cut off after a random prefix), come back under the
next incarnation, and each receiver gets each view after a delay of its own. At least one peer that was there from the
start stays. A peer that is to compute iteration `iterations` is done; it still answers.

What is judged, from what was delivered, never from the machines' fields (tokens in hand apart):

- *hang*: when nothing is in flight any more, every live peer has reached the last iteration;
- *bound* (without faults): nobody is further ahead of anybody than the policy's `most_ahead` (003, Table 1);
- *tokens* (without faults): in hand + in flight = iter(j) - iter(i) + max_gap on each edge i -> j, after every event,
  and no more in hand than max_gap * (d(j -> i) + 1);
- *capacity* (without faults): updates held at most (1 + max_gap) * in-neighbours;
- *handles*: an update is consumed once, by `Reduce` or `Drop`, where it arrived, and after it did; at the end none is
  there that the machine does not hold;
- *average*: weights are not negative and sum to 1. Without faults: of each in-neighbour at most one update, enough of
  them, and fresh enough, with the weights of the mode;
- *order*: a peer's iterations rise, and each gradient is applied once, before the next is computed.

Whatever a machine raises is rule *machine*.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

from paceline.core.actions import Action, Compute, Send
from paceline.core.events import (
    AckArrived,
    Event,
    GradientReady,
    GradientRejected,
    HelloArrived,
    OfferArrived,
    ReplyArrived,
    TokenArrived,
    UpdateArrived,
    ViewChanged,
)
from paceline.core.machine import Machine
from paceline.core.messages import Ack, Hello, Members, Message, Node, Offer, Reply, Token, Update, View
from paceline.core.policy import PeerPolicy
from paceline.core.trace import Header, Record
from paceline.core.words import Process, name
from paceline.testing.peer_judge import PeerJudge
from paceline.testing.story import PolicyBroken, Story

PeerFactory = Callable[[int, Members, int], Machine]
"""Makes the machine of a rank; a substitute breaks a rule on purpose."""

ARRIVALS: dict[type, Callable[[float, Any], Event]] = {
    Update: UpdateArrived,
    Token: TokenArrived,
    Ack: AckArrived,
    Hello: HelloArrived,
    Offer: OfferArrived,
    Reply: ReplyArrived,
}


class PeerRun:
    """One random run. `frozen` peers never finish a computation, so that one sees how far the others get."""

    def __init__(
        self, policy: PeerPolicy, header: Header, iterations: int, make: PeerFactory, frozen: frozenset[int]
    ) -> None:
        self.story = Story(header)
        self.policy = policy
        self.peers = header.members.workers
        self.iterations = iterations
        self.make = make
        self.frozen = frozen
        self.random = Random(header.seed)
        self.now = 0.0
        self.order = count()
        self.flight: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.links: defaultdict[tuple[Process, int], deque[Message]] = defaultdict(deque)
        """(sender, receiver) -> what is on its way."""
        self.slowness = self.random.choice((0.1, 0.5, 2.0))
        self.pace: defaultdict[Any, float] = defaultdict(lambda: self.random.choice((0.3, 1.0, 1.0, 8.0)))
        self.machines: dict[Process, Machine] = {}
        self.lives: dict[int, int] = {}
        self.view = View(0, ())
        self.veterans: set[Process] = set()
        self.judge = PeerJudge(policy, self.story, self.links)
        self.faults = False

    def play(self, faults: bool) -> Story:
        self.faults = faults
        self.judge.steady = not faults
        self.join(*range(self.peers))
        self.veterans = set(self.machines)
        usual = 8 * self.peers * self.iterations
        troubles = []
        if faults:
            for trouble in [self.kill] * self.random.randint(1, 4) + [self.revive] * self.random.randint(0, 4):
                troubles.append((self.random.randrange(usual // 2), trouble))
        for done in count():
            for when, trouble in troubles:
                if when == done:
                    trouble()
            if not self.flight or done > 200 * usual:
                break
            self.now, _, deliver, what = heappop(self.flight)
            deliver(*what)
        self.story.expect(not self.flight, "hang", "the run does not come to an end")
        at = {process: self.judge.iteration[process] for process in self.machines if process[0] not in self.frozen}
        stuck = {name(process): k for process, k in at.items() if k < self.iterations}
        if not self.frozen:
            self.story.expect(not stuck, "hang", f"nothing is in flight, not done are {stuck}")
        for process, machine in self.machines.items():
            self.judge.judge_end(process, machine)
        return self.story

    def later(self, delay: float, deliver: Callable[..., None], *what: Any) -> None:
        heappush(self.flight, (self.now + delay, next(self.order), deliver, what))

    def delay(self, what: object) -> float:
        return self.random.expovariate(1 / self.slowness) * self.pace[what]

    def deliver(self, link: tuple[Process, int]) -> None:
        """The oldest message of a link arrives, unless it was cut off. The dead hear nothing."""
        if not self.links[link]:
            return
        message = self.links[link].popleft()
        to = (link[1], self.lives[link[1]])
        self.step(to, ARRIVALS[type(message)](self.now, message))

    def step(self, process: Process, event: Event) -> None:
        machine = self.machines.get(process)
        if machine is None:
            return
        node = Node("peer", process[0])
        self.story.counts["deliveries"] += 1
        try:
            actions = machine.handle(event)
        except Exception as error:
            self.story.trace.records.append(Record(node, process[1], event, ()))
            raise PolicyBroken("machine", f"{node}: {type(error).__name__}: {error}", self.story) from error
        self.story.trace.records.append(Record(node, process[1], event, tuple(actions)))
        self.judge.note(process, event)
        for action in actions:
            self.story.counts[type(action).__name__] += 1
            self.judge.judge(process, action)
            self.carry_out(process, action)
        self.judge.judge_all(process, self.machines)

    def carry_out(self, process: Process, action: Action) -> None:
        match action:
            case Send(to, message):
                link = (process, to.rank)
                self.links[link].append(message)
                self.later(self.delay(link), self.deliver, link)
            case Compute(iteration, attempt):
                if iteration < self.iterations and process[0] not in self.frozen:
                    duration = self.pace[process] * self.random.uniform(0.5, 1.5)
                    ready: Event = GradientReady(self.now + duration, iteration, attempt, (8,))
                    if self.faults and self.random.random() < 0.03:
                        ready = GradientRejected(self.now + duration, iteration, attempt, (8,), "not finite")
                    self.later(duration, self.step, process, ready)

    # Members.

    def join(self, *ranks: int) -> None:
        for rank in ranks:
            self.lives[rank] = self.lives.get(rank, -1) + 1
            machine = self.make(rank, self.story.trace.header.members, self.story.trace.header.seed)
            machine.checks = True
            self.machines[rank, self.lives[rank]] = machine
        self.announce()

    def announce(self) -> None:
        self.view = View(self.view.number + 1, tuple(sorted(self.machines)))
        for process in self.machines:
            first = self.view.number == 1
            self.later(0.0 if first else self.delay("views"), self.step, process, ViewChanged(self.now, self.view))

    def kill(self) -> None:
        victims = sorted(self.machines)
        victim = self.random.choice(victims)
        if len(self.veterans & set(victims)) == 1 and victim in self.veterans:
            return
        self.story.counts["kills"] += 1
        del self.machines[victim]
        for (sender, _), sent in self.links.items():
            if sender == victim:
                for _ in range(self.random.randint(0, len(sent))):
                    sent.pop()
        if self.random.random() < 0.5:
            self.later(self.delay("detecting"), self.announce)
        else:
            self.revive()

    def revive(self) -> None:
        """A rank that is gone comes back, sometimes before anybody has noticed."""
        alive = {rank for rank, _ in self.machines}
        absent = [rank for rank in range(self.peers) if rank not in alive]
        if absent:
            self.story.counts["joins"] += 1
            self.join(self.random.choice(absent))


def play_peers(
    policy: PeerPolicy,
    *,
    peers: int,
    iterations: int = 10,
    seed: int,
    faults: bool = False,
    frozen: frozenset[int] = frozenset(),
    make: PeerFactory | None = None,
) -> Story:
    """Play one random run to its end. Raises `PolicyBroken` if the policy broke a rule."""
    return peer_run(policy, peers=peers, iterations=iterations, seed=seed, frozen=frozen, make=make).play(faults)


def peer_run(
    policy: PeerPolicy,
    *,
    peers: int,
    iterations: int = 10,
    seed: int,
    frozen: frozenset[int] = frozenset(),
    make: PeerFactory | None = None,
) -> PeerRun:
    """The same, not yet played."""
    members = Members(peers, 0)
    policy.validate(members)
    header = Header("testing", str(policy), members, seed, (8,))

    def made(rank: int, members: Members, seed: int) -> Machine:
        return policy.machine("peer", rank, members, seed)

    return PeerRun(policy, header, iterations, make or made, frozen)


__all__ = ["PeerFactory", "PeerRun", "peer_run", "play_peers"]
