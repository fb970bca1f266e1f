"""Scenarios: what the delay models draw, and what the files may say."""

from __future__ import annotations

import statistics

import pytest

from paceline.cluster import CATALOGUE, Fault, load
from paceline.errors import ConfigError


def draws(text: str, worker: int = 0, workers: int = 8, count: int = 4000, seed: int = 0) -> list[float]:
    duration = load(text).durations(worker, workers, seed)
    return [duration() for _ in range(count)]


def test_steady_and_factors_and_one_slow_are_constant() -> None:
    assert set(draws("steady:compute_s=0.2")) == {0.2}
    assert [draws("factors:by_worker=1:1:4,compute_s=1", worker, count=1)[0] for worker in range(4)] == [1, 1, 4, 1]
    slow = [draws("one-slow:factor=4,worker=2,compute_s=1", worker, count=1)[0] for worker in range(4)]
    assert slow == [1, 1, 4, 1]


def test_random_slowdown_strikes_with_probability_one_over_n() -> None:
    values = draws("random-slowdown:factor=6,compute_s=1", count=20000)
    assert set(values) == {1.0, 6.0}
    assert values.count(6.0) / len(values) == pytest.approx(1 / 8, abs=0.01)
    often = draws("random-slowdown:factor=6,compute_s=1,probability=1/2", count=20000)
    assert often.count(6.0) / len(often) == pytest.approx(0.5, abs=0.02)


def test_tails() -> None:
    normal = draws("lognormal:sigma=0.5,compute_s=1", count=20000)
    assert statistics.median(normal) == pytest.approx(1.0, abs=0.03)
    heavy = draws("pareto:shape=2,compute_s=1", count=20000)
    assert min(heavy) >= 1.0
    assert sum(value > 4 for value in heavy) / len(heavy) == pytest.approx(1 / 16, abs=0.01)


def test_draws_depend_on_seed_and_worker_only() -> None:
    assert draws("lognormal", 1, seed=3) == draws("lognormal", 1, seed=3)
    assert draws("lognormal", 1, seed=3) != draws("lognormal", 2, seed=3)
    assert draws("lognormal", 1, seed=3) != draws("lognormal", 1, seed=4)


@pytest.mark.parametrize("name", CATALOGUE)
def test_text_form_reads_back(name: str) -> None:
    cluster = load(f"{name}:compute_s=0.0123456789")
    assert load(str(cluster)) == cluster


def test_toml(tmp_path) -> None:
    path = tmp_path / "bad-day.toml"
    path.write_text(
        'model = "factors"\nby_worker = [1, 2.5]\ncompute_s = 0.02\n'
        '[[fault]]\nkind = "crash"\nworker = 1\nat_s = 3.0\n'
        '[[fault]]\nkind = "join"\nworker = 1\nat_s = 4\n'
    )
    cluster = load(str(path))
    assert cluster.by_worker == (1.0, 2.5)
    assert cluster.faults == (Fault("crash", 1, at_s=3.0), Fault("join", 1, at_s=4.0))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model = ", "not TOML"),
        ('model = "slow"', "unknown cluster 'slow'"),
        ("factor = 3", "steady has no parameter 'factor'"),
        ("compute_s = -1", "compute_s=-1 is out of range: 0 or more"),
        ('[[fault]]\nkind = "explode"\nworker = 1', "crash, leave, join, pause"),
        ('[[fault]]\nkind = "crash"\nworkr = 1', "workr"),
    ],
)
def test_a_wrong_file_gets_one_line(tmp_path, text: str, said: str) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as error:
        load(str(path))
    assert "\n" not in str(error.value)
    assert "scenario.toml" in str(error.value)


def test_an_unreadable_file_gets_one_line(tmp_path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(str(tmp_path / "nothing.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(str(tmp_path / "binary.toml"))


@pytest.mark.parametrize(
    "fault",
    [
        Fault("crash", 9, at_s=1.0),
        Fault("crash", -1, at_s=1.0),
        Fault("crash", 1),
        Fault("crash", 1, at_s=1.0, at_iteration=2),
        Fault("join", 9, at_iteration=3),
    ],
)
def test_impossible_faults_are_refused(fault: Fault) -> None:
    from dataclasses import replace

    with pytest.raises(ConfigError):
        replace(load("steady"), faults=(fault,)).validate(4)
