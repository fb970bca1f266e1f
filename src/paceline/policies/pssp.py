"""PSSP: probabilistic SSP. Beyond the staleness bound a worker is stopped only with some probability.

The rule. A worker that has pushed iteration i is k = i - V ahead. While k < s it may read, as under SSP. From
k = s on it is parked with probability P, and otherwise goes on. (FluentPS, Yao et al. 2019, III.E and Table III.)

    constant      P = c                          c = 0 is ASP, c = 1 is SSP
    dynamic       P = alpha / (1 + e^(s - k))    alpha/2 at k = s, rising with the gap
    significance  the same with alpha = |g|/|w| of the worker's push on that shard: large gradients wait

A parked pull is answered at the next rise of V, whatever the gap (the soft barrier), or, `lazy`, when V has
passed i. The coin is thrown once for each worker and iteration and shows the same side on every shard: it is a
function of (seed, worker, iteration). Eight shards that throw their own (`apart`, the paper's way) stop a
worker in 57 % of its iterations at c = 0.1.

What it promises. On average the freshness of SSP(s + 1/c - 1), at the same bound on the regret, for a fraction
of its waiting. What it gives up. No hard bound: a lucky worker may run ahead as far as it likes (c = 1 apart).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from paceline.core.messages import Handle, Members
from paceline.core.policy import CentralPolicy, lazy_option, scale_option, staleness_weighted_option
from paceline.core.progress import Progress, name_workers
from paceline.core.pull_gate import PullGate, coin
from paceline.core.spec import option, parameter
from paceline.errors import ConfigError

DEFAULT_C = 0.3


@dataclass(frozen=True)
class PSSP(CentralPolicy):
    """Beyond `staleness` iterations ahead of the slowest, a worker is stopped with some probability."""

    name: ClassVar[str] = "pssp"
    paper: ClassVar[str] = "Yao et al. 2019, III.E, Table III"
    on_arrival: ClassVar[bool] = True

    staleness: int = parameter(3, low=0, doc="how many iterations a worker may be ahead without being asked to wait")
    c: float | None = parameter(
        None, low=0, high=1, doc="constant probability of waiting (0.3 if none is given)", also="probability"
    )
    alpha: float | None = parameter(None, low=0, doc="dynamic: probability alpha / (1 + e^(staleness - gap))")
    significance: bool = option(False, doc="dynamic, with alpha = |g|/|w| of the worker's last push")
    apart: bool = option(False, doc="each shard throws its own coin, as in the paper")
    lazy: bool = lazy_option()
    scale: str = scale_option()
    staleness_weighted: bool = staleness_weighted_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.c is not None) + (self.alpha is not None) + self.significance > 1:
            raise ConfigError(f"{self}: give one of c, alpha and significance")

    def chance(self, gap: int, significance: float = 0.0) -> float:
        """Returns the probability P with which a worker that is `gap` ahead, at or beyond the bound, is parked."""
        if self.alpha is None and not self.significance:
            return DEFAULT_C if self.c is None else self.c
        alpha = significance if self.alpha is None else self.alpha
        return min(1.0, alpha / (1.0 + math.exp(min(0, self.staleness - gap))))

    def freed_at(self, i: int, V: int) -> int:
        if self.lazy:
            return i + 1
        return i - self.staleness + 1 if self.c == 1 else V + 1

    @property
    def bound(self) -> int | None:
        return self.staleness if self.c == 1 else None

    def why(self, i: int, progress: Progress) -> str:
        ahead = i + 1 - progress.V
        return f"{ahead} ahead of {name_workers(*progress.missing())}, bound {self.staleness}, and lost the toss"

    def gate(self, rank: int, members: Members, seed: int) -> PullGate:
        return PSSPGate(self, (seed, rank) if self.apart else (seed,))


class PSSPGate(PullGate):
    def __init__(self, policy: PSSP, seeds: tuple[int, ...]) -> None:
        super().__init__(policy)
        self.pssp = policy
        self.seeds = seeds
        self.wants_significance = policy.significance
        self.significance: dict[int, float] = {}

    def note_push(self, handle: Handle, at: float, significance: float | None) -> None:
        if significance is not None:
            self.significance[handle.source] = significance

    def forget(self, worker: int) -> None:
        self.significance.pop(worker, None)

    def may_pull(self, worker: int, i: int, progress: Progress) -> bool:
        gap = i - progress.V
        if gap < self.pssp.staleness:
            return True
        return coin(*self.seeds, worker, i) >= self.pssp.chance(gap, self.significance.get(worker, 0.0))
