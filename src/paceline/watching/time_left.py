"""An estimate of the time that is left: from the iterations that are left, or from where a metric is heading.

Neither is a promise. A metric is drawn on as a straight line through the later half of what was logged (losses by their
logarithm, which falls straighter); where it is not heading for the target, or too little was logged, nothing is said.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

LEAST_POINTS = 6
MOST_S = 30 * 86400.0

Points = Sequence[tuple[float, float | None]]


def time_left(
    now: float,
    target: str | None,
    metrics: Mapping[str, Points],
    iterations: int | None,
    progress: Sequence[tuple[int, float]],
) -> tuple[float | None, str]:
    """Returns the seconds that are left and what that is an estimate from; (None, "") if it cannot be told.

    `progress` has the iteration and the rate of each worker.
    """
    if iterations is not None and progress:
        times = [(iterations - done) / rate if rate > 0 else math.inf for done, rate in progress if done < iterations]
        if not times:
            return 0.0, f"{iterations} iterations are done"
        longest = max(times)
        return (longest, f"until all have done {iterations} iterations, at their present rates") if (
            longest < MOST_S) else (None, "")  # fmt: skip
    found = re.match(r"\s*([^<>=\s]+)\s*(<=|>=|=)\s*([\d.e+-]+)\s*$", target or "")
    if found is None or found[1] not in metrics:
        return None, ""
    try:
        left = until_reached(now, metrics[found[1]], float(found[3]))
    except ValueError:
        return None, ""
    return (left, f"until {found[1]} is {found[3]}, if it goes on as in the later half") if left is not None else (
        None, "")  # fmt: skip


def until_reached(now: float, points: Points, value: float) -> float | None:
    """Returns how long it takes until the line through the later half of the points meets the value."""
    known = [(at, each) for at, each in points if each is not None]
    later = known[len(known) // 2 :]
    if len(known) < LEAST_POINTS or later[-1][0] <= later[0][0]:
        return None
    if value > 0 and all(each > 0 for _, each in later) and later[0][1] > value:  # a falling one
        later, value = [(at, math.log(each)) for at, each in later], math.log(value)
    mean_at = sum(at for at, _ in later) / len(later)
    mean = sum(each for _, each in later) / len(later)
    spread = sum((at - mean_at) ** 2 for at, _ in later)
    slope = sum((at - mean_at) * (each - mean) for at, each in later) / spread
    left = (value - mean) / slope + mean_at - now if slope else math.inf
    return max(0.0, left) if (value - later[0][1]) * slope > 0 and left < MOST_S else None


def duration(seconds: float) -> str:
    """Returns a time as it is told."""
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if seconds < 100 else f"{minutes:.0f} min" if minutes < 100 else f"{hours:.1f} h"
