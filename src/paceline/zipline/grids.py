"""The paper's baselines (Zhao et al. 2021, 5.1): GridScan, FullGridScan, and the search through everything.

GridScan (Algorithm 1) takes the worker whose first iteration ends first and, for each of its times, every other
worker's nearest. FullGridScan does so for the times of every worker. The paper calls GridScan a heuristic and
FullGridScan exhaustive. It is a heuristic too: around the best window's own times, some worker's nearest may lie
outside that window. For the rows {0}, {10}, {-1, 2, 15}, {-3, 9, 10.5} the best choice is 0, 10, 2, 9 with a wait of
10; the nearest to 0 in the last row is -3, to 10 in the third is 15, to 2 is again -3, and to 9 again 15: FullGridScan
finds 13.

`exhaustive` does look at all R^n choices, and is what the tests believe.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

from paceline.errors import ConfigError
from paceline.policies.zipline import Plan, Times, check_times

MOST_CHOICES = 5_000_000


def grid_scan(times: ArrayLike) -> Plan:
    """Searches by Algorithm 1, a heuristic, in O(R^2 n)."""
    ends, _ = check_times(times)
    return nearest_to(ends, ends[np.argmin(ends[:, 0])])


def full_grid_scan(times: ArrayLike) -> Plan:
    """Searches by Algorithm 1 with every worker in turn, a better heuristic, in O(R^2 n^2)."""
    ends, _ = check_times(times)
    return nearest_to(ends, np.unique(ends))


def nearest_to(ends: Times, designated: Iterable[float]) -> Plan:
    """Returns the best of the choices that take everybody's end nearest to one of the designated times."""
    workers = np.arange(len(ends))
    best: Plan | None = None
    for time in designated:
        nearest = np.abs(ends - time).argmin(axis=1)
        chosen = ends[workers, nearest]
        barrier = float(chosen.max())
        wait = barrier - float(chosen.min())
        if best is None or (wait, barrier) < (best.wait, best.time):
            best = Plan(barrier, wait, tuple(nearest.tolist()))
    assert best is not None  # there is a time: the matrix is not empty
    return best


def exhaustive(times: ArrayLike) -> Plan:
    """Tries every choice of one end of each worker: R^n of them, so for small matrices only."""
    ends, _ = check_times(times)
    workers, iterations = ends.shape
    if iterations**workers > MOST_CHOICES:
        raise ConfigError(
            f"{workers} workers with {iterations} iterations have {iterations}^{workers} choices, more than the "
            f"{MOST_CHOICES} that an exhaustive search looks at: use plan"
        )
    earliest = latest = ends[0]
    for row in ends[1:]:
        earliest = np.minimum.outer(earliest, row).ravel()
        latest = np.maximum.outer(latest, row).ravel()
    waits = latest - earliest
    best = np.flatnonzero(waits == waits.min())
    best = best[latest[best] == latest[best].min()]
    # Of equally good choices the last: there, everybody stops as late as the barrier allows, as in `plan`.
    choice = int(best[-1])
    stops = np.unravel_index(choice, (iterations,) * workers)
    return Plan(float(latest[choice]), float(waits[choice]), tuple(int(stop) for stop in stops))
