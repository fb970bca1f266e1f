"""The policies that need something of the runtime (timers, norms, switches), in real processes."""

from __future__ import annotations

import pytest

from paceline.api import Job, train_job_live
from paceline.core.actions import SetTimer
from paceline.core.events import PushArrived, TimerFired
from paceline.report.barriers import barriers
from paceline.run import Run


def live(policy: str, cluster: str = "steady:compute_s=0.01", iterations: int = 20) -> Run:
    return train_job_live(Job("quadratic", policy, 3, 2, cluster, iterations, None, None, None, 0))


@pytest.mark.parametrize(
    "policy",
    [
        "dssp:low=1,high=4",
        "pssp:staleness=1,significance=true",
        "ssp:staleness=1+backup:extra=1",
        "asp@0,bsp@8",
        "bsp@0,backup:extra=1@5,ssp:staleness=1@10",
        "scheduled:base=ssp(staleness=1)",
        "scheduled:base=backup(extra=1)",
        "elastic:lookahead=4,predict=median",
    ],
)
def test_it_runs_and_can_be_played_again(policy: str) -> None:
    run = live(policy, "random-slowdown:factor=6,compute_s=0.01")
    assert run.failures == []
    assert run.replay() == []
    assert run.metrics.updates >= 15
    if "significance" in policy:
        pushes = [r.event for r in run.trace if isinstance(r.event, PushArrived)]
        assert all(push.significance is not None for push in pushes)
    if policy.startswith("elastic"):
        assert barriers(run.trace), "planned and reached"


def test_deadline_fires_and_the_slow_are_dropped() -> None:
    run = live("deadline", "one-slow:factor=12,compute_s=0.02", 25)
    assert run.failures == []
    assert run.replay() == []
    assert run.metrics.dropped > 0
    assert run.metrics.staleness["max"] == 0
    due: dict[tuple[object, int], float] = {}
    late = []
    for record in run.trace:
        if isinstance(record.event, TimerFired):
            late.append(record.event.at - due[record.node, record.event.timer])
        for action in record.actions:
            if isinstance(action, SetTimer):
                due[record.node, action.timer] = record.event.at + action.after_s
    assert late
    assert min(late) >= 0, "never early"


@pytest.mark.parametrize("base", ["asp", "bsp"])
def test_naive_waiting_rests_before_each_pull(base: str) -> None:
    run = live(f"waiting:delay_s=0.05,base={base}", iterations=10)
    assert run.failures == []
    assert run.replay() == []
    assert run.time_s > 10 * 0.05
    assert "rests before it pulls" in run.metrics.waiting_by_reason
