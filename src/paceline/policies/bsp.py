"""BSP: bulk synchronous parallel. Everybody waits for everybody, every iteration.

The rule. A worker that has pushed iteration i may read when iteration i is finished (i < V), and iteration V is
finished when every live worker has pushed it. The shard then takes one optimizer step on the mean of the iteration's
gradients. (FluentPS, Yao et al. 2019, Table III; Sync-Opt with no backups, Chen et al. 2016, Algorithms 3 and 4.)

What it promises. Exactly the training of one process on the joined batch, whatever the delays: no gradient
is stale, none is lost, and the result does not depend on who is fast.

What it gives up. Each iteration takes as long as its slowest worker. With n workers of which each is 6 times
slower with probability 1/n, two iterations in three are slow for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.core.policy import CentralPolicy


@dataclass(frozen=True)
class BSP(CentralPolicy):
    """Everybody waits for everybody, every iteration."""

    name: ClassVar[str] = "bsp"
    paper: ClassVar[str] = "Valiant 1990; Yao et al. 2019, Table III; Chen et al. 2016, Alg. 3-4 with b = 0"
    on_arrival: ClassVar[bool] = False
    in_step: ClassVar[bool] = True

    def may_pull(self, i: int, V: int) -> bool:
        return i < V

    def freed_at(self, i: int, V: int) -> int:
        return i + 1

    @property
    def bound(self) -> int:
        return 0
