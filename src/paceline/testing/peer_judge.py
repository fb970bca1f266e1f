"""The judge of random runs of peers. See `paceline.testing.peers` for what is judged."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping

from paceline.core.actions import Action, Apply, Compute, Drop, Reduce, Send
from paceline.core.events import (
    Event,
    GradientReady,
    GradientRejected,
    OfferArrived,
    ReplyArrived,
    TokenArrived,
    UpdateArrived,
)
from paceline.core.formatting import name, to_text
from paceline.core.hop_peer import HopPeer
from paceline.core.machine import Machine
from paceline.core.messages import Handle, Message, Process, Token, Update
from paceline.core.policy import PeerPolicy
from paceline.core.topology import distances, neighbours
from paceline.testing.story import Story

Links = Mapping[tuple[Process, int], deque[Message]]

NOT_TO_BE_APPLIED = -1
"""Stands for the iteration of a gradient that was rejected."""


class PeerJudge:
    def __init__(self, policy: PeerPolicy, story: Story, links: Links) -> None:
        self.policy = policy
        self.story = story
        self.links = links
        peers = story.trace.header.members.workers
        graph = policy.topology(peers)
        self.distance = distances(graph)
        self.graph = neighbours(graph, frozenset(range(peers)))
        self.steady = True
        """Whether nobody comes or goes."""
        self.iteration: defaultdict[Process, int] = defaultdict(int)
        self.arrived: dict[tuple[Process, Handle], int] = {}
        """(where, what) -> 1 while it is there, 0 when it was consumed."""
        self.held: Counter[Process] = Counter()
        """where -> how many updates are there and not consumed."""
        self.newest: dict[tuple[Process, int], int] = {}
        """(where, from whom) -> the newest update that came."""
        self.ready: dict[Process, int] = {}
        """The gradient that is not applied yet."""
        self.weight: defaultdict[Process, float] = defaultdict(float)
        """The weight of each peer's last gradient; 0 before the first."""
        self.averaged: defaultdict[Process, int] = defaultdict(lambda: -1)
        self.told: defaultdict[tuple[int, int], int] = defaultdict(int)
        """(from whom, where) -> the iteration of the last token delivered."""
        self.widest = 0
        """The largest gap seen."""

    def expect(self, condition: bool, rule: str, what: str) -> None:
        self.story.expect(condition, rule, what)

    def note(self, process: Process, event: Event) -> None:
        if isinstance(event, GradientReady):
            self.ready[process] = event.iteration
        elif isinstance(event, GradientRejected):
            self.ready[process] = NOT_TO_BE_APPLIED
        elif isinstance(event, TokenArrived):
            self.told[event.token.peer, process[0]] = event.token.iteration
        handle = None
        if isinstance(event, UpdateArrived):
            handle = event.update.handle
            self.newest[process, handle.source] = handle.iteration
        elif isinstance(event, OfferArrived):
            handle = event.offer.handle
        elif isinstance(event, ReplyArrived):
            handle = event.reply.handle
        if handle is not None:
            self.arrived[process, handle] = self.arrived.get((process, handle), 0) + 1
            self.held[process] += 1

    def judge(self, process: Process, action: Action) -> None:
        what = f"peer {name(process)}: {to_text(action)}"
        match action:
            case Compute(iteration):
                rises = iteration > self.iteration[process] or process not in self.iteration or iteration == 0
                self.expect(rises, "order", f"{what}, it was in {self.iteration[process]}")
                self.expect(process not in self.ready, "order", f"{what}, its gradient is not applied")
                self.iteration[process] = iteration
            case Apply(handles):
                self.weight[process] = handles[0].weight
                self.expect([handle.iteration for handle in handles] == [self.ready.pop(process, None)], "order", what)
            case Send(message=Update(handle)) if getattr(self.policy, "rules", None) is not None:
                true = handle.weight == self.weight[process]
                self.expect(true, "average", f"{what} weighs {handle.weight}, not {self.weight[process]}")
            case Drop(handle) if handle.source != process[0]:
                self.consume(process, handle, what)
            case Drop():
                self.ready.pop(process, None)
            case Reduce(iteration, handles, weights, own):
                for handle in handles:
                    self.consume(process, handle, what)
                sums = abs(own + sum(weights) - 1.0) < 1e-9 and min(own, *weights, 1.0) >= -1e-12
                self.expect(sums, "average", f"{what}: not an average")
                if self.steady:
                    self.judge_average(process, action, what)
                self.averaged[process] = iteration

    def consume(self, process: Process, handle: Handle, what: str) -> None:
        self.expect(self.arrived.get((process, handle), 0) == 1, "handles", f"{what}: not there")
        self.arrived[process, handle] = 0
        self.held[process] -= 1

    def judge_average(self, process: Process, action: Reduce, what: str) -> None:
        """Judges that enough came, and that what is used is fresh enough and of different in-neighbours."""
        rules = getattr(self.policy, "rules", None)
        if rules is None:
            return
        k, ins = action.iteration, self.graph.ins[process[0]]
        senders = [handle.source for handle in action.handles]
        self.expect(len(set(senders)) == len(senders) and set(senders) <= set(ins), "average", f"{what}: of whom?")
        if rules.staleness is None:
            self.expect(all(h.iteration == k for h in action.handles), "average", f"{what}: of other iterations")
            enough = len(senders) >= len(ins) - rules.backup
        else:
            least = k - rules.staleness
            self.expect(all(h.iteration >= least for h in action.handles), "average", f"{what}: too old")
            fresh = [j for j in ins if self.newest.get((process, j), -1) >= least]
            enough = len(fresh) >= len(ins) - rules.backup
            shares = [h.iteration - least + 1.0 for h in action.handles] + [rules.staleness + 1.0]
            self.judge_weights(process, action, shares, f"{what}: not the weights of eq. 2")
        self.expect(enough, "average", f"{what}: not enough of {ins}")
        if rules.is_standard:
            given = self.graph.weights[process[0]]
            shares = [given[h.source] for h in action.handles] + [given[process[0]]]
            self.judge_weights(process, action, shares, f"{what}: not the weights of the graph")
        elif rules.staleness is None:
            self.judge_weights(process, action, [1.0] * (len(senders) + 1), f"{what}: not plain")

    def judge_weights(self, process: Process, action: Reduce, shares: list[float], what: str) -> None:
        """Judges the weights of an average: these shares, each times the samples of the gradient last in it."""
        samples = [*(handle.weight for handle in action.handles), self.weight[process]]
        known = [each for each in samples if each]
        counted = (
            [share * (each or sum(known) / len(known)) for share, each in zip(shares, samples, strict=True)]
            if known
            else shares
        )
        exact = all(
            abs(weight - each / sum(counted)) < 1e-9
            for weight, each in zip((*action.weights, action.own), counted, strict=True)
        )
        self.expect(exact, "average", what)

    def judge_all(self, moved: Process, machines: Mapping[Process, Machine]) -> None:
        """Judges the bounds between all peers, after one has moved."""
        if not self.steady:
            return
        i, at = moved[0], self.iteration[moved]
        max_gap = getattr(self.policy, "max_gap", None)
        for process in machines:
            j = process[0]
            if j == i:
                continue
            ahead = at - self.iteration[process]
            there, back = self.distance[i][j], self.distance[j][i]
            bound = self.policy.most_ahead(there, back)
            self.expect(ahead <= bound, "bound", f"peer {i} is {ahead} ahead of peer {j}, the bound is {bound}")
            self.widest = max(self.widest, ahead)
            if max_gap is not None:
                for holder, giver in ((i, j), (j, i)):
                    if giver in self.graph.outs[holder]:
                        self.judge_tokens(holder, giver, machines[holder, 0], max_gap)
        if max_gap is not None:
            held, room = self.held[moved], (1 + max_gap) * len(self.graph.ins[i])
            self.expect(held <= room, "capacity", f"peer {i} holds {held} updates, there is room for {room}")

    def judge_end(self, process: Process, machine: Machine) -> None:
        """Judges that what came and was never consumed is what the machine still holds."""
        left = self.held[process]
        if isinstance(machine, HopPeer):
            early = [event for events in machine.links.deferred.values() for event in events]
            left -= len(machine.queue) + len(machine.seeds) + sum(isinstance(e, UpdateArrived) for e in early)
        self.expect(left == 0, "handles", f"peer {name(process)} has forgotten {left} of what came")

    def judge_tokens(self, holder: int, giver: int, machine: Machine, max_gap: int) -> None:
        assert isinstance(machine, HopPeer)
        if not machine.links.view.number:
            return
        sent = [message.iteration for message in self.links[(giver, 0), holder] if isinstance(message, Token)]
        in_hand = machine.tokens(giver)
        # A token names an iteration, and is worth those since the one before it on its link.
        in_flight = sent[-1] - self.told[giver, holder] if sent else 0
        owed = self.iteration[giver, 0] - self.iteration[holder, 0] + max_gap
        said = f"peer {holder} has {in_hand} tokens of {giver} and {in_flight} in flight, not {owed}"
        self.expect(in_hand + in_flight == owed and in_hand >= 0 and in_flight >= 0, "tokens", said)
        most = max_gap * (self.distance[giver][holder] + 1)
        self.expect(in_hand <= most, "tokens", f"peer {holder} has {in_hand} tokens of {giver}, more than {most}")
