"""`plan` beside the search through every choice, beside the paper's searches, and with what it must refuse."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import paceline
from paceline import zipline
from paceline.errors import ConfigError
from paceline.policies import zipline as planner
from paceline.zipline import Plan, plan

EXACT = ("ZipLine", "ZipLineOpt", "ZipLineOptBS")
CASES = 10_000


def small_cases(seed: int) -> list[np.ndarray]:
    """Up to 5 workers and 6 iterations. Two of three in small integers, where ties are the rule."""
    random = np.random.default_rng(seed)
    cases = []
    for case in range(CASES):
        workers, iterations = random.integers(1, 6), random.integers(1, 7)
        shape = (workers, iterations if iterations**workers < 2000 else 3)
        times = random.uniform(0, 10, shape) if case % 3 == 0 else random.integers(0, random.integers(2, 25), shape)
        cases.append(np.sort(times, axis=1).astype(float))
    return cases


def by_one_sort(times: np.ndarray) -> Plan:
    """Finds the plan in another way than `plan`, for sizes beyond an exhaustive search: from the right ends, sorted."""
    flat, size = times.ravel(), times.size
    order = np.argsort(flat, kind="stable")
    place = np.empty(size, dtype=np.intp)
    place[order] = np.arange(size)
    following = np.full(times.shape, size)
    following[:, :-1] = place.reshape(times.shape)[:, 1:]
    left = np.searchsorted(np.maximum.accumulate(following.ravel()[order]), np.arange(size), side="right")
    everybody = place.reshape(times.shape)[:, 0].max()
    waits = (flat[order] - flat[order][np.minimum(left, size - 1)])[everybody:]
    best = int(np.argmin(waits))
    time = flat[order][everybody + best]
    return Plan(float(time), float(waits[best]), tuple((np.count_nonzero(times <= time, axis=1) - 1).tolist()))


def test_it_is_what_the_search_through_every_choice_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand small matrices, each both ways: everything sorted, and with short iterations left out."""
    ties = 0
    for times in small_cases(0):
        best = zipline.exhaustive(times)
        assert plan(times) == best
        with monkeypatch.context() as patch:
            patch.setattr(planner, "FEWEST", 1)
            patch.setattr(planner, "ROOTS", 1)
            assert plan(times) == best
        ties += len(np.unique(times)) < times.size
    assert ties > CASES / 3


def test_the_papers_three_searches_find_it_too_ties_included() -> None:
    for times in small_cases(1)[::5]:
        best = plan(times)
        for name in EXACT:
            found = zipline.SEARCHES[name](times)
            assert (found.wait, found.time) == (best.wait, best.time), (name, times)
            chosen = times[np.arange(len(times)), found.iterations]
            assert (chosen.max(), chosen.max() - chosen.min()) == (best.time, best.wait)


@pytest.mark.parametrize(("workers", "iterations"), [(10, 15), (10, 150), (100, 15), (100, 150), (1000, 15)])
def test_all_agree_on_the_papers_sizes(workers: int, iterations: int) -> None:
    times = zipline.generate(workers, iterations, np.random.default_rng(2))
    best = plan(times)
    assert best == by_one_sort(times)
    assert {name: zipline.SEARCHES[name](times) for name in EXACT} == dict.fromkeys(EXACT, best)
    assert zipline.grid_scan(times).wait >= best.wait


def test_all_agree_on_the_papers_largest_size() -> None:
    times = zipline.generate(1000, 150, np.random.default_rng(3))
    assert plan(times) == by_one_sort(times) == zipline.zipline_opt_bs(times)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 500), st.integers(1, 12), st.sampled_from(["noisy", "ties", "heavy", "alike"]), st.integers(0, 999)
)
def test_leaving_out_short_iterations_changes_nothing(workers: int, iterations: int, kind: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    shape = (workers, iterations)
    lengths = {
        "noisy": lambda: random.lognormal(0.0, 0.5, shape),
        "ties": lambda: random.integers(0, 4, shape).astype(float),
        "heavy": lambda: random.pareto(1.0, shape),
        "alike": lambda: np.full(shape, 0.1) * random.integers(1, 3, (workers, 1)),
    }
    times = random.integers(0, 5, (workers, 1)) + np.cumsum(lengths[kind](), axis=1)
    assert plan(times) == by_one_sort(times)


@settings(max_examples=200, deadline=None)
@given(
    hnp.arrays(
        np.float64,
        st.tuples(st.integers(1, 4), st.integers(1, 4)),
        elements=st.one_of(st.floats(-1.7e308, 1.7e308), st.sampled_from([0.0, 5e-324, -5e-324, 1e-310, 1.0])),
    ).map(lambda times: np.sort(times, axis=1))
)
@example(np.array([[-1.7e308, 1e308, 1.7e308]] * 2))
def test_any_numbers_will_do(times: np.ndarray) -> None:
    """Where a difference is too large for a number, the wait is infinite; where it is tiny, it counts."""
    with np.errstate(over="ignore"), pytest.MonkeyPatch.context() as patch:
        best = zipline.exhaustive(times)
        found = [plan(times)]
        patch.setattr(planner, "FEWEST", 1)
        found.append(plan(times))
        for each in found:
            assert (each.wait, each.time) == (best.wait, best.time)


def test_one_worker_waits_for_nobody() -> None:
    assert plan([[3.0, 5.0, 9.0]]) == Plan(3.0, 0.0, (0,))


def test_one_iteration_each_is_bsp() -> None:
    assert plan([[3.0], [5.0], [9.0]]) == Plan(9.0, 6.0, (0, 0, 0))


def test_of_equal_waits_the_earliest_barrier() -> None:
    assert plan([[1, 2, 3], [1, 2, 3]]) == Plan(1.0, 0.0, (0, 0))
    assert plan([[0, 10, 20], [4, 14, 24]]) == Plan(4.0, 4.0, (0, 0))


def test_the_public_module_takes_plain_lists_and_integers() -> None:
    found = paceline.zipline.plan([[2, 4, 6], [3, 6, 9]])
    assert found == Plan(6.0, 0.0, (2, 1))
    assert all(type(stop) is int for stop in found.iterations)


def test_the_matrix_is_left_as_it_was() -> None:
    times = zipline.generate(200, 15, np.random.default_rng(0))
    copy = times.copy()
    plan(times)
    assert (times == copy).all()


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ([], "must be a matrix (workers, iterations), not of shape (0,)"),
        ([[]], "not of shape (1, 0)"),
        (np.empty((0, 3)), "not of shape (0, 3)"),
        ([1.0, 2.0], "not of shape (2,)"),
        (np.zeros((2, 2, 2)), "not of shape (2, 2, 2)"),
        ([[1.0, 2.0], [3.0]], "cannot be read as a matrix of numbers"),
        ([["soon"]], "cannot be read as a matrix of numbers"),
        ([[1.0, float("nan")], [1.0, 2.0]], "must be finite numbers: worker 0, iteration 1 ends at nan"),
        ([[float("nan")]], "worker 0, iteration 0 ends at nan"),
        ([[1.0, 2.0, 3.0], [1.0, float("nan"), 3.0]], "worker 1, iteration 1 ends at nan"),
        ([[1.0, 2.0], [1.0, float("inf")]], "worker 1, iteration 1 ends at inf"),
        ([[1.0, float("inf"), float("inf")]], "worker 0, iteration 1 ends at inf"),
        ([[float("-inf"), 1.0]], "worker 0, iteration 0 ends at -inf"),
        ([[1.0, 2.0], [5.0, 4.0]], "must ascend in each row: worker 1 ends iteration 0 at 5 and iteration 1 at 4"),
    ],
)
@pytest.mark.parametrize("search", zipline.SEARCHES)
def test_wrong_input_gets_one_line(times: object, said: str, search: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        zipline.SEARCHES[search](times)
    assert "\n" not in str(raised.value)
