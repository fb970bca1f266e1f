"""ZipLine's plan: when should workers of unequal speed meet, so that the first to arrive waits least?

The problem (ZipLine, 002, section 4). Row p of an (n, R) matrix holds the times at which worker p is predicted to end
its next R iterations. Choose one time of each row; the barrier is at the latest of them, and the worker with the
earliest waits for max - min. Make that wait as short as can be; among equals, the earliest barrier (002, 4.2: the
longer nobody meets, the staler the gradients). At a barrier e each worker stops after its last iteration that ends
not after e.

The paper's way (`paceline.zipline` has it) scans all times in order and keeps a window of n of them. Here instead:
fix the moment l before which nobody may stop. A worker in the iteration that runs from s to e, s < l <= e, then stops
at e. So the barrier is the largest e of all iterations with s < l: those that ended before l are no larger than their
worker's next. Sort iterations by s; the barrier as a function of l is the running maximum of their ends, a staircase,
and on each step the best l is its right end, where the next step begins: the start of an iteration. One sort, one
running maximum, one subtraction. l ranges up to the earliest of the rows' last times.

Most iterations need not even be sorted. Take a few workers alone, and let `bound` be their shortest wait: for every l
their staircase is then at least `bound` above l. An iteration shorter than that, started at s, has ended before the
staircase at s; it can change nothing. (In floating point too: subtraction rounds, but keeps the order.) So: choose
some workers with long iterations, solve for them, drop whatever is shorter than their wait, solve for the rest. The
best workers to choose are slow but not all alike, since those who are in step wait for nobody; which are chosen
decides how long it takes, never what comes out. With the paper's data (n = 1000, R = 150) a quarter of the
iterations is left to sort; at worst all are.

What it promises. Exactly the optimum, whatever the times, ties included. `docs/benchmarks.md` has what it takes.

Degenerate cases. One worker waits for nobody: wait 0, at its first time. R = 1 is BSP: everybody's only iteration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.errors import ConfigError

Times = NDArray[np.float64]
"""(workers, iterations): when each ends, each row ascending."""

FEWEST = 200
"""With fewer workers than that, all is sorted sooner than it is found out what need not be."""
SLOWEST = 5
"""Those solved for first are taken evenly from the slowest fifth ..."""
ROOTS = 3
"""... and are three times the root of all: enough for a good bound, few beside the rest."""


@dataclass(frozen=True)
class Plan:
    """Where to meet: each worker stops after its iteration of this index (from 0) and waits for the barrier."""

    time: float
    """Of the barrier: when the last one arrives."""
    wait: float
    """How long the first to arrive waits for it."""
    iterations: tuple[int, ...]
    """Of each worker, its index in the worker's row."""


def plan(times: ArrayLike) -> Plan:
    """The barrier with the shortest wait for these (n, R) iteration ends; among equals the earliest."""
    ends, lengths = checked(times)
    first, last = ends[:, 0].max(), ends[:, -1].min()
    bound, kept = 0.0, np.arange(len(ends))
    if len(ends) >= FEWEST and lengths.size:
        longest = lengths.max(axis=1)
        few = slow_but_spread(longest)
        bound, _ = staircase(ends[few], lengths[few], 0.0, first, last)
        kept = np.flatnonzero(longest >= bound)
    wait, barrier = staircase(ends[kept], lengths[kept], bound, first, last)
    # Each stops after its last iteration that ends not after the barrier.
    stops = np.count_nonzero(ends <= barrier, axis=1) - 1
    return Plan(barrier, wait, tuple(stops.tolist()))


def staircase(ends: Times, lengths: Times, bound: float, first: float, last: float) -> tuple[float, float]:
    """The shortest wait and its barrier, by the iterations not shorter than `bound`.

    `first` is when everybody has ended an iteration, `last` when somebody has ended all: l is at most that.
    """
    chosen = (lengths >= bound) & (ends[:, :-1] < last)
    starts, stops = ends[:, :-1][chosen], ends[:, 1:][chosen]
    order = np.argsort(starts)
    barriers = np.maximum.accumulate(np.concatenate(([first], stops[order])))
    waits = barriers - np.concatenate((starts[order], [last]))
    best = int(np.argmin(waits))
    return float(waits[best]), float(barriers[best])


def slow_but_spread(longest: Times) -> NDArray[np.intp]:
    """A few of the workers with the longest iterations."""
    workers = len(longest)
    few = ROOTS * math.isqrt(workers)
    slowest = max(few, workers // SLOWEST)
    return np.argsort(longest)[workers - slowest :: max(1, slowest // few)]


def checked(times: ArrayLike) -> tuple[Times, Times]:
    """The times as numbers, and how long each iteration but the first of a row takes."""
    try:
        ends: Times = np.asarray(times, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"times of iterations cannot be read as a matrix of numbers: {error}") from None
    if ends.ndim != 2 or not ends.size:
        raise ConfigError(f"times of iterations must be a matrix (workers, iterations), not of shape {ends.shape}")
    with np.errstate(invalid="ignore", over="ignore"):
        lengths: Times = ends[:, 1:] - ends[:, :-1]
    # Beside a NaN the length is NaN, which is not >= 0 either; and what lies between finite ends in order is finite.
    ordered = not lengths.size or bool(lengths.min() >= 0)
    if not (ordered and np.isfinite(ends[:, 0]).all() and np.isfinite(ends[:, -1]).all()):
        raise ConfigError(complaint(ends))
    return ends, lengths


def complaint(ends: Times) -> str:
    """What is wrong with the times, and where first."""
    infinite = np.argwhere(~np.isfinite(ends))
    if infinite.size:
        worker, iteration = infinite[0].tolist()
        found = ends[worker, iteration]
        return f"times of iterations must be finite numbers: worker {worker}, iteration {iteration} ends at {found}"
    worker, iteration = np.argwhere(ends[:, 1:] < ends[:, :-1])[0].tolist()
    before, after = ends[worker, iteration], ends[worker, iteration + 1]
    return (
        f"times of iterations must ascend in each row: worker {worker} ends iteration {iteration} at {before:g} and "
        f"iteration {iteration + 1} at {after:g}"
    )
