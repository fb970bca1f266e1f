"""PSSP: at c = 1 it is SSP and at c = 0 ASP, pull by pull; one toss for a worker's iteration, on every shard."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.actions import Action, Answer, Park
from paceline.core.events import PullArrived, PushArrived, ViewChanged
from paceline.core.messages import Handle, Members, Pull, Push, View
from paceline.core.policy import CentralPolicy
from paceline.core.progress import Progress
from paceline.core.pull_gate import coin
from paceline.core.shard import Shard
from paceline.policies import ASP, PSSP, SSP
from paceline.testing import play

from .drive import ShardAlone, answered, parked

repeatable = settings(max_examples=300, deadline=None, derandomize=True, database=None)
Step = tuple[str, int, int]

steps = st.lists(st.tuples(st.sampled_from(["go", "go", "go", "skip", "lose"]), st.integers(0, 3), st.integers(1, 5)))
"""Worker w pushes and pulls on; another shard sends it some iterations ahead; it is lost."""


def decide(policy: CentralPolicy, script: list[Step]) -> list[list[Action]]:
    """What a shard orders, event by event, with reasons in words left out."""
    shard = Shard(policy, 0, Members(4, 1), 7)
    shard.checks = True
    alive = dict.fromkeys(range(4), 0)
    number = 1
    decisions = [shard.handle(ViewChanged(0.0, View(1, tuple(alive.items()))))]
    at = dict.fromkeys(range(4), 0)
    free: set[int] = set()
    seen = 0
    for worker in range(4):
        decisions.append(shard.handle(PullArrived(0.0, Pull(worker, 0, 0))))
    for kind, worker, far in script:
        note_answers(decisions[seen:], at, free)
        seen = len(decisions)
        if worker not in alive:
            continue
        if kind == "lose" and len(alive) > 1:
            del alive[worker]
            number += 1
            decisions.append(shard.handle(ViewChanged(0.0, View(number, tuple(alive.items())))))
        elif worker in free:
            free.discard(worker)
            decisions.append(shard.handle(PushArrived(0.0, Push(Handle(worker, 0, at[worker], 0, 8)))))
            wanted = at[worker] + (far if kind == "skip" else 1)
            decisions.append(shard.handle(PullArrived(0.0, Pull(worker, 0, wanted))))
    return [[in_short(action) for action in actions] for actions in decisions]


def note_answers(decisions: list[list[Action]], at: dict[int, int], free: set[int]) -> None:
    for actions in decisions:
        for action in actions:
            if isinstance(action, Answer) and action.parameters.iteration >= at[action.parameters.worker]:
                at[action.parameters.worker] = action.parameters.iteration
                free.add(action.parameters.worker)


def in_short(action: Action) -> object:
    return ("park", action.pull) if isinstance(action, Park) else action


@repeatable
@given(st.integers(0, 4), st.booleans(), steps)
def test_with_c_1_it_decides_as_ssp(staleness: int, lazy: bool, script: list[Step]) -> None:
    pssp = decide(PSSP(staleness=staleness, c=1.0, lazy=lazy), script)
    assert pssp == decide(SSP(staleness=staleness, lazy=lazy), script)


@repeatable
@given(st.integers(0, 4), st.booleans(), steps)
def test_with_c_0_it_decides_as_asp(staleness: int, lazy: bool, script: list[Step]) -> None:
    assert decide(PSSP(staleness=staleness, c=0.0, lazy=lazy), script) == decide(ASP(), script)


def test_the_scripts_park_and_skip() -> None:
    """Else the two tests above would prove nothing."""
    script: list[Step] = [("go", 0, 1)] * 3 + [("skip", 0, 4), ("go", 1, 1), ("go", 2, 1), ("go", 3, 1)] * 6
    decisions = [action for actions in decide(PSSP(staleness=1, c=1.0), script) for action in actions]
    assert sum(isinstance(action, tuple) for action in decisions) >= 3
    assert decide(PSSP(staleness=1, c=0.5), script) != decide(SSP(staleness=1), script)


class TestChance:
    def test_constant(self) -> None:
        assert [PSSP(staleness=2, c=0.1).chance(gap) for gap in (2, 3, 50)] == [0.1] * 3
        assert PSSP().chance(3) == 0.3

    def test_dynamic_is_half_of_alpha_at_the_bound_and_rises(self) -> None:
        """III.E: P(s, k) = alpha / (1 + e^(s - k))."""
        policy = PSSP(staleness=3, alpha=0.8)
        assert policy.chance(3) == 0.4
        assert policy.chance(5) == pytest.approx(0.8 / (1 + math.exp(-2)))
        assert policy.chance(10_000) == 0.8
        assert PSSP(staleness=3, alpha=5.0).chance(9) == 1.0, "clipped"

    def test_significance_is_that_of_the_workers_last_push(self) -> None:
        for significance, stopped in ((0.0, False), (2.5, True)):
            shard = ShardAlone(PSSP(staleness=0, significance=True), workers=2)
            assert shard.shard.gate.wants_significance
            push = PushArrived(0.0, Push(Handle(0, 0, 0, 0, 8)), significance)
            shard.shard.handle(push)
            assert bool(parked(shard.pull(0, 1))) == stopped

    def test_a_parked_pull_is_answered_at_the_next_rise_whatever_the_gap(self) -> None:
        tosses = [coin(0, 0, i) for i in range(40)]
        ahead = tosses.index(min(tosses))
        assert ahead > 3
        shard = ShardAlone(PSSP(staleness=1, c=min(tosses) + 1e-9), workers=2)
        for iteration in range(ahead):
            assert answered(shard.iterate(0, iteration)) == [(0, iteration + 1)]
        assert parked(shard.iterate(0, ahead))
        assert shard.V == 0
        assert answered(shard.push(1, 0)) == [(0, ahead + 1)]

    def test_lazily_when_the_slowest_has_caught_up(self) -> None:
        shard = ShardAlone(SSP(staleness=2, lazy=True), workers=2)
        for iteration in range(3):
            shard.iterate(0, iteration)
        for iteration in range(2):
            assert answered(shard.push(1, iteration)) == []
        assert answered(shard.push(1, 2)) == [(0, 3)]


class TestOneToss:
    def test_the_share_of_iterations_parked_does_not_depend_on_the_number_of_shards(self) -> None:
        shares = [share_parked(PSSP(staleness=1, c=0.3), servers) for servers in (1, 2, 4, 8)]
        assert shares == pytest.approx([0.3] * 4, abs=0.05)

    def test_with_coins_apart_it_does(self) -> None:
        """0.3 becomes 1 - 0.7^8 = 94 %: what the shared coin is for."""
        assert share_parked(PSSP(staleness=1, c=0.3, apart=True), 1) == pytest.approx(0.3, abs=0.04)
        assert share_parked(PSSP(staleness=1, c=0.3, apart=True), 8) > 0.85

    def test_the_coin_is_fair_and_belongs_to_seed_worker_and_iteration(self) -> None:
        tosses = [coin(seed, worker, i) for seed in range(5) for worker in range(40) for i in range(100)]
        assert len(set(tosses)) == len(tosses)
        tenths = Counter(int(10 * toss) for toss in tosses)
        assert sorted(tenths) == list(range(10))
        assert max(tenths.values()) < 1.1 * min(tenths.values())
        assert coin(1, 2, 3) == coin(1, 2, 3) != coin(1, 3, 2)


def share_parked(policy: PSSP, servers: int) -> float:
    """Of the iterations in which a worker was at the bound on some shard: in how many some shard parked it."""
    asked: set[tuple[int, int, int]] = set()
    stopped: set[tuple[int, int, int]] = set()
    for seed in range(6):
        story = play(policy, workers=4, servers=servers, iterations=60, seed=seed, faults=False)
        shards = {}
        for record in story.trace:
            if record.node.role != "server":
                continue
            shard = shards.setdefault(record.node, Shard(policy, record.node.rank, story.trace.header.members, seed))
            shard.handle(record.event)
            if isinstance(record.event, PullArrived) and record.event.pull.iteration > 0:
                pull = record.event.pull
                if pull.iteration - 1 - shard.progress.V >= policy.staleness:
                    asked.add((seed, pull.worker, pull.iteration))
            stopped |= {(seed, a.pull.worker, a.pull.iteration) for a in record.actions if isinstance(a, Park)}
    assert len(asked) > 400
    assert stopped <= asked
    return len(stopped) / len(asked)


def test_who_comes_back_is_not_judged_by_what_its_last_life_pushed() -> None:
    policy = PSSP(staleness=0, significance=True)
    gate = policy.gate(0, Members(2, 1), 0)
    gate.note_push(Handle(0, 0, 3, 0, 8), 0.0, 1e9)
    progress = Progress()
    assert not gate.may_pull(0, 0, progress)
    gate.forget(0)
    assert gate.may_pull(0, 0, progress)
