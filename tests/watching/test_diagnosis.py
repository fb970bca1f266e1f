"""Who slows a run down, and why: the right one, and nobody where nobody does."""

from __future__ import annotations

import pytest

from paceline.core.step_times import StepRow
from paceline.watching import snapshot as shown
from paceline.watching.computing import COLLECTING, COMPUTING, HOST, LOADING, computing_cause
from paceline.watching.iterations import Iteration
from tests.watching.feeding import simulated, watched

SLOW_1 = "factors:by_worker=1:3:1:1,compute_s=0.02"
HEALTHY = ("steady", "lognormal:sigma=0.3,compute_s=0.02", "random-slowdown:factor=4,compute_s=0.02")


@pytest.mark.parametrize("policy", ["bsp", "ssp:staleness=3", "asp", "backup:extra=1", "hop:graph=ring"])
def test_a_slow_worker_is_found_and_what_it_costs(policy: str) -> None:
    watch, now = watched(simulated(policy, SLOW_1), until_s=0.6)
    view = watch.snapshot(now, shown.RUNS)
    (found,) = view.findings
    assert (found.rank, found.cause, found.from_start) == (1, COMPUTING, True)
    assert found.times == pytest.approx(3, rel=0.2)
    waits = policy in ("bsp", "ssp:staleness=3", "hop:graph=ring")
    assert (found.cost_s > 0.005) == waits
    assert found.helps


def test_bsp_waits_for_the_slow_one_as_long_as_it_is_slower() -> None:
    watch, now = watched(simulated("bsp", SLOW_1))
    (found,) = watch.snapshot(now, shown.RUNS).findings
    assert found.cost_s == pytest.approx(0.04, rel=0.15)


@pytest.mark.parametrize("policy", ["bsp", "ssp:staleness=3", "asp", "hop:graph=ring"])
@pytest.mark.parametrize("cluster", HEALTHY)
def test_no_alarm_where_nobody_is_slow_for_good(policy: str, cluster: str) -> None:
    run = simulated(policy, cluster, seed=3)
    for tenth in range(1, 11):
        watch, now = watched(run, run.time_s * tenth / 10)
        view = watch.snapshot(now, shown.RUNS)
        assert view.findings == [], f"at {now}"
        assert view.healthy


def test_who_stands_still_is_told_before_its_iteration_ends() -> None:
    run = simulated("bsp", "steady:compute_s=0.02")
    watch, now = watched(run, run.time_s / 2)
    (found, *_) = sorted(watch.snapshot(now + 30.0, shown.RUNS).findings, key=lambda each: each.rank)
    assert "for 30" in found.saying
    assert not watch.snapshot(now + 30.0, shown.ENDED).findings


def row(data_s: float = 0.0, compute_s: float = 0.02, cpu_s: float = 0.02, gc_s: float = 0.0) -> StepRow:
    return StepRow(0, 0, 1.0, 0, data_s, compute_s, 0.0, 0.001, 0.0, 0.01, cpu_s + 0.001, 0.0, gc_s)


@pytest.mark.parametrize(
    ("mine", "cause"),
    [
        (row(data_s=0.03), LOADING),
        (row(compute_s=0.05, cpu_s=0.05), COMPUTING),
        (row(compute_s=0.05, cpu_s=0.05, gc_s=0.03), COLLECTING),
        (row(compute_s=0.05), HOST),
        (None, COMPUTING),
    ],
)
def test_the_part_that_is_longer_is_the_cause(mine: StepRow | None, cause: str) -> None:
    slow = [Iteration(index, 0.0, row=mine) for index in range(6)]
    others = {1: [Iteration(index, 0.0, row=row()) for index in range(6)]}
    found, why = computing_cause(slow, others)
    assert found == cause
    assert ("does not say" in why) == (mine is None)


@pytest.mark.parametrize(("seed", "twentieth"), [(0, 5), (6, 14), (12, 10), (39, 4)])
def test_some_long_iterations_in_a_row_are_chance_where_the_others_have_them_too(seed: int, twentieth: int) -> None:
    run = simulated("bsp", "random-slowdown:factor=4,compute_s=0.02", seed=seed)
    watch, now = watched(run, run.time_s * twentieth / 20)
    assert watch.snapshot(now, shown.RUNS).findings == []
