"""The paper's baselines and its generator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline import zipline
from paceline.errors import ConfigError
from paceline.zipline import scans

ROWS = [[0.0, 100.0, 100.0], [10.0, 100.0, 100.0], [-1.0, 2.0, 15.0], [-3.0, 9.0, 10.5]]
"""The counterexample of grids.py; rows of one time are filled up with one far away."""


def test_full_grid_scan_is_a_heuristic() -> None:
    assert zipline.exhaustive(ROWS).wait == zipline.plan(ROWS).wait == 10
    assert zipline.plan(ROWS).iterations == (0, 0, 1, 1)
    assert zipline.full_grid_scan(ROWS).wait == 13


def test_a_grid_scan_takes_everybodys_nearest_to_the_first_workers_times() -> None:
    found = zipline.grid_scan([[5.0, 9.0], [1.0, 6.0], [2.0, 8.0]])
    assert found == zipline.Plan(8.0, 3.0, (0, 1, 1))


def test_a_full_grid_scan_is_no_worse_than_a_grid_scan_and_no_better_than_the_best() -> None:
    random = np.random.default_rng(0)
    missed = 0
    for _ in range(200):
        times = zipline.generate(int(random.integers(2, 12)), 6, random)
        best, full, grid = (each(times).wait for each in (zipline.plan, zipline.full_grid_scan, zipline.grid_scan))
        assert best <= full <= grid
        missed += best < grid
    assert missed > 20


def test_an_exhaustive_search_of_too_much_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"15\^10 choices"):
        zipline.exhaustive(zipline.generate(10, 15, np.random.default_rng(0)))


def test_the_generator_makes_the_papers_workers() -> None:
    times = zipline.generate(500, 15, np.random.default_rng(0))
    lengths = np.diff(times, axis=1)
    assert times.shape == (500, 15)
    assert np.allclose(lengths, lengths[:, :1])
    assert lengths.min() >= 1000
    assert 1490 < lengths.max() <= 1500
    assert 30_000 < times[:, 0].min() < times[:, 0].max() < 31_500


def test_from_the_common_start_the_first_column_wins() -> None:
    """Why workers run for a while first."""
    for seed in range(20):
        times = zipline.generate(100, 15, np.random.default_rng(seed), run_ms=0.0)
        assert zipline.plan(times).time == times[:, 0].max()


def test_waits_are_the_papers() -> None:
    """Table 3, R = 15: 1103, 1228, 1351, 1403, each of one matrix; here the mean of thirty."""
    random = np.random.default_rng(0)
    for workers, paper in ((50, 1103), (100, 1228), (500, 1351), (1000, 1403)):
        waits = [zipline.plan(zipline.generate(workers, 15, random)).wait for _ in range(30)]
        assert np.mean(waits) == pytest.approx(paper, rel=0.04)


def test_algorithm_2_as_printed_forms_far_fewer_candidates_than_figure_7_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """13 795 there, n = 1000 and R = 15. ZipLineOpt looks at no more of them."""
    seen: list[int] = []
    original = scans.better

    def counting(*candidate: Any) -> zipline.Plan:
        seen.append(1)
        return original(*candidate)

    monkeypatch.setattr(scans, "better", counting)
    times = zipline.generate(1000, 15, np.random.default_rng(0))
    zipline.zipline(times)
    printed = len(seen)
    assert 700 < printed < 1400
    zipline.zipline_opt(times)
    assert len(seen) - printed == printed
