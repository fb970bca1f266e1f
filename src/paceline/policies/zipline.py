"""ZipLine's plan: when should workers of unequal speed meet, so that the first to arrive waits least?

The problem (ZipLine, Zhao et al. 2021, section 4). Row p of an (n, R) matrix holds the times at which worker p is
predicted to end its next R iterations. Choose one time of each row; the barrier is at the latest of them, and the
worker with the earliest waits for max - min. Make that wait as short as can be; among equals, the earliest barrier
(Zhao et al. 2021, 4.2: the longer nobody meets, the staler the gradients). At a barrier e each worker stops after its
last iteration that ends not after e.

The paper's way (`paceline.zipline` has it) scans all times in order and keeps a window of n of them. Here instead:
fix the moment l before which nobody may stop. A worker in the iteration that runs from s to e, s < l <= e, then stops
at e. So the barrier is the largest e of all iterations with s < l: those that ended before l are no larger than their
worker's next. Sort iterations by s; the barrier as a function of l is the running maximum of their ends, a staircase,
and on each step the best l is its right end, where the next step begins: the start of an iteration. One sort, one
running maximum, one subtraction. l ranges up to the earliest of the rows' last times.

Most iterations need not even be sorted. Take a few workers alone; their staircase is nowhere above that of all. An
iteration that ends below the step it starts on can change nothing. If `bound` is the shortest wait of the few, their
staircase is for every l at least `bound` above l, so workers whose iterations are all shorter than that are dropped at
once. (In floating point too: subtraction rounds, but keeps the order.) What is left is held against the staircase
itself, in a table, and only what rises above it is sorted. The few should be slow, but not all alike: those in step
wait for nobody. Which are taken decides how long it takes, never what comes out. At worst all are sorted.

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
"""An array (workers, iterations) of the times at which iterations end, each row ascending."""

FEWEST = 200
"""With fewer workers it is faster to sort all iterations than to find out which need not be sorted."""
SLOWEST = 5
"""The few that are solved for first are taken evenly from the slowest fifth."""
ROOTS = 3
"""The few are three times the root of all: enough for a good bound, and a small part of the work."""
CELLS = 2
"""The table of the few's staircase has two cells for each of their iterations."""


@dataclass(frozen=True)
class Plan:
    """A plan says where to meet: each worker stops after one of its iterations and waits for the barrier."""

    time: float
    """The time of the barrier: when the last worker arrives."""
    wait: float
    """How long the first worker to arrive waits for the barrier."""
    iterations: tuple[int, ...]
    """The index, in each worker's row, of the iteration it stops after."""


def plan(times: ArrayLike) -> Plan:
    """Finds the barrier with the shortest wait for these (n, R) iteration ends; among equals the earliest."""
    ends, lengths = check_times(times)
    starts, stops = ends[:, :-1], ends[:, 1:]
    first, last = float(ends[:, 0].max()), float(ends[:, -1].min())
    if len(ends) >= FEWEST and lengths.size:
        longest = lengths.max(axis=1)
        few = ends[slow_but_spread(longest)]
        stairs = Staircase(few[:, :-1], few[:, 1:], first, last)
        kept = ends[longest >= stairs.lowest()[0]]
        starts, stops = kept[:, :-1], kept[:, 1:]
        rises = stairs.may_rise(starts, stops)
        starts, stops = starts[rises], stops[rises]
    wait, barrier = Staircase(starts, stops, first, last).lowest()
    # Each stops after its last iteration that ends not after the barrier.
    iterations = np.count_nonzero(ends <= barrier, axis=1) - 1
    return Plan(barrier, wait, tuple(iterations.tolist()))


class Staircase:
    """The barrier as a function of l, for iterations that run from `starts` to `stops`."""

    def __init__(self, starts: Times, stops: Times, first: float, last: float) -> None:
        """`first` is when every worker has ended an iteration, `last` when one has ended all: l is at most that."""
        inside = starts < last
        starts, stops = starts[inside], stops[inside]
        order = np.argsort(starts)
        self.last = last
        self.starts: Times = starts[order]
        self.barriers: Times = np.maximum.accumulate(np.concatenate(([first], stops[order])))
        """The barrier behind each number of starts."""

    def lowest(self) -> tuple[float, float]:
        """Returns the shortest wait, and its barrier."""
        waits = self.barriers - np.concatenate((self.starts, [self.last]))
        best = int(np.argmin(waits))
        return float(waits[best]), float(self.barriers[best])

    def may_rise(self, starts: Times, stops: Times) -> NDArray[np.bool_]:
        """Returns which of these iterations may end above the step they start on: all that do, and a few more.

        They are looked up in a table of equal cells. A start counts only for the cells behind its own, so rounding is
        harmless.
        """
        low = min(starts.min(initial=self.last), self.starts.min(initial=self.last))
        span = float(self.last - low)
        cells = CELLS * len(self.starts)
        if not (span > 0 and math.isfinite(span) and math.isfinite(cells / span)):
            return np.ones(starts.shape, dtype=np.bool_)

        def cell_of(moments: Times) -> NDArray[np.intp]:
            cell: Times = (np.minimum(moments, self.last) - low) * (cells / span)
            return cell.astype(np.intp)

        before = np.cumsum(np.bincount(cell_of(self.starts) + 1, minlength=cells + 2))
        rises: NDArray[np.bool_] = stops > self.barriers[before][cell_of(starts)]
        return rises


def slow_but_spread(longest: Times) -> NDArray[np.intp]:
    """Chooses a few of the workers with the longest iterations."""
    workers = len(longest)
    few = ROOTS * math.isqrt(workers)
    slowest = max(few, workers // SLOWEST)
    return np.argsort(longest)[workers - slowest :: max(1, slowest // few)]


def check_times(times: ArrayLike) -> tuple[Times, Times]:
    """Returns the times as numbers, and how long each iteration but the first of a row takes; refuses what is no matrix
    of times."""
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
        raise ConfigError(explain_disorder(ends))
    return ends, lengths


def explain_disorder(ends: Times) -> str:
    """Says what is wrong with the times, and where first."""
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
