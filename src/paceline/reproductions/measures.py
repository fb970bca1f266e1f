"""Measures that several reproductions share."""

from __future__ import annotations

from statistics import fmean

from paceline.run import Run

LAST = 10
"""An accuracy is the mean of so many points of the history: one alone is noisy."""


def accuracy_at(run: Run, updates: int) -> float:
    """Returns the test accuracy after so many updates, the mean of the last points before.

    Where gradients are applied on arrival, runs are compared at an equal number of updates, and before the first worker
    has done its iterations and left: those who remain then take larger steps (lr/N with a smaller N), which is noise
    that no paper's experiment has in it.
    """
    points = [point for point in run.history if point.updates <= updates]
    return fmean(point.accuracy or 0.0 for point in points[-LAST:])


def reached_s(run: Run, accuracy: float) -> float | None:
    """Returns when the test accuracy was first so high."""
    return next((point.time_s for point in run.history if (point.accuracy or 0.0) >= accuracy), None)


def percent_less(now: float, before: float) -> float:
    return 100 * (1 - now / before) if before else 0.0
