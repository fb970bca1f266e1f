"""Whether all wait for one worker, from what servers tell the driver twice a second anyway: a line says so, once.

It looks at who waits, not at why that one is slow, which would cost more than a run should pay for it: that is what
`paceline explain` does, from outside, when somebody asks.
"""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from paceline.runtime.live.protocol import wire

LOOKS = 24
"""So many looks, a dozen seconds, are judged together."""
LEAST_WAITED = 0.5
"""In so many of them the others, in the median, must have waited, and the one they wait for never."""


@dataclass(eq=False)
class WaitedFor:
    """Is told how the workers are, and says who is waited for all the time."""

    folder: Path | None
    say: Callable[[str], None]
    looks: deque[dict[int, bool]] = field(default_factory=lambda: deque(maxlen=LOOKS))
    """Whether each worker waited."""
    told: set[int] = field(default_factory=set)

    def look(self, status: Mapping[int, wire.WorkerStatus]) -> None:
        """Takes how the workers are now."""
        now = {rank: bool(seen.waits) for rank, seen in status.items()}
        if self.looks and self.looks[-1].keys() != now.keys():
            self.looks.clear()  # somebody came or went
        self.looks.append(now)
        if len(self.looks) < LOOKS or len(now) < 2:
            return
        waited = {rank: sum(look[rank] for look in self.looks) / LOOKS for rank in now}
        never = [rank for rank, share in waited.items() if not share]
        if len(never) != 1 or never[0] in self.told:
            return
        share = median(share for rank, share in waited.items() if rank != never[0])
        if share >= LEAST_WAITED:
            self.told.add(never[0])
            where = f": paceline explain {shlex.quote(str(self.folder))} tells why" if self.folder is not None else ""
            self.say(f"the others wait for worker {never[0]}, {share:.0%} of the time{where}")
