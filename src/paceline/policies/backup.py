"""Backup workers: an iteration ends with the first N - b gradients; the last b are dropped.

The rule. Iteration V is finished when N - `extra` gradients of it are there, N being the number of workers
configured (or all that can still come, if workers are lost or have skipped it). The shard takes one step on
the mean of those gradients. A gradient of a finished iteration is dropped when it arrives, and its worker
adopts the shard's iteration: its pull is answered at once, for V, or it would stay late for ever. (Sync-Opt
with backup workers, Chen et al. 2016, Algorithms 3 and 4; "drop stragglers" in FluentPS, Yao et al. 2019, Table III.)

What it promises. No stale gradient ever: each one applied was computed on the parameters of its own iteration.
An iteration takes as long as its (N - b)-th fastest worker.

What it gives up. The work of the b slowest in each iteration, always, also when nobody is slow; the batch is
smaller by b/N. A worker that is slow for good contributes nothing. Shards may take different workers in one
iteration; that is allowed, and the worker is told the share that was dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.core.messages import Members
from paceline.core.policy import CentralPolicy
from paceline.core.progress import Progress, name_workers
from paceline.core.spec import parameter
from paceline.errors import ConfigError


@dataclass(frozen=True)
class Backup(CentralPolicy):
    """An iteration ends with the first N - extra gradients; the others are dropped."""

    name: ClassVar[str] = "backup"
    paper: ClassVar[str] = "Chen et al. 2016, Alg. 3-4; Yao et al. 2019, Table III (drop stragglers)"
    on_arrival: ClassVar[bool] = False

    extra: int = parameter(1, low=0, doc="backup workers: how many of the N gradients an iteration does without")

    def may_pull(self, i: int, V: int) -> bool:
        return i < V

    def freed_at(self, i: int, V: int) -> int:
        return i + 1

    def finishes(self, there: int, expected: int, workers: int) -> bool:
        return there >= min(workers - self.extra, expected)

    def why(self, i: int, progress: Progress) -> str:
        return f"iteration {progress.V} has too few gradients: {name_workers(*progress.missing())} not there"

    def validate(self, members: Members) -> None:
        if self.extra >= members.workers:
            raise ConfigError(
                f"backup:extra={self.extra} needs more than {self.extra} workers: "
                f"with {members.workers}, extra may be from 0 to {members.workers - 1}"
            )
