"""SSP: stale synchronous parallel. The fastest waits when it is too far ahead of the slowest.

The rule. A worker that has pushed iteration i may read while i < V + s, where V is the first iteration that some live
worker has not pushed and s is `staleness`. Otherwise its pull is parked and answered at the next V that makes the
condition true (the soft barrier), or, `lazy`, when V has passed i itself, so that it reads every update up to its own
iteration (Yao et al. 2019, III.C). Gradients are applied on arrival with lr/N, or with lr (`scale=none`). (FluentPS,
Yao et al. 2019, Table III; Ho et al. 2013. Figure 3 of Yao et al. 2019 is off by one against its own Table III: the
table holds.)

What it promises. A worker that starts iteration c has seen every update up to c - s - 1 of every worker. With
s = 0 the gate is BSP's: i < V.

What it gives up. Up to s iterations of the others may be missing from what a worker reads, and a worker that
is slower for good still sets the pace of all, s iterations later. `lazy` waits longer, s times less often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.core.policy import CentralPolicy, lazy_option, scale_option, staleness_weighted_option
from paceline.core.progress import Progress, name_workers
from paceline.core.spec import parameter


@dataclass(frozen=True)
class SSP(CentralPolicy):
    """The fastest waits when it is `staleness` iterations ahead of the slowest."""

    name: ClassVar[str] = "ssp"
    paper: ClassVar[str] = "Ho et al. 2013; Yao et al. 2019, Table III"
    on_arrival: ClassVar[bool] = True

    staleness: int = parameter(3, low=0, doc="how many iterations a worker may be ahead of the slowest")
    lazy: bool = lazy_option()
    scale: str = scale_option()
    staleness_weighted: bool = staleness_weighted_option()

    def may_pull(self, i: int, V: int) -> bool:
        return i < V + self.staleness

    def freed_at(self, i: int, V: int) -> int:
        return i + 1 if self.lazy else i - self.staleness + 1

    @property
    def bound(self) -> int:
        return self.staleness

    def why(self, i: int, progress: Progress) -> str:
        return f"{i + 1 - progress.V} ahead of {name_workers(*progress.missing())}, bound {self.staleness}"
