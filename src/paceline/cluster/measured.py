"""Computing times as they were measured: each worker's spread, spells, trend, and what is common to all.

A draw is a normal variable that remembers the last one (`memory`) and shares a part with the other workers' draws of
the same iteration (`common`); its place among all draws picks a value from the measured spread. So the times have
exactly the measured distribution, come in spells where they did, and are slow together where they were.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from paceline.cluster.costs import MeasuredWorker, check
from paceline.cluster.models import BLOCK, WORKER_STREAM, Cluster
from paceline.errors import ConfigError

COMMON_STREAM = 1 << 31
"""Of the draws that all workers share; no worker has this rank."""


@dataclass(frozen=True)
class Measured(Cluster):
    """Each worker as slow as it was measured to be, in the tables [[worker]] (`paceline calibrate` writes them)."""

    name: ClassVar[str] = "measured"

    def slowdowns(self, worker: int, workers: int, seed: int) -> Callable[[], float]:
        common = np.random.Generator(np.random.PCG64([seed, WORKER_STREAM, COMMON_STREAM]))
        random = np.random.Generator(np.random.PCG64([seed, WORKER_STREAM, worker]))
        return self.with_others(self._factors(self.of(worker), random, common), worker, workers, seed).__next__

    def of(self, worker: int) -> MeasuredWorker:
        """Returns the measured worker that this one is like: the same again where there are more."""
        if not self.measured:
            raise ConfigError("the model measured needs a table [[worker]] for each worker (`paceline calibrate`)")
        return self.measured[worker % len(self.measured)]

    def undisturbed_s(self) -> float:
        """Returns the middle of what the workers need in the mean, or `compute_s`, to which all are then scaled."""
        return self._middle_s() if self.compute_s is None else self.compute_s

    def _middle_s(self) -> float:
        return statistics.median(worker.compute_s for worker in self.measured) if self.measured else 0.0

    def _factors(
        self, worker: MeasuredWorker, random: np.random.Generator, common: np.random.Generator
    ) -> Iterator[float]:
        own = worker.compute_s / self._middle_s()
        spread, last = np.array(worker.spread), len(worker.trend) - 1
        mine, shared = _remembering(worker.memory, random), _remembering(worker.memory, common)
        alone, together = math.sqrt(1 - worker.common), math.sqrt(worker.common)
        iteration = 0
        while True:
            drawn = alone * next(mine) + (together * next(shared) if together else 0.0)
            place = 0.5 * (1 + math.erf(drawn / math.sqrt(2)))
            trend = worker.trend[min(last, iteration // worker.trend_iterations)]
            yield own * trend * float(spread[min(len(spread) - 1, int(place * len(spread)))])
            iteration += 1

    def validate(self, workers: int) -> None:
        super().validate(workers)
        self.of(0)
        for number, worker in enumerate(self.measured, 1):
            check(worker, f"[[worker]] {number}")
        if not self._middle_s() > 0:
            raise ConfigError("[[worker]]: compute_s is 0 for all: give how long their computations take")


def _remembering(memory: float, random: np.random.Generator) -> Iterator[float]:
    """Yields standard normal numbers, each of which resembles the one before it."""
    value, fresh = float(random.standard_normal()), math.sqrt(1 - memory**2)
    while True:
        for draw in random.standard_normal(BLOCK).tolist():
            yield value
            value = memory * value + fresh * draw
