"""How long to look, and how much must have happened: SpecSync's two numbers, tuned once an epoch.

If every worker had begun its last iteration D later, it would have read the pushes that others made in that time: that
is gained. Its own push would have come D later, too late for those who pull in between, D/T_i of the m - 1 others if
pulls come evenly: that is lost. Over all workers (Zhang et al. 2018, IV.B, equation 7 and Algorithm 1)

    F(D) = #{(i, j): owner(j) != i, 0 < t_j - p_i <= D}  -  D * (m - 1) * sum_i 1/T_i

with p_i the beginning of worker i's last complete iteration, T_i its span and t_j the pushes since then. The sum is
over the live workers; m counts those that have finished too, as in the paper, where it is constant.
ABORT_TIME is the D with the largest F, at most half the mean span (the range in which the paper picks by hand), and
ABORT_RATE what an iteration must uncover to be worth its own loss: D * (m - 1) / (T * m). If no F is positive there
is nothing to gain, and nobody speculates in the next epoch.

Only the count rises in steps, so only a D that is one of the differences t_j - p_i can be best: O(m^2) of them, and
the paper evaluates the whole of F at each, O(m^3). But sorted, the count at the k-th difference is k. That is one
sort, O(m^2 log m), and gives the very same numbers (`tests/core/test_specsync_tuning.py`).

Under steady arrivals as much is lost as is gained, for any D: what the tuner finds is that pushes come in clusters.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from paceline.core.speculation import Iteration, Notices, Speculation

LARGEST = 0.5
"""ABORT_TIME is at most this share of the mean span."""


def tune(notices: Notices, iterations: Mapping[int, Iteration], m: int) -> Speculation | None:
    """Returns how to speculate in the next epoch, or None if it would not pay."""
    span_s = sum(iteration.span_s for iteration in iterations.values()) / len(iterations)
    lost_per_s = (m - 1) * sum(1 / iteration.span_s for iteration in iterations.values())
    times, workers = np.asarray(notices.times, dtype=np.float64), np.asarray(notices.workers, dtype=np.int64)
    parts = [missed_by(worker, iterations[worker], times, workers, LARGEST * span_s) for worker in iterations]
    differences = np.sort(np.concatenate(parts))
    if not differences.size:
        return None
    gained = np.arange(1, differences.size + 1) - differences * lost_per_s
    # Of equal differences the last has the right count, and the largest F: `argmax` finds it by itself.
    best = int(gained.argmax())
    if gained[best] <= 0:
        return None
    abort_time_s = float(differences[best])
    return Speculation(abort_time_s, abort_time_s * (m - 1) / (span_s * m))


def missed_by(
    worker: int, iteration: Iteration, times: NDArray[np.float64], workers: NDArray[np.int64], at_most_s: float
) -> NDArray[np.float64]:
    """Returns how long after the worker had begun each push of others came, for those within `at_most_s`."""
    # A little beyond the end: what counts is the difference, and that is rounded otherwise than the sum.
    first = int(np.searchsorted(times, iteration.began_s, "right"))
    last = int(np.searchsorted(times, iteration.began_s + 1.001 * at_most_s, "right"))
    after: NDArray[np.float64] = times[first:last][workers[first:last] != worker] - iteration.began_s
    return after[after <= at_most_s]
