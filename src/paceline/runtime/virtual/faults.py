"""The faults of a scenario, injected into a simulation: workers that crash, come, come back, pause and leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.cluster import Fault
from paceline.runtime.virtual.engine import FAULT, Engine


class FaultInjector:
    """Has faults happen at the times, and at the iterations, that the scenario names."""

    def __init__(self, engine: Engine, faults: Sequence[Fault], inject: Callable[[Fault], None]) -> None:
        self.engine = engine
        self.faults = faults
        self.inject = inject
        self.joins = sum(fault.kind == "join" for fault in faults)
        """How many workers are still to come, or to come back."""
        self.at_iteration = [fault for fault in faults if fault.at_iteration is not None]

    def schedule(self) -> None:
        """Schedules the faults that have a time."""
        for fault in self.faults:
            if fault.at_s is not None:
                self.engine.schedule(fault.at_s, FAULT, self.happen, fault)

    def inject_at_iteration(self, rank: int, iteration: int, when: float) -> None:
        """Injects faults that wait for an iteration when it, or one after it, is started: it may be skipped."""
        due = [f for f in self.at_iteration if f.worker == rank and iteration >= (f.at_iteration or 0)]
        for fault in due:
            self.at_iteration.remove(fault)
            self.engine.schedule(when, FAULT, self.happen, fault)

    def come_back(self, rank: int, after_s: float) -> None:
        """Has a worker that was lost join again."""
        self.joins += 1
        self.engine.schedule(self.engine.now + after_s, FAULT, self.happen, Fault("join", rank))

    def happen(self, fault: Fault) -> None:
        if fault.kind == "join":
            self.joins -= 1
        self.inject(fault)
