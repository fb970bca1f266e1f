"""SpecSync's tuner equals equation 7 and Algorithm 1 of Zhang et al. 2018, number for number."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.speculation import Iteration, Notices, Speculation
from paceline.policies.specsync_tuning import tune

Pushes = list[tuple[float, int]]


def improvement(D: float, pushes: Pushes, iterations: dict[int, Iteration], m: int) -> float:
    """Equation 7 with the estimates 5 and 6, term by term."""
    gained = sum(
        owner != worker and 0 < at - iteration.began_s <= D
        for worker, iteration in iterations.items()
        for at, owner in pushes
    )
    return gained - D * ((m - 1) * sum(1 / iteration.span_s for iteration in iterations.values()))


def cubic(pushes: Pushes, iterations: dict[int, Iteration], m: int = 0) -> Speculation | None:
    """Algorithm 1 as it stands: all candidates, the whole of F at each; the smallest D of the best."""
    m = m or len(iterations)
    T = sum(iteration.span_s for iteration in iterations.values()) / len(iterations)
    candidates = {
        at - iteration.began_s
        for worker, iteration in iterations.items()
        for at, owner in pushes
        if owner != worker and 0 < at - iteration.began_s <= T / 2
    }
    best, found = 0.0, None
    for D in sorted(candidates):
        F = improvement(D, pushes, iterations, m)
        if best < F:
            best, found = F, Speculation(D, D * (m - 1) / (T * m))
    return found


def epoch(workers: int, seed: int, grid: float | None = None) -> tuple[Pushes, dict[int, Iteration]]:
    """Everybody's last iteration, and an epoch's pushes; on a grid there are many ties."""
    draw = random.Random(seed)

    def moment(low: float, high: float) -> float:
        at = draw.uniform(low, high)
        return at if grid is None else grid * round(at / grid)

    iterations = {}
    pushes = []
    for worker in range(workers):
        began, ended = moment(0, 10), moment(10.5, 16)
        iterations[worker] = Iteration(began, ended - began)
        pushes += [(began, worker), (ended, worker)]
        pushes += [(moment(0, 16), worker) for _ in range(draw.randrange(3))]
    return sorted(pushes), iterations


def notices(pushes: Pushes) -> Notices:
    return Notices([at for at, _ in pushes], [worker for _, worker in pushes])


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 12), st.integers(0, 10**6), st.sampled_from([None, 0.5, 1.0]))
def test_equals_the_cubic_form(workers: int, seed: int, grid: float | None) -> None:
    pushes, iterations = epoch(workers, seed, grid)
    assert tune(notices(pushes), iterations, len(iterations)) == cubic(pushes, iterations)


def test_finds_a_cluster() -> None:
    """Nine push within a seventh of a second after worker 0 has pulled: that long it should have waited."""
    pushes = [(0.0, 0), *((0.05 + 0.01 * worker, worker) for worker in range(1, 10))]
    iterations = {worker: Iteration(at, 1.0) for at, worker in pushes}
    found = tune(notices(pushes), iterations, len(iterations))
    assert found == cubic(pushes, iterations)
    assert found is not None
    assert found.abort_time_s == pytest.approx(0.14)
    assert found.abort_rate == pytest.approx(0.14 * 9 / 10)


def test_nothing_to_gain_when_pushes_come_late() -> None:
    """All others push when half the iteration is over, or later."""
    pushes = [(0.0, 0), *((0.6, worker) for worker in range(1, 5))]
    iterations = {worker: Iteration(at, 1.0) for at, worker in pushes}
    assert tune(notices(pushes), iterations, len(iterations)) is None


def test_one_worker_has_nothing_to_look_for() -> None:
    assert tune(Notices([1.0, 2.0], [0, 0]), {0: Iteration(1.0, 1.0)}, 1) is None


def test_abort_time_is_at_most_half_the_mean_span() -> None:
    seen = 0.0
    for seed in range(30):
        pushes, iterations = epoch(8, seed)
        span_s = sum(iteration.span_s for iteration in iterations.values()) / 8
        if (found := tune(notices(pushes), iterations, len(iterations))) is not None:
            seen = max(seen, found.abort_time_s / span_s)
    assert 0.3 < seen <= 0.5
