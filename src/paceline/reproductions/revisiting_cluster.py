"""The cluster of Chen et al. 2016, Figures 3 and 4, as far as its text tells: 100 machines, a few of them very late.

Of 100 gradients of an iteration most are there after 1.4 to 1.8 s. The 98th comes within 2 s in 80 % of iterations,
the last in 30 %; the latest of all took 310 s. So: iteration times log-normal around 1.5 s, and about one machine
in 100 iterations is a straggler whose time has a Pareto tail. 0.3 = 0.988 ** 100 gives the probability.

Without backups everybody waits for a straggler; with backups it is still busy when the next iterations begin, and
misses them too. With the shape 1.5 about one machine in twenty is busy in this way at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from paceline.cluster import Cluster
from paceline.cluster.models import BLOCK
from paceline.core.spec import parameter


@dataclass(frozen=True)
class RareStragglers(Cluster):
    """Most iterations take about as long; a few very much longer (Chen et al. 2016, Fig. 3)."""

    name: ClassVar[str] = "rare-stragglers"
    compute_s: float | None = parameter(1.5, low=0, doc="seconds an iteration takes, the median")
    sigma: float = parameter(0.06, low=0, doc="standard deviation of the logarithm")
    probability: float = parameter(0.012, low=0, high=1, doc="of an iteration straggling")
    least: float = parameter(1.4, low=1, doc="a straggling iteration is at least so many times as long")
    shape: float = parameter(1.5, low=0.1, doc="of the Pareto tail; the smaller, the heavier")
    most: float = parameter(207.0, low=1, doc="and at most so many times as long: 310 s")

    def factors(self, worker: int, workers: int, random: np.random.Generator) -> Iterator[float]:
        while True:
            usual = np.exp(self.sigma * random.standard_normal(BLOCK))
            tail = np.minimum(self.least * (1.0 + random.pareto(self.shape, BLOCK)), self.most)
            straggles = random.random(BLOCK) < self.probability
            yield from np.where(straggles, usual * tail, usual).tolist()
