"""How many samples each virtual worker takes in a step: all alike, each its own number, or balanced by speed.

Balanced, a worker asks the machine as a live one does: for the sizes of a round, one round ahead, telling how long its
latest steps took (`core/control/batch_balance.py`). Asking takes no time, as live it is done before it is needed.
"""

from __future__ import annotations

from collections import deque
from itertools import count

from paceline.core.control.batch_balance import BatchBalance, BatchRequested, StepTime
from paceline.core.events import ViewChanged
from paceline.core.messages import View
from paceline.core.policy import Policy
from paceline.runtime.balance import check_balance
from paceline.runtime.virtual.backend import Process
from paceline.sample_order import Batch, BatchSizes


class BalancedBatches:
    """One worker's sizes: those of its round, with those of the next in reserve."""

    def __init__(self, machine: BatchBalance, sizes: BatchSizes, process: Process, now: float) -> None:
        self.machine = machine
        self.sizes = sizes
        self.process = process
        self.tickets = count()
        self.steps: list[StepTime] = []
        self.coming: deque[int] = deque()
        """The sizes of the next steps."""
        self.reserve = self.ask(now)

    def ask(self, now: float) -> list[int]:
        batch, _, least, most = self.sizes
        asked = BatchRequested(now, *self.process, next(self.tickets), batch, least, most, tuple(self.steps))
        self.steps.clear()
        (answer,) = self.machine.handle(asked)
        return [answer.samples] * answer.steps

    def next(self, now: float) -> int:
        if not self.coming:
            self.coming.extend(self.reserve)
            self.reserve = self.ask(now)
        return self.coming.popleft()


class Batches:
    """The batches of all workers of a simulation."""

    def __init__(self, batch: Batch | BatchSizes, policy: Policy, checked: bool) -> None:
        self.each: dict[Process, BalancedBatches] = {}
        self.sizes = batch if isinstance(batch, BatchSizes) else None
        self.machine: BatchBalance | None = None
        if isinstance(batch, BatchSizes):
            check_balance(policy)
            self.machine = BatchBalance(batch.batch)
            self.machine.checks = checked
            self.fixed: tuple[int, ...] = (batch.batch,)
        else:
            self.fixed = (batch,) if isinstance(batch, int) else batch
        self.mean = sum(self.fixed) / len(self.fixed)
        self.are_equal = self.machine is None and len(set(self.fixed)) == 1

    def announce(self, at: float, view: View) -> None:
        if self.machine is not None:
            self.machine.handle(ViewChanged(at, view))

    def next(self, process: Process, now: float) -> int:
        """Returns the samples of the step that a worker begins now."""
        if self.machine is None or self.sizes is None:
            return self.fixed[process[0] % len(self.fixed)]
        if process not in self.each:
            self.each[process] = BalancedBatches(self.machine, self.sizes, process, now)
        return self.each[process].next(now)

    def note(self, process: Process, samples: int, seconds: float) -> None:
        """A worker has computed for so long on so many samples."""
        if process in self.each:
            self.each[process].steps.append((samples, seconds))
