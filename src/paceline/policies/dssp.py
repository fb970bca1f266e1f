"""DSSP: dynamic SSP. How far a worker may run ahead is chosen, each time, so that it waits least.

The rule. Up to `low` iterations ahead of the slowest a worker reads at once, as under SSP(low). When it would be parked
there, the shard predicts from the latest intervals (time parked here left out) when this worker would push again and
when the slowest would. It lets the worker do the r further iterations, up to `high` ahead, after which the wait for the
slowest's next push is predicted to be shortest (ties: the smallest r). It is then parked until V rises, or, `lazy`,
until V has passed its own iteration. (Zhao et al. 2019, as told in ZipLine, Zhao et al. 2021, sections 6.2 and 7; it
fills the slot of DSPS in FluentPS, Yao et al. 2019, Table III: a rule that changes s while running.)

What it promises. SSP's bound with s = `high`, and shorter waits: a worker does not stop just before a long one.

What it gives up. The prediction is the last interval again: right for lasting differences in speed, a coin toss
under random slowdown. Each shard predicts for itself from what it sees, and they may differ; that costs
waiting, never consistency. For the slowest it looks at the few that have waited longest at V.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from paceline.core.messages import Handle, Members
from paceline.core.policy import CentralPolicy, lazy_option, scale_option, staleness_weighted_option
from paceline.core.progress import Progress, name_workers
from paceline.core.pull_gate import PullGate
from paceline.core.spec import parameter
from paceline.errors import ConfigError


@dataclass(frozen=True)
class DSSP(CentralPolicy):
    """SSP whose bound is chosen between `low` and `high`, for the shortest predicted wait."""

    name: ClassVar[str] = "dssp"
    paper: ClassVar[str] = "Zhao et al. 2019; Zhao et al. 2021, section 7; Yao et al. 2019, Table III (DSPS)"
    on_arrival: ClassVar[bool] = True

    low: int = parameter(3, low=0, doc="how many iterations ahead of the slowest a worker always may be")
    high: int = parameter(15, low=0, doc="how many at most, when that makes the wait shorter")
    lazy: bool = lazy_option()
    scale: str = scale_option()
    staleness_weighted: bool = staleness_weighted_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high < self.low:
            raise ConfigError(f"dssp:high={self.high} is out of range: low={self.low} or more")

    def freed_at(self, i: int, V: int) -> int:
        return i + 1 if self.lazy else max(V + 1, i - self.high + 1)

    @property
    def bound(self) -> int:
        return self.high

    def why(self, i: int, progress: Progress) -> str:
        ahead = i + 1 - progress.V
        return f"{ahead} ahead of {name_workers(*progress.missing())}, bound {self.low} to {self.high}"

    def gate(self, rank: int, members: Members, seed: int) -> PullGate:
        return DSSPGate(self)


class DSSPGate(PullGate):
    def __init__(self, policy: DSSP) -> None:
        super().__init__(policy)
        self.dssp = policy
        self.last: dict[int, float] = {}
        """When each worker pushed last, or was released if it was parked since."""
        self.interval: dict[int, float] = {}
        """How long each worker's last iteration took."""
        self.allowed: dict[int, int] = {}
        """The iteration up to which each worker may go on without another decision."""

    def note_push(self, handle: Handle, at: float, significance: float | None) -> None:
        worker = handle.source
        if worker in self.last:
            self.interval[worker] = at - self.last[worker]
        self.last[worker] = at

    def note_release(self, worker: int, at: float) -> None:
        # A worker's pace is that of its work: an interval with a wait in it would predict more waiting.
        self.last[worker] = at

    def forget(self, worker: int) -> None:
        for memory in (self.last, self.interval, self.allowed):
            memory.pop(worker, None)

    def may_pull(self, worker: int, i: int, progress: Progress) -> bool:
        gap = i - progress.V
        if gap < self.dssp.low:
            return True
        if gap >= self.dssp.high:
            return False
        allowed = self.allowed.get(worker)
        if allowed is None or allowed < i:
            allowed = self.allowed[worker] = i + self.further(worker, gap, progress)
        return i < allowed

    def further(self, worker: int, gap: int, progress: Progress) -> int:
        """Returns how many further iterations make the predicted wait for the slowest's next push shortest."""
        slowest, _ = progress.missing()
        pace = self.interval.get(worker, 0.0)
        if pace <= 0.0 or not slowest or not all(self.interval.get(other, 0.0) > 0.0 for other in slowest):
            return 0
        now = self.last[worker]
        best, shortest = 0, math.inf
        for r in range(self.dssp.high - gap + 1):
            wait = max(self.next_push(other, now + r * pace) for other in slowest) - (now + r * pace)
            if wait < shortest - 1e-12:
                best, shortest = r, wait
        return best

    def next_push(self, worker: int, after: float) -> float:
        """Predicts when this worker's first push at or after `after` comes."""
        steps = math.ceil((after - self.last[worker]) / self.interval[worker])
        return self.last[worker] + max(1, steps) * self.interval[worker]
