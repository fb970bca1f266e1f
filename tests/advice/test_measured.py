"""A calibrated scenario says what the run was like, and can be written, read and changed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from paceline import cluster as clusters
from paceline.advice import calibration
from paceline.advice.changes import Changes, Situation
from paceline.advice.scenario_file import to_toml
from paceline.cluster import Cluster, Costs, Measured, MeasuredWorker
from paceline.cluster.trace_durations import Iteration
from paceline.core.messages import Members
from paceline.errors import ConfigError

PAIR = Measured(
    measured=(MeasuredWorker(0.02, (0.5, 1.0, 1.5), memory=0.9, common=0.5), MeasuredWorker(0.06, trend=(1.0, 2.0))),
    costs=Costs(cores=2, worker_s=0.001, cpu_share=0.9),
    latency_s=0.0001,
)


def draws(cluster: Cluster, worker: int, count: int, workers: int = 4, seed: int = 0) -> np.ndarray:
    draw = cluster.durations(worker, workers, seed)
    return np.array([draw() for _ in range(count)])


def test_draws_have_the_measured_spread_memory_and_trend() -> None:
    first = draws(PAIR, 0, 20_000)
    assert {round(value, 6) for value in first} == {0.01, 0.02, 0.03}
    for value in (0.01, 0.02, 0.03):
        assert np.mean(np.isclose(first, value)) == pytest.approx(1 / 3, abs=0.05)
    assert np.corrcoef(first[:-1], first[1:])[0, 1] > 0.6
    assert draws(PAIR, 1, 3).tolist() == pytest.approx([0.06, 0.12, 0.12])
    third = draws(PAIR, 2, 20_000)  # like worker 0, with draws of its own
    assert 0.2 < np.corrcoef(first, third)[0, 1] < 0.7


def test_what_was_drawn_is_found_again() -> None:
    rows = tuple(tuple(Iteration(s, 1.0) for s in draws(PAIR, worker, 2000)) for worker in (0, 2))
    found = calibration.describe_workers(calibration.Recall(times=rows))
    for worker in found:
        assert worker.compute_s == pytest.approx(0.02, rel=0.05)
        assert worker.spread[0] == pytest.approx(0.5, rel=0.05)
        assert worker.spread[-1] == pytest.approx(1.5, rel=0.05)
        assert worker.memory == pytest.approx(0.85, abs=0.15)
        assert 0.25 < worker.common < 0.75
    again = Measured(measured=tuple(found))
    assert np.mean(draws(again, 0, 5000)) == pytest.approx(0.02, rel=0.1)


def test_a_worker_that_becomes_slow_is_a_trend_and_noise_is_none() -> None:
    random = np.random.default_rng(0)
    steady = 0.02 * np.exp(0.1 * random.standard_normal(400))
    slower = np.where(np.arange(400) < 200, steady, 3 * steady)
    assert calibration.trend_of(steady) == [1.0]
    for seed in range(20):
        wild = np.random.default_rng(seed).pareto(2.0, 400) + 1
        assert calibration.trend_of(wild) == [1.0]
    trend = calibration.trend_of(slower)
    assert trend[-1] == pytest.approx(3 * trend[0], rel=0.1)


def test_server_times_are_found_by_least_squares() -> None:
    counts = np.array([[1, 0], [2, 0], [1, 1], [3, 1], [1, 1]], dtype=float)
    assert calibration.nonnegative_least_squares(counts, counts @ [2.0, 5.0]) == pytest.approx([2.0, 5.0])
    assert calibration.nonnegative_least_squares(counts, counts @ [2.0, -1.0])[1] == 0.0


def test_a_scenario_is_the_same_when_read_again(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(to_toml(PAIR))
    assert clusters.read(tmp_path / "one.toml") == PAIR
    assert clusters.from_table(clusters.to_table(PAIR)) == PAIR  # as it travels to live workers
    assert draws(clusters.read(tmp_path / "one.toml"), 0, 5).tolist() == draws(PAIR, 0, 5).tolist()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('model = "measured"', "needs a table [[worker]]"),
        ('model = "measured"\n[[worker]]\nspread = [1.0]', "lacks compute_s"),
        ('model = "measured"\n[[worker]]\ncompute_s = 0.0', "compute_s is 0 for all"),
        ('model = "measured"\n[[worker]]\ncompute_s = 0.1\nmemory = 1.5', "memory=1.5 is out of range"),
        ('model = "measured"\n[[worker]]\ncompute_s = 0.1\nspread = []', "spread"),
        ("[[worker]]\ncompute_s = 0.1", "[[worker]] is for the model measured"),
        ("[costs]\ncores = 0", "cores=0"),
        ("[costs]\ncoars = 2", "no key 'coars'"),
        ("costs = 3", "costs must be a table"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        clusters.read(tmp_path / "one.toml").validate(4)
    assert said in str(refused.value)


def test_changes_are_made() -> None:
    known = Situation(PAIR, Members(2, 1), (4000,))
    more = Changes(workers=8, servers=2, link="1Gbit,2ms", slow="1:3x").apply(known)
    assert more.members == Members(8, 2)
    assert more.cluster.costs is not None
    assert more.cluster.costs.cores == 8  # as many for each worker as before
    assert (more.cluster.bandwidth, more.cluster.latency_s) == (125e6, 0.0021)
    assert draws(more.cluster, 1, 1, workers=8)[0] == pytest.approx(0.18)
    fewer = Changes(without=0).apply(known)
    assert draws(fewer.cluster, 0, 1, workers=1)[0] == pytest.approx(0.06)


@pytest.mark.parametrize(
    "changes",
    [Changes(without=2), Changes(slow="5:2x"), Changes(slow="x"), Changes(link="0Gbit"), Changes(link="fast"),
     Changes(workers=0), Changes(servers=0)],
)  # fmt: skip
def test_changes_that_cannot_be_are_refused(changes: Changes) -> None:
    with pytest.raises(ConfigError):
        changes.apply(Situation(PAIR, Members(2, 1), (4000,)))
    with pytest.raises(ConfigError, match="only of a run"):
        Changes(without=0).apply(Situation(dataclasses.replace(Cluster()), Members(2, 1), (4000,)))
