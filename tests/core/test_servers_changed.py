"""The machines when the number of servers changes: how far everybody is, and how stale, stays what it was."""

from __future__ import annotations

import pytest

from paceline import policies
from paceline.core.actions import Answer, Apply, Compute, Drop, Send
from paceline.core.events import (
    GradientReady,
    ParametersArrived,
    PullArrived,
    PushArrived,
    RiseArrived,
    ServersChanged,
    ViewChanged,
)
from paceline.core.machine import IllegalEvent
from paceline.core.messages import Handle, Members, Parameters, Pull, Push, Rise, View

VIEW = View(4, ((0, 0), (1, 0), (2, 1)))
CHANGED = ServersChanged(5.0, 4.9, (40, 40, 40), (7, 9), VIEW, 6, ((0, 6), (1, 8), (2, 6)))


def machine(policy: str, role: str, rank: int = 0):
    made = policies.parse(policy).machine(role, rank, Members(3, 2), 0)
    made.checks = True
    return made


def push(worker: int, iteration: int, incarnation: int = 0) -> PushArrived:
    return PushArrived(6.0, Push(Handle(worker, incarnation, iteration, 9, 40)))


def test_a_new_shard_knows_how_far_everybody_is() -> None:
    shard = machine("ssp:staleness=2", "server", 2)
    assert shard.handle(CHANGED) == []
    assert (shard.version, shard.progress.V, shard.progress.next) == (9, 6, {0: 6, 1: 8, 2: 6})
    assert shard.handle(push(1, 7)) == [], "it was pushed before, to others: applied twice otherwise"
    (applied,) = shard.handle(push(0, 6))
    assert isinstance(applied, Apply)
    assert applied.version == 10
    shard.handle(push(2, 6, incarnation=1))
    assert shard.progress.V == 7


def test_a_new_shard_drops_what_is_late_and_says_so() -> None:
    """Backup has finished iteration 6 without worker 2: its push counts nowhere, and it is told."""
    shard = machine("backup:extra=1", "server", 2)
    shard.handle(ServersChanged(5.0, 4.9, (40, 40, 40), (7, 7), VIEW, 7, ((0, 7), (1, 7), (2, 6))))
    (dropped,) = shard.handle(push(2, 6, incarnation=1))
    assert isinstance(dropped, Drop)
    (answer,) = shard.handle(PullArrived(6.0, Pull(2, 1, 7)))
    assert isinstance(answer, Answer)
    assert answer.parameters.dropped


def test_a_new_shard_is_under_the_policy_in_force() -> None:
    shard = machine("bsp@0,asp@5", "server", 2)
    shard.handle(CHANGED)
    assert str(shard.policy) == "asp"


def test_a_shard_that_stays_goes_on_from_the_largest_version() -> None:
    shard = machine("asp", "server")
    shard.handle(ViewChanged(0.0, VIEW))
    for iteration in range(3):
        shard.handle(push(0, iteration))
    shard.handle(CHANGED)
    assert (shard.version, shard.progress.next) == (9, {0: 3, 1: 0, 2: 0})


def test_nothing_may_be_under_way() -> None:
    shard = machine("bsp", "server")
    shard.handle(ViewChanged(0.0, VIEW))
    shard.handle(push(0, 0))
    with pytest.raises(IllegalEvent, match="shard 0 holds gradients or pulls"):
        shard.handle(CHANGED)
    worker = machine("bsp", "worker")
    worker.handle(ViewChanged(0.0, VIEW))
    with pytest.raises(IllegalEvent, match="worker 0 is not computing"):
        worker.handle(CHANGED)


def test_a_worker_stays_as_stale_as_it_is() -> None:
    worker = machine("asp", "worker")
    worker.handle(ViewChanged(0.0, VIEW))
    worker.handle(ParametersArrived(1.0, Parameters(0, 0, 0, 6, 5, False)))
    (compute,) = worker.handle(ParametersArrived(1.0, Parameters(1, 0, 0, 6, 8, False)))
    assert compute == Compute(6, 0)
    assert worker.handle(CHANGED) == []
    sent = worker.handle(GradientReady(6.0, 6, 0, (40, 40, 40)))
    pushes = [action.message for action in sent if isinstance(action, Send) and isinstance(action.message, Push)]
    # Shard 0 was at 7 and the worker had 5 of it: two behind. All shards go on from 9.
    assert [(push.handle.iteration, push.handle.version) for push in pushes] == [(6, 7)] * 3


def test_a_worker_that_joins_later_pulls_from_all() -> None:
    worker = machine("asp", "worker", 2)
    worker.handle(CHANGED)
    pulls = worker.handle(ViewChanged(6.0, VIEW))
    assert [action.to.rank for action in pulls] == [0, 1, 2]


def test_a_scheduler_waits_for_the_shards_there_are() -> None:
    scheduler = machine("scheduled", "scheduler")
    for shard in (0, 1):
        scheduler.handle(RiseArrived(1.0, Rise(shard, 6, 0)))
    scheduler.handle(CHANGED)
    parked = scheduler.handle(PullArrived(2.0, Pull(0, 0, 7)))
    assert len(parked) == 1
    assert not isinstance(parked[0], Send)
    for shard in (0, 1):
        assert scheduler.handle(RiseArrived(3.0, Rise(shard, 7, 0))) == []
    (release,) = scheduler.handle(RiseArrived(3.0, Rise(2, 7, 0)))
    assert isinstance(release, Send)
    scheduler.handle(ServersChanged(7.0, 7.0, (120,), (9, 9, 9), VIEW, 7, ()))
    with pytest.raises(IllegalEvent, match="there is no shard 1"):
        scheduler.handle(RiseArrived(8.0, Rise(1, 8, 0)))
