"""The waiting of the last minute, added up by who was waited for and why, as waits come and grow old."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from functools import lru_cache
from typing import TypeVar

from paceline.report.metrics import template
from paceline.report.worker_spans import NOBODY, Span

Key = TypeVar("Key")
cached_template = lru_cache(1 << 14)(template)


class WaitSums:
    """Waits, and what they add up to."""

    def __init__(self) -> None:
        self.waits: deque[Span] = deque()
        self.blame: dict[int, float] = defaultdict(float)
        """Seconds by the worker whose push ended them; -1 where no push did."""
        self.reasons: dict[str, float] = defaultdict(float)
        """Seconds by reason, numbers taken out."""

    def add(self, waits: Iterable[Span]) -> None:
        for wait in waits:
            self.waits.append(wait)
            self.blame[wait.cause] += wait.seconds
            self.reasons[cached_template(wait.reason)] += wait.seconds

    def forget(self, before_s: float) -> None:
        """Drops those that ended before."""
        while self.waits and self.waits[0].end_s < before_s:  # in the order of time, but for a moment
            wait = self.waits.popleft()
            take_off(self.blame, wait.cause, wait.seconds)
            take_off(self.reasons, cached_template(wait.reason), wait.seconds)

    def by_worker(self) -> dict[int, float]:
        """Returns seconds by the worker whose push ended them, most first."""
        known = {rank: seconds for rank, seconds in self.blame.items() if rank != NOBODY}
        return dict(sorted(known.items(), key=lambda item: -item[1]))

    def by_reason(self) -> dict[str, float]:
        """Returns seconds by reason, most first."""
        return dict(sorted(self.reasons.items(), key=lambda item: -item[1]))


def take_off(sums: dict[Key, float], key: Key, seconds: float) -> None:
    """Takes seconds off a sum, which is left out when it is nothing."""
    sums[key] -= seconds
    if sums[key] < 1e-6:
        del sums[key]
