"""Balanced batches in virtual time, how long batches take there, and what a recorded run says about that."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import cluster as clusters
from paceline import simulate
from paceline.cluster.trace_durations import Iteration, fit_per_sample, iterations_in
from paceline.core.events import GradientReady
from paceline.errors import ConfigError
from paceline.run import Run

SPEEDS = "factors:by_worker=1:2:4:8"


def sizes(run: Run) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for record in run.trace:
        if isinstance(record.event, GradientReady):
            found.setdefault(record.node.rank, []).append(int(record.event.weight))
    return [found[rank] for rank in sorted(found)]


@pytest.mark.parametrize("policy", ["bsp", "backup:extra=1", "deadline", "ssp:staleness=2", "hop:graph=ring"])
def test_all_end_together_and_runs_replay(policy: str) -> None:
    equal, balanced = (
        simulate(policy=policy, workers=4, cluster=SPEEDS, iterations=60, batch=60, balance=balance)
        for balance in (False, True)
    )
    assert [each[-1] for each in sizes(balanced)] == [128, 64, 32, 16]
    assert balanced.time_s < equal.time_s * (0.75 if policy.startswith("backup") else 0.45)
    assert balanced.replay() == []


def test_a_fixed_part_takes_as_long_for_any_batch() -> None:
    """4 s of 8 are fixed: a batch half as large takes 6 s, and with balance the sizes allow for it."""
    cluster = "factors:by_worker=1:2,compute_s=8,per_sample=0.5,latency_s=0"
    run = simulate(workers=2, cluster=cluster, iterations=1, batch=(30, 90))
    ends = [record.event.at for record in run.trace if isinstance(record.event, GradientReady)]
    assert ends == pytest.approx([8 * 0.75, 16 * 1.25], abs=0.01)
    run = simulate(workers=2, cluster=cluster, iterations=60, batch=60, balance=True)
    fast, slow = (each[-1] for each in sizes(run))
    assert fast + slow == 120
    assert 0.5 + 0.5 * fast / 60 == pytest.approx(2 * (0.5 + 0.5 * slow / 60), abs=0.07)


def test_sizes_follow_a_worker_that_goes_bad() -> None:
    run = simulate(workers=4, cluster="going-bad", iterations=100, batch=60, balance=True)
    first, *others = sizes(run)
    assert first[40:50] == [60] * 10
    assert first[65] == pytest.approx(15, abs=1)
    assert all(each[65] == pytest.approx(75, abs=1) for each in others)


def test_a_worker_that_is_lost_takes_its_part_with_it_and_one_that_joins_gets_one() -> None:
    from dataclasses import replace

    faults = (clusters.Fault("restart", 1, at_s=2.0, for_s=2.0),)
    run = simulate(
        workers=3, cluster=replace(clusters.load("steady"), faults=faults), iterations=80, batch=60, balance=True
    )
    assert run.replay() == []
    assert {size for each in sizes(run) for size in each} == {60}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch": (3, 4)}, "give batch as one number"),
        ({"shards": "sorted"}, "needs samples that any worker may take"),
        ({"by_layer": True}, "by_layer takes batches of one size"),
        ({"policy": "asp"}, "is for policies under which workers wait for slower ones"),
        ({"policy": "bsp@0,asp@5", "balance": False, "batch": (3,)}, "batch has 1 sizes, there are 2 workers"),
    ],
)
def test_what_cannot_be_balanced_is_refused_in_one_line(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        simulate(**{"workers": 2, "iterations": 2, "balance": True, **given})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


class TestRecordedTimes:
    def test_a_run_tells_how_much_of_a_step_is_fixed(self, tmp_path: Path) -> None:
        cluster = "factors:by_worker=1:2:3,compute_s=6,per_sample=0.25,latency_s=0"
        run = simulate(workers=3, cluster=cluster, iterations=60, batch=60, balance=True)
        (tmp_path / "trace.jsonl").write_bytes(run.trace.to_bytes())
        assert fit_per_sample(iterations_in(str(tmp_path))) == pytest.approx(0.25, abs=0.01)
        again = clusters.load(f"replay:file={tmp_path}")
        assert [again.durations(rank, 3, 0)() for rank in range(3)] == pytest.approx([6, 12, 18], rel=0.01)
        assert again.of_batch(2.0) == pytest.approx(1.25, abs=0.01)
        replayed = simulate(workers=3, cluster=again, iterations=60, batch=60, balance=True)
        assert [each[-1] for each in sizes(replayed)] == pytest.approx([each[-1] for each in sizes(run)], abs=1)

    def test_where_batches_never_varied_all_of_a_step_is_in_proportion(self) -> None:
        assert fit_per_sample(((Iteration(1.0, 1.0), Iteration(2.0, 1.0)),)) is None
        assert clusters.load("production-healthy").of_batch(3.0) == 3.0
        assert clusters.load("production-healthy:per_sample=0").of_batch(3.0) == 1.0

    def test_production_jobs_are_what_their_files_say(self) -> None:
        for name, ranks, steps, ratio in (
            ("one-slow-rank", 4, 44, 1.72),
            ("uneven-sequences", 32, 43, 1.26),
            ("healthy", 2, 32, 1.00),
        ):
            job = clusters.load(f"production-{name}")
            assert isinstance(job, clusters.models.Production)
            recording = job.recording()
            assert (len(recording), {len(mine) for mine in recording}) == (ranks, {steps})
            per_step = [[mine[step].seconds for mine in recording] for step in range(steps)]
            slowest = [max(each) / (sum(each) / ranks) for each in per_step]
            assert sum(slowest) / steps == pytest.approx(ratio, abs=0.006)

    def test_their_source_is_kept_with_the_numbers(self) -> None:
        files = sorted(clusters.files.FOLDER.glob("production-*"))
        assert len(files) == 6
        for file in files:
            assert "ByteDance-Seed/StragglerAnalysis publishes under Apache-2.0" in file.read_text()

    def test_balanced_batches_make_up_for_a_slow_rank(self) -> None:
        equal, balanced = (
            simulate(workers=4, cluster="production-one-slow-rank", iterations=120, balance=balance).time_s
            for balance in (False, True)
        )
        assert equal / balanced > 1.6
