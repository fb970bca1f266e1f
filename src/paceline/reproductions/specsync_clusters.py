"""The clusters of Zhang et al. 2018, section VI.A, as far as its text tells, and what it calls convergence.

Cluster 1: 40 equal machines, an iteration of CIFAR-10 "typically spans around 14 seconds" (III.A). Cluster 2: ten each
of m3.xlarge, m3.2xlarge, m4.xlarge and m4.2xlarge. The paper gives no speeds for these; a 2xlarge has twice the cores,
and m4 a newer processor, so the factors below are a guess. Iteration times vary by a log-normal factor: how much is
not in the paper either.

"Convergence is defined as the loss staying below the target value for 5 consecutive iterations" (VI.B). An iteration
of all workers is one point of our history. What comes after the first worker has done its iterations does not count:
fewer train from then on.
"""

from __future__ import annotations

import math
from statistics import median

from paceline.cluster import Cluster
from paceline.cluster.models import Factors, LogNormal, Slowdown
from paceline.core.events import ViewChanged
from paceline.core.trace import Trace
from paceline.report.metrics import Metrics, measure
from paceline.run import Point, Run

ITERATION_S = 14.0
SIGMA = 0.2
HETEROGENEOUS = (1.15, 0.6, 1.0, 0.5)
"""m3.xlarge, m3.2xlarge, m4.xlarge, m4.2xlarge, one of each in turn."""
CONSECUTIVE = 5


def homogeneous() -> Cluster:
    return LogNormal(compute_s=ITERATION_S, sigma=SIGMA)


def heterogeneous() -> Cluster:
    noise = Slowdown(LogNormal(sigma=SIGMA))
    return Factors(compute_s=ITERATION_S, by_worker=HETEROGENEOUS, also=(noise,))


def converged(run: Run, loss: float) -> Point | None:
    """Returns the point where the loss had been below the target five times in a row, before any worker left."""
    workers = run.trace.header.members.workers
    views = [record.event for record in run.trace if isinstance(record.event, ViewChanged)]
    left_s = min((event.at for event in views if len(event.view.members) < workers), default=math.inf)
    below = 0
    for point in run.history:
        if point.time_s > left_s:
            return None
        below = below + 1 if point.loss is not None and point.loss <= loss else 0
        if below == CONSECUTIVE:
            return point
    return None


def median_time(values: list[float | None]) -> float | None:
    """Returns the median, where None is later than anything."""
    found = median(math.inf if value is None else value for value in values)
    return found if math.isfinite(found) else None


def format_time(time_s: float | None) -> str:
    return f"converged after {time_s:.0f} s" if time_s is not None else "did not converge"


def speed_up(before: float | None, now: float | None) -> float | None:
    """Returns how many times as fast it is; infinite if it converges only now, 0 if only before, None if never."""
    if now is None:
        return None if before is None else 0.0
    return math.inf if before is None else before / now


def format_ratio(ratio: float | None) -> str:
    if ratio is None:
        return "neither converges"
    if ratio == 0:
        return "it no longer converges"
    return "it alone converges" if ratio == math.inf else f"{ratio:.2f}x"


def measured_until(run: Run, time_s: float) -> Metrics:
    """Returns the numbers of the run up to this time."""
    records = [record for record in run.trace.records if record.event.at <= time_s]
    return measure(Trace(run.trace.header, records), time_s)
