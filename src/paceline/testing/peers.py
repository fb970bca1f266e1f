"""Random runs of peers: a fake wire that joins the machines of a policy without servers, and a judge.

    story = play_peers(Hop(graph="ring", staleness=2), peers=6, iterations=10, seed=7)

Each (sender, receiver) link is first in, first out, and has its own pace; computing takes as long as it likes. With
`faults`, peers are killed (what they had sent may still arrive, cut off after a random prefix), come back under the
next incarnation, and each receiver gets each view after a delay of its own. At least one peer that was there from the
start stays. A peer that is to compute iteration `iterations` is done; it still answers.

What is judged, from what was delivered, never from the machines' fields (tokens in hand apart):

- *hang*: when nothing is in flight any more, every live peer has reached the last iteration;
- *bound* (without faults): nobody is further ahead of anybody than the policy's `most_ahead` (Luo et al. 2019,
  Table 1);
- *tokens* (without faults): in hand + in flight = iter(j) - iter(i) + max_gap on each edge i -> j, after every event,
  and no more in hand than max_gap * (d(j -> i) + 1);
- *capacity* (without faults): updates held at most (1 + max_gap) * in-neighbours;
- *handles*: an update is consumed once, by `Reduce` or `Drop`, where it arrived, and after it did; at the end none is
  there that the machine does not hold;
- *average*: weights are not negative and sum to 1. Without faults: of each in-neighbour at most one update, enough of
  them, and fresh enough, with the weights of the mode (times the samples behind each, in a `weighted` run);
- *order*: a peer's iterations rise, and each gradient is applied once, before the next is computed.

Whatever a machine raises is rule *machine*.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.actions import Action, Compute, Send
from paceline.core.events import Event, GradientReady, GradientRejected, ViewChanged, arrival_of
from paceline.core.formatting import name
from paceline.core.machine import Machine
from paceline.core.messages import Members, Node, Process, View
from paceline.core.policy import PeerPolicy
from paceline.core.trace import Header
from paceline.testing.fake_wire import FakeWire
from paceline.testing.peer_judge import PeerJudge
from paceline.testing.story import Story

Link = tuple[Process, int]
"""A link leads from a sender to the rank of a receiver."""
PeerFactory = Callable[[int, Members, int], Machine]
"""Makes the machine of a rank; a substitute breaks a rule on purpose."""


class PeerRun(FakeWire[Link]):
    """One random run. `frozen` peers never finish a computation, so that one sees how far the others get."""

    def __init__(
        self, policy: PeerPolicy, header: Header, iterations: int, make: PeerFactory, frozen: frozenset[int]
    ) -> None:
        super().__init__(header)
        self.policy = policy
        self.peers = header.members.workers
        self.iterations = iterations
        self.make = make
        self.frozen = frozen
        self.machines: dict[Process, Machine] = {}
        self.incarnations: dict[int, int] = {}
        self.view = View(0, ())
        self.veterans: set[Process] = set()
        self.judge = PeerJudge(policy, self.story, self.links)

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
        self.run(troubles, 200 * usual)
        at = {process: self.judge.iteration[process] for process in self.machines if process[0] not in self.frozen}
        stuck = {name(process): k for process, k in at.items() if k < self.iterations}
        if not self.frozen:
            self.story.expect(not stuck, "hang", f"nothing is in flight, not done are {stuck}")
        for process, machine in self.machines.items():
            self.judge.judge_end(process, machine)
        return self.story

    def deliver(self, link: Link) -> None:
        """Delivers the oldest message of a link, unless it was cut off. Dead peers receive nothing."""
        if self.links[link]:
            message = self.links[link].popleft()
            self.step((link[1], self.incarnations[link[1]]), arrival_of(message, self.now))

    def step(self, process: Process, event: Event) -> None:
        machine = self.machines.get(process)
        if machine is None:
            return
        actions = self.tell(machine, Node("peer", process[0]), process[1], event)
        self.judge.note(process, event)
        for action in actions:
            self.story.counts[type(action).__name__] += 1
            self.judge.judge(process, action)
            self.carry_out(process, action)
        self.judge.judge_all(process, self.machines)

    def carry_out(self, process: Process, action: Action) -> None:
        match action:
            case Send(to, message):
                self.send((process, to.rank), message)
            case Compute(iteration, attempt):
                if iteration < self.iterations and process[0] not in self.frozen:
                    duration = self.pace[process] * self.random.uniform(0.5, 1.5)
                    weight = self.weigh()
                    ready: Event = GradientReady(self.now + duration, iteration, attempt, (8,), weight)
                    if self.faults and self.random.random() < 0.03:
                        ready = GradientRejected(self.now + duration, iteration, attempt, (8,), "not finite")
                    self.later(duration, self.step, process, ready)

    # Members.

    def join(self, *ranks: int) -> None:
        for rank in ranks:
            self.incarnations[rank] = self.incarnations.get(rank, -1) + 1
            machine = self.make(rank, self.story.trace.header.members, self.story.trace.header.seed)
            machine.checks = True
            self.machines[rank, self.incarnations[rank]] = machine
        self.announce()

    def announce(self) -> None:
        self.view = View(self.view.number + 1, tuple(sorted(self.machines)))
        for process in self.machines:
            first = self.view.number == 1
            self.later(
                0.0 if first else self.delay() * self.pace["views"],
                self.step,
                process,
                ViewChanged(self.now, self.view),
            )

    def kill(self) -> None:
        victims = sorted(self.machines)
        victim = self.random.choice(victims)
        if len(self.veterans & set(victims)) == 1 and victim in self.veterans:
            return
        self.story.counts["kills"] += 1
        del self.machines[victim]
        for link in self.links:
            if link[0] == victim:
                self.cut(link)
        if self.random.random() < 0.5:
            self.later(self.delay() * self.pace["detecting"], self.announce)
        else:
            self.revive()

    def revive(self) -> None:
        """Starts a rank again that is gone, sometimes before anybody has noticed."""
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
    weighted: bool = False,
) -> Story:
    """Plays one random run to its end. Raises `PolicyBroken` if the policy broke a rule."""
    run = peer_run(policy, peers=peers, iterations=iterations, seed=seed, frozen=frozen, make=make)
    run.weighted = weighted
    return run.play(faults)


def peer_run(
    policy: PeerPolicy,
    *,
    peers: int,
    iterations: int = 10,
    seed: int,
    frozen: frozenset[int] = frozenset(),
    make: PeerFactory | None = None,
) -> PeerRun:
    """Makes a random run that is not played yet."""
    members = Members(peers, 0)
    policy.validate(members)
    header = Header("testing", str(policy), members, seed, (8,))

    def made(rank: int, members: Members, seed: int) -> Machine:
        return policy.machine("peer", rank, members, seed)

    return PeerRun(policy, header, iterations, make or made, frozen)


__all__ = ["PeerFactory", "PeerRun", "peer_run", "play_peers"]
