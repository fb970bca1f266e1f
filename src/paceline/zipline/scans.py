"""ZipLine, ZipLineOpt and ZipLineOptBS, three exact searches, as Zhao et al. 2021 (5.2 and 5.3) describe them.

All ends of iterations, as triples (time, worker, index), are sorted into one line, Omega. A window Z slides over it and
holds one triple of each worker, its latest so far. Whenever the window's oldest triple is replaced, Z is a new
candidate: its wait is the newest time less the oldest. The first of the shortest waits wins, so the barrier is the
earliest of the best. The three differ in how they find what to replace:

- ZipLine (Algorithm 2) takes the oldest out of Z and goes on until its worker comes again. Z is in no order: finding
  the oldest costs n, R n^2 in all. The paper's inner loop takes from Omega until Z is full again, which it never is
  once the oldest was its worker's last; here the search ends with Omega, full or not.
- ZipLineOpt (5.3.1) keeps Z in the order of arrival, so the oldest is in front. If the newcomer is of another worker,
  no candidate can have become better (Theorem 3), and that worker's triple is looked for from the front, one by one.
- ZipLineOptBS (5.3.2) looks up in the matrix when the worker's iteration before ended, and finds that time in Z by
  binary search. Equal times stand in the order of their workers.

Written to be read beside the paper, and to be compared with: `paceline.zipline.plan` gives the same and takes a
small part of the time. Where several iterations end at the very moment of the barrier, Z may name an earlier iteration
of a worker than `plan` does; wait and barrier are the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

from numpy.typing import ArrayLike

from paceline.policies.zipline import Plan, Times, check_times

End = tuple[float, int, int]
"""An end of an iteration: (time, worker, index of the iteration)."""


def zipline(times: ArrayLike) -> Plan:
    """Searches by Algorithm 2, exactly, in O(R n^2)."""
    ends, _ = check_times(times)
    window: dict[int, End] = {}
    best: Plan | None = None
    for newest in in_order(ends):
        window[newest[1]] = newest
        if len(window) == len(ends):
            oldest = min(window.values())
            best = better(best, oldest, newest, window.values())
            del window[oldest[1]]
    assert best is not None  # every worker has an end, so the window was full once
    return best


def zipline_opt(times: ArrayLike) -> Plan:
    """Searches with the window in the order of arrival (5.3.1), exactly, in O(R n) to O(R n^2)."""
    ends, _ = check_times(times)

    def position(window: list[End], worker: int, index: int) -> int:
        return next(place for place, end in enumerate(window) if end[1] == worker)

    return slide(ends, position)


def zipline_opt_bs(times: ArrayLike) -> Plan:
    """Searches with a binary search in that window (5.3.2), exactly, in O(R n log n)."""
    ends, _ = check_times(times)
    matrix = ends.tolist()

    def position(window: list[End], worker: int, index: int) -> int:
        return bisect_left(window, (matrix[worker][index - 1], worker))

    return slide(ends, position)


def slide(ends: Times, position: Callable[[list[End], int, int], int]) -> Plan:
    """Moves an ordered window along; `position` finds the triple that a worker's next one replaces."""
    window: list[End] = []
    best: Plan | None = None
    for newest in in_order(ends):
        _, worker, index = newest
        candidate = index == 0  # a worker's first replaces nothing, and may fill the window
        if index > 0:
            candidate = window[0][1] == worker
            del window[0 if candidate else position(window, worker, index)]
        window.append(newest)
        if candidate and len(window) == len(ends):
            best = better(best, window[0], newest, window)
    assert best is not None  # every worker has an end, so the window was full once
    return best


def in_order(ends: Times) -> list[End]:
    """Returns Omega: all ends by time, then by worker."""
    return sorted((time, worker, index) for worker, row in enumerate(ends.tolist()) for index, time in enumerate(row))


def better(best: Plan | None, oldest: End, newest: End, window: Iterable[End]) -> Plan:
    """Returns the best plan so far, with this window seen."""
    wait = newest[0] - oldest[0]
    if best is not None and wait >= best.wait:
        return best
    iterations = {worker: index for _, worker, index in window}
    return Plan(newest[0], wait, tuple(iterations[worker] for worker in range(len(iterations))))
