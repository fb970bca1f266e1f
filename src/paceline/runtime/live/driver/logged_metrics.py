"""What workers log, as the driver has it: the run's history, and whether its target is reached.

What a worker says is checked again here: it may run on another host, and what it says ends up in tables and pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.metric_names import is_name
from paceline.run import TARGET, Point, Target
from paceline.runtime.live.protocol import wire

MOST_NAMES = 200
"""Of different metrics in one run; what has other names is left out."""


@dataclass(eq=False)
class LoggedMetrics:
    """Takes what is logged into the run's history. `watch` gets each of its points."""

    target: Target | None
    watch: Callable[[Point], None] | None
    stop: Callable[[str, str], None]
    """Ends the run, for this reason and in this way."""
    say: Callable[[str], None]
    history: list[Point] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    left_out: bool = False
    reached_s: float | None = None
    """When the target was reached."""

    def take(self, log: wire.Log) -> None:
        """A worker has logged something."""
        values = {name: value for name, value in log.values.items() if self._is_taken(name)}
        if len(values) < len(log.values) and not self.left_out:
            self.left_out = True
            said = f"worker {log.rank} logs metrics under names that cannot be taken"
            self.say(f"WARNING: {said}, or under more than {MOST_NAMES}: these are left out")
        if not values or not math.isfinite(log.at):
            return
        point = Point(log.at, log.updates, values)
        self.history.append(point)
        if self.watch is not None:
            self.watch(point)
        target = self.target
        if target is not None and self.reached_s is None and target.reached(point):
            self.reached_s = log.at
            self.stop(f"reached {target}", TARGET)

    def _is_taken(self, name: str) -> bool:
        if name not in self.names and is_name(name) and len(self.names) < MOST_NAMES:
            self.names.add(name)
        return name in self.names
