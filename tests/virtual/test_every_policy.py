"""Every policy, in virtual time with real gradients: it learns, it can be played again, and it does what it says."""

from __future__ import annotations

import pytest

from paceline import policies, simulate
from paceline.core.actions import Apply, Park
from paceline.core.events import PushArrived
from paceline.core.policy import PeerPolicy
from paceline.run import Run

TEXTS = [
    *policies.CATALOGUE,
    "ssp:staleness=2,lazy=true",
    "pssp:staleness=1,alpha=0.8",
    "pssp:staleness=1,significance=true",
    "asp:staleness_weighted=true",
    "waiting:delay_s=0.05,base=ssp(staleness=1)",
    "ssp:staleness=1+backup:extra=1",
    "asp@0,bsp@15",
]


def run_one(policy: str, cluster: str = "random-slowdown:factor=6", iterations: int = 40, servers: int = 2) -> Run:
    given = None if isinstance(policies.parse(policy), PeerPolicy) else servers
    return simulate("quadratic", policy, workers=4, servers=given, cluster=cluster, iterations=iterations)


@pytest.mark.parametrize("text", TEXTS)
def test_it_learns_and_can_be_played_again(text: str) -> None:
    run = run_one(text)
    first, last = run.history[0].loss, run.history[-1].loss
    assert first is not None
    assert last is not None
    assert last < 0.5 * first
    assert run.replay() == []


def test_lazy_release_waits_less_often() -> None:
    """Yao et al. 2019, III.C: with one worker slow for good, one long wait in place of s + 1 short ones."""
    soft = run_one("ssp:staleness=3", "one-slow:factor=4").metrics.dpr_per_100
    lazy = run_one("ssp:staleness=3,lazy=true", "one-slow:factor=4").metrics.dpr_per_100
    assert lazy < 0.5 * soft


def test_dssp_waits_less_than_ssp_at_its_low_bound() -> None:
    cluster = "factors:by_worker=1:1:1:3.4"
    low = run_one("ssp:staleness=1", cluster, 60).metrics.wait_share
    assert run_one("dssp:low=1,high=8", cluster, 60).metrics.wait_share < low


def test_deadline_drops_who_is_slow_and_nobody_else() -> None:
    assert run_one("deadline", "steady").metrics.dropped == 0
    slow = run_one("deadline", "one-slow:factor=6", 60)
    assert slow.metrics.dropped > 0
    assert slow.time_s < 0.6 * run_one("bsp", "one-slow:factor=6", 60).time_s
    used = {h.source for r in slow.trace.records[-200:] for a in r.actions if isinstance(a, Apply) for h in a.handles}
    assert used == {1, 2, 3}, "worker 0 is six times slower than the median"


def test_naive_waiting_costs_its_time_and_reads_fresher_parameters() -> None:
    plain, waiting = run_one("asp"), run_one("waiting:delay_s=0.05")
    assert waiting.metrics.staleness["mean"] < plain.metrics.staleness["mean"]
    assert waiting.time_s == pytest.approx(plain.time_s + 40 * 0.05, rel=0.05)
    assert waiting.metrics.wait_share > 0.15
    assert list(waiting.metrics.waiting_by_reason) == ["rests before it pulls"]


def test_significance_is_measured_where_it_is_wanted() -> None:
    run = run_one("pssp:staleness=0,significance=true", iterations=20, servers=1)
    measured = [r.event.significance for r in run.trace if isinstance(r.event, PushArrived)]
    assert all(value is not None and value > 0 for value in measured)
    early, late = measured[8:40], measured[-32:]
    assert sum(early) > sum(late), "gradients get smaller as it learns"  # type: ignore[arg-type]
    plain = run_one("asp")
    assert {r.event.significance for r in plain.trace if isinstance(r.event, PushArrived)} == {None}


def test_one_coin_for_all_shards() -> None:
    """With one worker slow for good the others are at the bound all the time: parked in 3 of 10 iterations."""
    for servers in (1, 2, 4):
        run = run_one("pssp:staleness=1,c=0.3", "one-slow:factor=30", 80, servers)
        parked = {(a.pull.worker, a.pull.iteration) for r in run.trace for a in r.actions if isinstance(a, Park)}
        assert len(parked) / (3 * 80) == pytest.approx(0.3, abs=0.06)
