"""How long will a worker's next iterations take? Three answers, from how long the last ones took.

`latest`: as long as the last one (Zhao et al. 2021, 4.1: "based on their most recent iteration interval"). Right for
workers whose speed lasts, and the first to notice when it changes; where every iteration differs it hands one draw's
luck on. `mean`: an exponentially weighted mean; the last interval weighs `alpha`, the one before that (1 - alpha) times
as much, and so on. `median`: of the last `recent`; a rare slow iteration does not move it.
"""

from __future__ import annotations

from collections import deque
from statistics import median


class LatestInterval:
    def __init__(self) -> None:
        self.interval_s = 0.0

    def note(self, interval_s: float) -> None:
        self.interval_s = interval_s

    def next_s(self) -> float:
        return self.interval_s


class MeanInterval:
    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.mean_s: float | None = None

    def note(self, interval_s: float) -> None:
        before = interval_s if self.mean_s is None else self.mean_s
        self.mean_s = before + self.alpha * (interval_s - before)

    def next_s(self) -> float:
        return self.mean_s or 0.0


class MedianInterval:
    def __init__(self, recent: int) -> None:
        self.intervals_s: deque[float] = deque(maxlen=recent)

    def note(self, interval_s: float) -> None:
        self.intervals_s.append(interval_s)

    def next_s(self) -> float:
        return median(self.intervals_s)
