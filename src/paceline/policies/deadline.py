"""Deadline: an iteration ends with those who pushed in time, and what is in time is learned.

The rule. The shard keeps how long after the start of their iteration recent gradients arrived, late ones too.
The time an iteration is given is `factor` times the `quantile` of those. When it is over, iteration V is finished
as soon as at least `least` (a share of the workers configured) of its gradients are there; when all are there it
is finished anyway. One step on the mean. What comes later is dropped, and its worker adopts the shard's
iteration, as under Backup. Until as many gradients as there are workers have been seen, everybody is waited for.
(Revisiting Distributed Synchronous SGD, Chen et al. 2016, names dynamic timeouts as future work, section 5.)

What it promises. No stale gradient ever, like Backup; and unlike Backup it drops nobody when nobody is slow, and
as many as are slow when several are. An iteration takes at most `factor` times the quantile, or what it takes for
`least` to arrive.

What it gives up. The gradients of those who are slower than that, always: a worker that is slow for good
contributes nothing. The time is learned, so the batch varies from step to step.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import ClassVar

from paceline.core.messages import Handle, Members
from paceline.core.policy import CentralPolicy
from paceline.core.progress import Progress, name_workers
from paceline.core.pull_gate import PullGate
from paceline.core.spec import parameter

REMEMBERED = 64
"""The start of so many iterations is remembered: gradients of older ones are not learned from."""
ROUNDS = 4
"""The time is learned from the last so many gradients of each worker."""


@dataclass(frozen=True)
class Deadline(CentralPolicy):
    """An iteration ends with those who pushed within a time learned from recent arrivals."""

    name: ClassVar[str] = "deadline"
    paper: ClassVar[str] = "Chen et al. 2016, section 5 (dynamic timeouts)"
    on_arrival: ClassVar[bool] = False

    quantile: float = parameter(0.5, low=0, high=1, doc="of the recent arrival times that the deadline is made of")
    factor: float = parameter(2.0, low=0, doc="how many times that quantile an iteration is given")
    least: float = parameter(0.5, low=0, high=1, doc="share of the workers without whose gradients none is finished")

    def may_pull(self, i: int, V: int) -> bool:
        return i < V

    def freed_at(self, i: int, V: int) -> int:
        return i + 1

    def finishes_overtime(self, there: int, expected: int, workers: int) -> bool:
        return there >= min(max(1, math.ceil(self.least * workers)), expected)

    def why(self, i: int, progress: Progress) -> str:
        return f"iteration {progress.V} is within its time, {name_workers(*progress.missing())} not there"

    def gate(self, rank: int, members: Members, seed: int) -> PullGate:
        return DeadlineGate(self, members.workers)


class DeadlineGate(PullGate):
    def __init__(self, policy: Deadline, workers: int) -> None:
        super().__init__(policy)
        self.deadline = policy
        self.workers = workers
        self.began: dict[int, float] = {}
        """recent iteration -> when it began on this shard."""
        self.took: deque[float] = deque(maxlen=ROUNDS * workers)
        """How long after the start of their iteration recent gradients arrived."""

    def note_push(self, handle: Handle, at: float, significance: float | None) -> None:
        began = self.began.get(handle.iteration)
        if began is not None:
            self.took.append(at - began)

    def note_rise(self, V: int, at: float) -> float | None:
        self.began[V] = at
        self.began.pop(V - REMEMBERED, None)
        if len(self.took) < self.workers:
            return None
        ordered = sorted(self.took)
        return self.deadline.factor * ordered[math.ceil(self.deadline.quantile * (len(ordered) - 1))]
