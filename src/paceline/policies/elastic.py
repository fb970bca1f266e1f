"""ElasticBSP: barriers as in BSP, but where the predicted wait is shortest; between them nobody waits.

The rule. Between barriers every pull is answered at once and every gradient applied when it arrives, with lr/N or,
`scale=none`, lr, as under ASP. One scheduler watches the pushes of all workers. When each has made two since the last
barrier, it predicts from its intervals when each will end its next `lookahead` iterations, chooses for each the
iteration after which it is to stop, so that all arrive as close together as can be (ZipLine, `policies/zipline.py`),
and tells the shards. A worker at its stop is parked until all are at theirs; they go on together, and it begins again.
(Zhao et al. 2021, sections 3 and 4; the machines are in `core/planned_barrier.py` and `core/barrier_scheduler.py`.)

The grace, a departure. In the paper the server that plans also answers the workers, so a plan holds from the instant
it is made. Here it travels to the shards, and a worker about to end an iteration may be answered before it is there.
So nobody is planned to stop at an iteration of which less than a tenth is left; the choice is among its other ends.
Where speeds last, the plan is the paper's nevertheless, to the letter: the earliest barrier is an interval of the
slowest away, and by then whoever was about to end an iteration has ended another. With `lookahead=1` there is no other
end, and that one is planned. Should the plan come too late for it, the worker does one iteration more and then waits.

What it promises. With speeds that differ but last, the wait at its barriers, per iteration of the slowest, is never
longer than BSP's, and shorter from a ratio of slowest to fastest of 1.4 on (with a `lookahead` of 2 or more). While the
fastest has not ended its third iteration when the slowest has ended two, the third of everybody is one of the meetings
to choose from, and that is BSP; otherwise the wait is less than one iteration of the slowest in three. All start from
the same parameters after each barrier. Once a shard knows the plan it lets nobody past its stop. A wrong prediction
costs waiting, nothing else.

What it gives up. Between barriers gradients are stale, as under ASP, and the faster do more iterations than the slower:
no bound but the plan's, `lookahead` iterations after two of the slowest. With one worker it is ASP, with nothing to
plan. Where iterations take randomly long the latest interval predicts badly; `predict=mean` and `median` do better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.core.barrier_scheduler import BarrierScheduler, IntervalPredictor
from paceline.core.machine import Machine
from paceline.core.messages import Members, Role
from paceline.core.planned_barrier import NotifyingWorker, PlannedShard
from paceline.core.policy import CentralPolicy, scale_option, staleness_weighted_option
from paceline.core.spec import option, parameter
from paceline.errors import ConfigError
from paceline.policies import zipline
from paceline.policies.interval_prediction import LatestInterval, MeanInterval, MedianInterval

PREDICTORS = ("latest", "mean", "median")
DEFAULT_ALPHA = 0.3
DEFAULT_RECENT = 9


@dataclass(frozen=True)
class ElasticBSP(CentralPolicy):
    """Barriers where the predicted wait is shortest, planned for all; between them nobody waits."""

    name: ClassVar[str] = "elastic"
    paper: ClassVar[str] = "Zhao et al. 2021, sections 3-5 (ElasticBSP, ZipLine)"
    balances: ClassVar[bool] = False
    refuses_local_steps: ClassVar[str] = "its plan, made for local steps, is bsp with local_steps=auto"
    on_arrival: ClassVar[bool] = True
    has_scheduler: ClassVar[bool] = True
    servers_may_change: ClassVar[bool] = False

    lookahead: int = parameter(
        15, low=1, high=10_000, doc="R: how many iterations of each worker are predicted and planned over"
    )
    predict: str = option(
        "latest", choices=PREDICTORS, doc="how long an iteration will take: latest (as the paper), mean or median"
    )
    alpha: float | None = option(None, low=0, high=1, doc="predict=mean: weight of the newest interval (0.3)")
    recent: int | None = option(None, low=1, doc="predict=median: of how many intervals (9)")
    scale: str = scale_option()
    staleness_weighted: bool = staleness_weighted_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, needs in (("alpha", "mean"), ("recent", "median")):
            if getattr(self, key) is not None and self.predict != needs:
                raise ConfigError(f"elastic:{key} belongs to predict={needs}, not to predict={self.predict}")
        if self.alpha == 0:
            raise ConfigError("elastic:alpha=0 is out of range: above 0 and at most 1")

    def may_pull(self, i: int, V: int) -> bool:
        return True

    def freed_at(self, i: int, V: int) -> int:
        raise AssertionError("no V frees a pull that waits for a planned barrier")

    def predictor(self) -> IntervalPredictor:
        """Makes a predictor of one worker's intervals."""
        if self.predict == "mean":
            return MeanInterval(DEFAULT_ALPHA if self.alpha is None else self.alpha)
        return MedianInterval(self.recent or DEFAULT_RECENT) if self.predict == "median" else LatestInterval()

    def machine(self, role: Role, rank: int, members: Members, seed: int) -> Machine:
        if role == "worker":
            return NotifyingWorker(rank, members)
        if role == "server":
            return PlannedShard(self, rank, members, seed)
        if role == "scheduler":
            return BarrierScheduler(self.lookahead, self.predictor, zipline.plan, members)
        raise ConfigError(f"{self} has no machine for the role {role!r}")
