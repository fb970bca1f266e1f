"""The barrier of the scripts: who goes on when, and whom those who wait in it keep waiting."""

from __future__ import annotations

import random

import pytest

from paceline import policies
from paceline.core.events import PlanArrived, PullArrived, PushArrived, ViewChanged
from paceline.core.messages import Handle, Members, Plan, Pull, Push, View
from paceline.core.policy import CentralPolicy, PeerPolicy
from paceline.core.shard import Shard
from paceline.core.worker_barrier import Process, WorkerBarrier, awaited

from .barrier_runs import BarrierRun, PeerBarrierRun
from .test_peers import MODES
from .test_random_runs import MORE, POLICIES


def test_all_who_are_live_must_be_there() -> None:
    barrier = WorkerBarrier()
    live = [(0, 0), (1, 0), (2, 0)]
    barrier.enter((0, 0))
    barrier.enter((2, 0))
    assert barrier.open(live) == ()
    assert barrier.open([(0, 0), (2, 0)]) == ((0, 0), (2, 0)), "the other one is lost, or has ended"
    assert barrier.open([(0, 0), (2, 0)]) == (), "they have gone on"
    barrier.enter((0, 0))
    assert barrier.open([(0, 1)]) == (), "another life of the worker has not come"
    barrier.enter((0, 1))
    assert barrier.open([(0, 1)]) == ((0, 1),)


@pytest.mark.parametrize("seed", range(50))
def test_in_random_runs_nobody_passes_too_early_or_waits_too_long(seed: int) -> None:
    chance = random.Random(seed)
    barrier = WorkerBarrier()
    live: set[Process] = {(rank, 0) for rank in range(chance.randint(1, 5))}
    elsewhere, inside = set(live), set[Process]()
    for _ in range(200):
        deed = chance.random()
        if deed < 0.1 and len(live) > 1:
            lost = chance.choice(sorted(live))
            for each in (live, elsewhere, inside):
                each.discard(lost)
        elif deed < 0.2:
            new = (chance.randint(0, 6), chance.randint(1, 1000))
            live.add(new)
            elsewhere.add(new)
        elif elsewhere:
            process = chance.choice(sorted(elsewhere))
            elsewhere.discard(process)
            inside.add(process)
            barrier.enter(process)
        opened = set(barrier.open(live))
        assert opened == (set() if elsewhere else inside)
        inside -= opened
        elsewhere |= opened


def shard(policy: str, workers: int = 3) -> Shard:
    members = Members(workers, 1)
    machine = policies.parse(policy).machine("server", 0, members, 0)
    assert isinstance(machine, Shard)
    machine.handle(ViewChanged(0.0, View(1, tuple((rank, 0) for rank in range(workers)))))
    for worker in range(workers):
        machine.handle(PullArrived(0.0, Pull(worker, 0, 0)))
    return machine


def push(machine: Shard, worker: int, iteration: int) -> None:
    machine.handle(PushArrived(1.0, Push(Handle(worker, 0, iteration, 0, 4))))
    machine.handle(PullArrived(1.0, Pull(worker, 0, iteration + 1)))


@pytest.mark.parametrize("policy", ["bsp", "ssp:staleness=0", "scheduled", "deadline"])
def test_who_lacks_in_the_iteration_that_others_wait_for_is_awaited(policy: str) -> None:
    machine = shard(policy)
    assert awaited(machine, {0, 1}) == {}, "nobody waits yet"
    push(machine, 2, 0)
    assert awaited(machine, {0, 1}) == {0: 0, 1: 0}
    assert awaited(machine, {0, 1, 2}) == {}, "those who wait are in the barrier themselves"
    push(machine, 1, 0)
    assert awaited(machine, {0, 1}) == {0: 0}
    push(machine, 0, 0)
    assert awaited(machine, {0, 1}) == {}


def test_who_is_further_is_not_awaited() -> None:
    machine = shard("ssp:staleness=1")
    for iteration in range(2):
        push(machine, 0, iteration)
    push(machine, 1, 0)
    push(machine, 1, 1)
    assert machine.waiting.keys() == {0, 1}
    assert awaited(machine, {0}) == {}, "worker 1 waits for worker 2, as worker 0 does"
    assert awaited(machine, {2}) == {2: 0}


def test_where_nobody_waits_nobody_is_awaited() -> None:
    machine = shard("asp")
    for iteration in range(20):
        push(machine, 0, iteration)
    assert awaited(machine, {1, 2}) == {}


def test_at_a_planned_barrier_those_are_awaited_who_are_not_at_their_stops() -> None:
    machine = shard("elastic")
    machine.handle(PlanArrived(1.0, Plan(1, ((0, 0, 5), (1, 0, 1), (2, 0, 0)), 0.0, 0.0)))
    assert awaited(machine, {0}) == {}
    push(machine, 1, 0)
    assert machine.waiting.keys() == {1}
    assert awaited(machine, {0, 2}) == {0: 0}
    for iteration in range(4):
        push(machine, 0, iteration)
    assert awaited(machine, {0}) == {0: 4}
    push(machine, 0, 4)
    assert awaited(machine, {0}) == {}


CENTRAL = [*map(str, POLICIES), *MORE]


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "unlike"])
@pytest.mark.parametrize("text", CENTRAL)
def test_under_every_policy_all_scripts_come_to_their_ends(text: str, alike: bool) -> None:
    """Scripts that call it as often, and at the same steps, or not; with workers that die on the way."""
    policy = policies.parse(text)
    assert isinstance(policy, CentralPolicy)
    followed = 0
    for seed in range(12):
        run = BarrierRun(policy, 3 + seed % 3, 1 + seed % 3, steps=8, seed=seed, alike=alike)
        story = run.play(faults=seed % 2 == 1)
        assert run.inside.entered > 0
        followed += story.counts["followed"]
    if text in ("bsp", "ssp:staleness=0", "scheduled", "elastic:lookahead=3") and not alike:
        assert followed
    if text == "asp" or (text == "bsp" and alike):
        assert not followed


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "unlike"])
@pytest.mark.parametrize("text", MODES)
def test_peers_come_to_their_ends_too(text: str, alike: bool) -> None:
    policy = policies.parse(text)
    assert isinstance(policy, PeerPolicy)
    for seed in range(12):
        run = PeerBarrierRun(policy, 4 + seed % 5, 12, seed, alike)
        run.play(faults=seed % 2 == 1)
        assert run.inside.entered > 0
