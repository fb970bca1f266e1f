"""ASP: asynchronous parallel. Nobody waits for anybody.

The rule. Every pull is answered at once, every gradient is applied when it arrives, with lr/N a push, so that a given
learning rate means the same as under BSP; with `scale=none` it takes the whole lr, as in the papers. N counts the
workers that have finished too. (Async-Opt, Chen et al. 2016, Algorithms 1 and 2; FluentPS, Yao et al. 2019, Table III:
i < V + infinity.) V is still counted, as the progress of the slowest: a worker that joins starts there.

What it promises. Each worker goes at its own pace; throughput is the sum of everybody's speed.

What it gives up. A gradient is computed on parameters that others have changed since: with N equal workers N - 1
updates lie between a read and its push, and one slow worker's gradients are staler without bound. Large learning rates
that BSP takes well diverge here (Chen et al. 2016, section 2.1). With `staleness_weighted` a step is divided by 1 + its
staleness: the slow do less harm, and less good.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.core.policy import CentralPolicy, scale_option, staleness_weighted_option


@dataclass(frozen=True)
class ASP(CentralPolicy):
    """Nobody waits for anybody."""

    name: ClassVar[str] = "asp"
    paper: ClassVar[str] = "Chen et al. 2016, Alg. 1-2 (Async-Opt); Yao et al. 2019, Table III"
    balances: ClassVar[bool] = False
    on_arrival: ClassVar[bool] = True

    scale: str = scale_option()
    staleness_weighted: bool = staleness_weighted_option()

    def may_pull(self, i: int, V: int) -> bool:
        return True

    def freed_at(self, i: int, V: int) -> int:
        raise AssertionError("ASP never parks a pull")
