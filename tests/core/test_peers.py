"""Table 1 of Luo et al. 2019 holds for peers and is reached; `paceline.testing.peers` catches broken rules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline import graphs as named_graphs
from paceline.core.actions import Action, Apply, Compute, Drop, Reduce, Send
from paceline.core.adpsgd_peer import NOBODY, ADPSGDPeer
from paceline.core.events import (
    Event,
    GradientReady,
    GradientRejected,
    OfferArrived,
    ReplyArrived,
    UpdateArrived,
    ViewChanged,
)
from paceline.core.hop_peer import HopPeer
from paceline.core.machine import Machine
from paceline.core.messages import Handle, Members, Offer, Reply, Token, Update, View
from paceline.core.policy import PeerPolicy
from paceline.core.topology import Topology, distances, neighbours, topology
from paceline.core.trace import replay
from paceline.policies import Hop, parse
from paceline.testing.peers import PeerRun, peer_run, play_peers
from paceline.testing.story import PolicyBroken, Story

from . import broken_peers
from .broken_peers import LONG_WAY_BACK, OnGraph
from .drive import seeds

MODES = [
    "hop:graph=ring",
    "hop:graph=ring,max_gap=2",
    "hop:graph=ring-based,order=serial",
    "hop:graph=ring-based,backup=1,max_gap=4",
    "hop:graph=ring-based,backup=1,max_gap=1,order=serial",
    "hop:graph=ring,staleness=2",
    "hop:graph=exponential,staleness=1,max_gap=3",
    "hop:graph=ring-based,backup=1,staleness=2,max_gap=3",
    "hop:graph=ring,notify_ack=true",
    "hop:graph=exponential,notify_ack=true,order=serial",
    "hop:graph=ring-based,backup=1,max_gap=3,skip=10",
    "hop:graph=exponential,backup=1,max_gap=2,skip=10,trigger=1",
    "hop:graph=exponential,staleness=3,max_gap=3,skip=10,trigger=1",
    "hop:graph=ring,staleness=2,max_gap=3,skip=4,order=serial",
    "adpsgd:graph=ring",
    "adpsgd:graph=complete",
    "adpsgd:graph=ring-based",
]


def policy_of(text: str) -> PeerPolicy:
    policy = parse(text)
    assert isinstance(policy, PeerPolicy)
    return policy


@pytest.mark.parametrize("text", MODES)
class TestEveryMode:
    @seeds(0, 21)
    def test_keeps_its_rules_and_comes_to_an_end(self, text: str, seeds: range) -> None:
        for seed in seeds:
            play_peers(policy_of(text), peers=4 + seed % 5, iterations=12, seed=seed)

    @seeds(0, 21)
    def test_keeps_its_rules_when_peers_die_and_come_back(self, text: str, seeds: range) -> None:
        counts: Counter[str] = Counter()
        for seed in seeds:
            counts += play_peers(policy_of(text), peers=4 + seed % 5, iterations=12, seed=seed, faults=True).counts
        assert counts["kills"] >= len(seeds) // 2
        assert counts["joins"] >= len(seeds) // 4

    def test_a_run_can_be_played_again_from_its_trace(self, text: str) -> None:
        for faults in (False, True):
            trace = play_peers(policy_of(text), peers=6, iterations=8, seed=4, faults=faults).trace
            assert (
                trace.to_bytes()
                == play_peers(policy_of(text), peers=6, iterations=8, seed=4, faults=faults).trace.to_bytes()
            )
            made = replay(trace, lambda node, header: parse(header.policy).machine(*node, header.members, header.seed))
            assert made == []


# Random strongly connected graphs.


@st.composite
def graphs(draw: st.DrawFn) -> Topology:
    """A circle through all, in some order, so that it is strongly connected, and any other edges."""
    size = draw(st.integers(2, 12))
    order = draw(st.permutations(range(size)))
    circle = [(order[at - 1], order[at]) for at in range(size)]
    peers = st.integers(0, size - 1)
    more = draw(st.lists(st.tuples(peers, peers), max_size=3 * size))
    both = draw(st.booleans())
    edges = circle + more
    return topology(size, edges + [(b, a) for a, b in edges] if both else edges)


@st.composite
def policies(draw: st.DrawFn) -> OnGraph:
    graph = draw(graphs())
    least = min(len(ins) for ins in neighbours(graph, frozenset(range(graph.size))).ins.values())
    order = draw(st.sampled_from(("parallel", "serial")))
    if draw(st.integers(0, 5)) == 0:
        return OnGraph(notify_ack=True, order=order, drawn=graph)
    backup = draw(st.integers(0, min(2, least - 1)))
    staleness = draw(st.none() | st.integers(0, 3))
    max_gap = draw(st.integers(1, 4)) if backup else draw(st.none() | st.integers(1, 4))
    skip = trigger = None
    if max_gap is not None and (backup or staleness is not None) and draw(st.booleans()):
        skip = draw(st.integers(2, 10))
        trigger = draw(st.integers(1, OnGraph(backup=backup, staleness=staleness, max_gap=max_gap).longest_behind))
    return OnGraph(
        backup=backup, staleness=staleness, max_gap=max_gap, skip=skip, trigger=trigger, order=order, drawn=graph
    )


RANDOM = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@RANDOM
@given(policies(), st.integers(0, 10**6))
def test_the_bounds_hold_on_random_graphs(policy: OnGraph, seed: int) -> None:
    """Table 1, the queues' capacities, the tokens' identity, the averages, and no deadlock."""
    play_peers(policy, peers=policy.drawn.size, iterations=9, seed=seed)


@settings(RANDOM, max_examples=100)
@given(policies(), st.integers(0, 10**6))
def test_peers_that_die_and_come_back_hang_nobody_on_random_graphs(policy: OnGraph, seed: int) -> None:
    play_peers(policy, peers=policy.drawn.size, iterations=9, seed=seed, faults=True)


@settings(RANDOM, max_examples=80)
@given(graphs(), st.data())
def test_who_is_left_is_strongly_connected_and_averages_soundly(graph: Topology, data: st.DataObject) -> None:
    alive = data.draw(st.sets(st.integers(0, graph.size - 1), min_size=1))
    left = neighbours(graph, frozenset(alive))
    ranks = {peer: rank for rank, peer in enumerate(sorted(alive))}
    topology(len(ranks), [(ranks[a], ranks[b]) for b, ins in left.ins.items() for a in ins])
    for peer, row in left.weights.items():
        assert sum(row.values()) == pytest.approx(1)
        assert min(row.values()) > 0 or row[peer] >= 0
        assert sum(other[peer] for other in left.weights.values() if peer in other) == pytest.approx(1, abs=1e-6)


# Each bound is reached: one peer never finishes its first iteration, and the others get as far as they can.


def run_with_frozen(policy: PeerPolicy, peers: int, frozen: int, iterations: int = 60) -> PeerRun:
    run = peer_run(policy, peers=peers, iterations=iterations, seed=3, frozen=frozenset({frozen}))
    run.play(faults=False)
    return run


@pytest.mark.parametrize("graph", ["ring", "ring-based", "exponential", "torus"])
@pytest.mark.parametrize(("mode", "per_step"), [("", 1), (",staleness=2", 3), (",staleness=0", 1)])
def test_standard_and_staleness_reach_their_bounds_for_every_pair(graph: str, mode: str, per_step: int) -> None:
    """d(j->i), and (s+1) d(j->i): in parallel order j has sent its parameters before it got stuck."""
    policy = policy_of(f"hop:graph={graph}{mode}")
    for j in range(3):
        run = run_with_frozen(policy, 8, j)
        away = distances(policy.topology(8))[j]
        assert {i: run.judge.iteration[i, 0] for i in range(8)} == {i: per_step * away[i] for i in range(8)}


CLIQUES = topology(
    7,
    [(a, b) for clique in ((0, 1, 2, 3), (4, 5, 6)) for a in clique for b in clique]
    + [edge for a in (1, 2, 3) for edge in ((a, a + 3), (a + 3, a))],
)
"""0 with three neighbours, and three behind these: with one backup each group can go on without the one before."""


@pytest.mark.parametrize("staleness", [None, 2])
@pytest.mark.parametrize("order", ["parallel", "serial"])
@pytest.mark.parametrize("max_gap", [1, 3])
def test_tokens_reach_their_bound_and_fill_both_queues(staleness: int | None, order: str, max_gap: int) -> None:
    """max_gap * d(i->j) for all i; j holds max_gap * (d+1) tokens, and (1 + max_gap) updates of each (staleness: 1)."""
    policy = OnGraph(backup=1, staleness=staleness, order=order, max_gap=max_gap, drawn=CLIQUES)
    run = run_with_frozen(policy, 7, 0)
    away = distances(CLIQUES)
    assert {i: run.judge.iteration[i, 0] for i in range(7)} == {i: max_gap * away[i][0] for i in range(7)}
    stuck = run.machines[0, 0]
    assert isinstance(stuck, HopPeer)
    assert {j: stuck.tokens(j) for j in (1, 2, 3)} == {j: max_gap * (away[j][0] + 1) for j in (1, 2, 3)}
    assert len(stuck.queue) == (3 if staleness is not None else 3 * (1 + max_gap))


def test_tokens_bound_standard_and_staleness_where_the_way_back_is_long() -> None:
    """On a one-way circle j -> i is long and i -> j is one step: max_gap decides, then the way there."""
    circle = topology(8, [(peer, (peer + 1) % 8) for peer in range(8)])
    for staleness, b0 in ((None, 1), (2, 3)):
        policy = OnGraph(staleness=staleness, max_gap=2, drawn=circle)
        run = run_with_frozen(policy, 8, 1)
        reached = {i: run.judge.iteration[i, 0] for i in (*range(2, 8), 0)}
        assert reached == {i: min(b0 * ((i - 1) % 8), 2 * ((1 - i) % 8)) for i in reached}


def test_notify_ack_reaches_two_on_an_edge_and_its_bound_further_away() -> None:
    """0 sends to 1, 1 to 2, 2 is stuck: 1 has acknowledged an iteration that it cannot leave itself."""
    circle = topology(8, [(peer, (peer + 1) % 8) for peer in range(8)])
    run = run_with_frozen(OnGraph(notify_ack=True, drawn=circle), 8, 2)
    assert run.judge.iteration[0, 0] - run.judge.iteration[1, 0] == 2
    assert run.judge.iteration[7, 0] - run.judge.iteration[1, 0] == 4
    assert run.judge.iteration[3, 0] - run.judge.iteration[2, 0] == 1


def test_backup_alone_has_no_bound() -> None:
    assert Hop(backup=1, max_gap=5).most_ahead(1, 1) == 5
    assert Hop(backup=1, max_gap=5).most_ahead(3, 1) == 15
    assert parse("adpsgd").most_ahead(1, 1) == math.inf  # type: ignore[attr-defined]


# Jumps.


def jumps(story: Story) -> list[tuple[int, int, int]]:
    """(peer, from, to) of each jump."""
    at: dict[tuple[int, int], int] = {}
    found = []
    for record in story.trace:
        process = (record.node.rank, record.incarnation)
        for action in record.actions:
            if isinstance(action, Compute):
                if action.iteration > at.get(process, action.iteration) + 1:
                    found.append((process[0], at[process], action.iteration))
                at[process] = action.iteration
    return found


def test_peers_jump_while_their_neighbours_jump() -> None:
    """Two slow ones, of whom one sends to the other: they skip the same iterations, and nobody waits for these."""
    policy = policy_of("hop:graph=exponential,backup=2,max_gap=3,skip=10,trigger=1")
    assert (0, 1) in policy.topology(6).edges
    together = 0
    for seed in range(20):
        run = peer_run(policy, peers=6, iterations=30, seed=seed)
        run.pace.update({(peer, 0): 0.3 for peer in range(6)})
        run.pace.update({(0, 0): 9.0, (1, 0): 8.0})
        found = jumps(run.play(faults=False))
        skipped = [{k for who, start, to in found if who == peer for k in range(start + 1, to)} for peer in (0, 1)]
        together += bool(skipped[0] & skipped[1])
    assert together >= 10


def test_a_jump_goes_no_further_than_in_neighbours_can_be() -> None:
    longest = 0
    for seed in range(20):
        policy = OnGraph(backup=1, max_gap=2, skip=10, trigger=1, drawn=LONG_WAY_BACK)
        longest = max(
            [longest, *(to - start for _, start, to in jumps(play_peers(policy, peers=8, iterations=20, seed=seed)))]
        )
    assert longest == 3


def test_a_jump_lands_where_the_slowest_out_neighbour_is_and_averages_there_first() -> None:
    landed = 0
    for seed in range(20):
        policy = policy_of("hop:graph=ring-based,backup=1,max_gap=4,skip=3,trigger=2")
        story = play_peers(policy, peers=6, iterations=20, seed=seed)
        for peer, start, to in jumps(story):
            landed += 1
            assert 2 <= to - start <= 3
            record = next(
                record
                for record in story.trace
                if record.node.rank == peer
                and any(isinstance(a, Compute) and a.iteration == to for a in record.actions)
            )
            averages = [action.iteration for action in record.actions if isinstance(action, Reduce)]
            assert averages[-1] == to - 1
            tokens = [a.message.iteration for a in record.actions if isinstance(getattr(a, "message", None), Token)]
            assert set(tokens) == {to}
    assert landed >= 10


# AD-PSGD.


def test_offers_that_cross_are_each_others_answers() -> None:
    """Two peers that offer to each other at the same time: both average, neither is asked to reply."""
    policy = policy_of("adpsgd:graph=complete")
    crossed = 0
    for seed in range(30):
        story = play_peers(policy, peers=3, iterations=12, seed=seed)
        for record in story.trace:
            if type(record.event).__name__ == "OfferArrived" and [type(a) for a in record.actions[:1]] == [Reduce]:
                crossed += 1
        assert story.counts["Compute"] == 3 * 13
    assert crossed >= 10


def sent(actions: Sequence[Action], kind: type[Offer] | type[Reply]) -> list[Any]:
    return [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


def averages(actions: Sequence[Action]) -> int:
    return sum(isinstance(action, Reduce) for action in actions)


def test_an_offer_is_answered_though_the_edge_is_gone_by_then() -> None:
    """On a ring of four without 1 and 3, 0 and 2 are neighbours; when 1 and 3 return, they are not any more."""
    views = [(0, 0), (1, 0), (2, 0), (3, 0)], [(0, 0), (2, 0)], [(0, 0), (1, 1), (2, 0), (3, 1)]
    first, without, back = (ViewChanged(0.0, View(n, tuple(members))) for n, members in enumerate(views, 1))
    one, other = (ADPSGDPeer(rank, named_graphs.load("ring", 4), seed=1) for rank in (0, 2))
    for machine in (one, other):
        machine.handle(first)
        machine.handle(without)
    (offer,) = sent(one.handle(GradientReady(1.0, 0, 0, (8,))), Offer)
    one.handle(back)
    answered = other.handle(OfferArrived(2.0, offer))
    (reply,) = sent(answered, Reply)
    assert averages(answered) == averages(one.handle(ReplyArrived(3.0, reply))) == 1


def test_an_offer_of_one_that_joins_is_kept_until_a_view_names_it() -> None:
    """Before, an answer would be lost, and one of the two alone would have averaged."""
    machine = ADPSGDPeer(0, named_graphs.load("ring", 3), seed=0)
    machine.handle(ViewChanged(0.0, View(1, ((0, 0), (1, 0), (2, 0)))))
    machine.handle(ViewChanged(1.0, View(2, ((0, 0),))))
    assert machine.offered == NOBODY
    offer = Offer(Handle(2, 1, 0, 1, 0))
    assert list(machine.handle(OfferArrived(2.0, offer))) == []
    joined = machine.handle(ViewChanged(3.0, View(3, ((0, 0), (2, 1)))))
    assert averages(joined) == len(sent(joined, Reply)) == 1
    late = machine.handle(OfferArrived(4.0, Offer(Handle(2, 0, 0, 1, 0))))
    assert averages(late) == 0, "of the life before"


def test_on_a_bipartite_graph_one_side_offers_and_nobody_declines() -> None:
    for seed in range(10):
        story = play_peers(policy_of("adpsgd:graph=ring"), peers=6, iterations=10, seed=seed)
        offering = {
            record.node.rank
            for record in story.trace
            for a in record.actions
            if isinstance(getattr(a, "message", None), Offer)
        }
        assert offering == {0, 2, 4}
        assert story.counts["Drop"] == 0


@pytest.mark.parametrize("text", ["hop:graph=ring", "hop:graph=ring,order=serial", "adpsgd:graph=ring"])
def test_a_gradient_that_is_rejected_is_dropped_and_parameters_are_exchanged(text: str) -> None:
    """Peer 0's gradient of iteration 0 is not used; it sends, averages and goes on as if it had been."""
    policy = policy_of(text)
    machine = policy.machine("peer", 0, Members(2, 0), 0)
    machine.checks = True
    view = ViewChanged(0.0, View(1, ((0, 0), (1, 0))))
    actions = machine.handle(view)
    actions += machine.handle(GradientRejected(1.0, 0, 0, (8,), "not finite"))
    theirs = Handle(1, 0, 0, 1, 0)
    answer: Event = ReplyArrived(2.0, Reply(1, 0, 0, theirs))
    if text.startswith("hop"):
        answer = UpdateArrived(2.0, Update(theirs))
    actions += machine.handle(answer)
    assert [action.reason for action in actions if isinstance(action, Drop)] == ["not finite"]
    assert not [action for action in actions if isinstance(action, Apply)]
    assert averages(actions) == 1
    assert [action.iteration for action in actions if isinstance(action, Compute)] == [0, 1]
    assert isinstance(machine, HopPeer | ADPSGDPeer)
    assert machine.version == 0


# Broken machines are caught.


@pytest.mark.parametrize(
    ("make", "text", "rules"), broken_peers.CASES, ids=[case[0].__name__ for case in broken_peers.CASES]
)
def test_a_broken_rule_is_caught(make: type[Machine], text: str | OnGraph, rules: set[str]) -> None:
    policy = text if isinstance(text, OnGraph) else policy_of(text)
    graph = policy.topology(7)

    def made(rank: int, members: Members, seed: int) -> Machine:
        last = policy.rules if isinstance(policy, Hop) else seed
        return make(rank, graph, last)  # type: ignore[call-arg]

    caught: set[str] = set()
    for seed in range(60):
        for faults in (False, True):
            try:
                play_peers(policy, peers=graph.size, iterations=12, seed=seed, faults=faults, make=made)
            except PolicyBroken as broke:
                caught.add(broke.rule)
        if caught & rules:
            return
    assert caught & rules, f"not caught: {caught}"


# Weights.


@pytest.mark.parametrize("text", [text for text in MODES if text.startswith("hop")])
def test_averages_are_weighted_by_the_samples_behind_the_parameters(text: str) -> None:
    for seed in range(10):
        for faults in (False, True):
            story = play_peers(
                policy_of(text), peers=4 + seed % 5, iterations=12, seed=seed, faults=faults, weighted=True
            )
            made = replay(
                story.trace, lambda node, header: parse(header.policy).machine(*node, header.members, header.seed)
            )
            assert made == []


def test_a_peer_that_weighs_wrongly_is_caught() -> None:
    policy = policy_of("hop:graph=ring-based")
    assert isinstance(policy, Hop)

    def made(rank: int, members: Members, seed: int) -> Machine:
        return broken_peers.WeighsItselfAlone(rank, policy.topology(5), policy.rules)

    with pytest.raises(PolicyBroken) as caught:
        play_peers(policy, peers=5, iterations=12, seed=1, make=made, weighted=True)
    assert caught.value.rule == "average"
