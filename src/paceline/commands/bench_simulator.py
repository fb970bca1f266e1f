"""`paceline bench simulator`: how fast the virtual runtime is, from a few workers to 10 000."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from paceline.api import check_count
from paceline.bench import simulator
from paceline.commands.options import File, Outputs
from paceline.commands.screen import console
from paceline.run import write_whole


@dataclass(kw_only=True)
class BenchSimulator:
    """Events that the virtual runtime handles in a second of one core, timing only: ASP, SSP, SSP with one slow worker.

    paceline bench simulator --workers 10 100 1000 10000 --json simulator.json
    """

    workers: tuple[int, ...] = (10, 100, 1_000, 10_000)
    """How many workers, one after the other."""
    rounds: int = 3
    """Rounds of each; the best counts."""
    json: File = None
    """Write the results as JSON to this file."""

    def main(self) -> int:
        Outputs(json=self.json).check()
        for name, value in (("rounds", self.rounds), *(("workers", count) for count in self.workers)):
            check_count(name, value)
        rows = simulator.run(list(self.workers), self.rounds, lambda line: console.print(line, soft_wrap=True))
        table = Table(title="virtual runtime, timing only", title_justify="left", box=SIMPLE_HEAD, padding=(0, 0))
        for heading in ("policy", "cluster", "workers", "us/event", "events/s", "checked", "memory"):
            left = heading in ("policy", "cluster")
            table.add_column(heading, justify="left" if left else "right", no_wrap=True)
        for row in rows:
            table.add_row(
                row.policy, row.cluster, str(row.workers), f"{row.us_per_event:.2f}", f"{row.events_per_s:,.0f}",
                f"{row.checked_events_per_s:,.0f}", f"{row.peak_mb:.0f} MB",
            )  # fmt: skip
        console.print(table)
        if self.json is not None:
            data = json.dumps({"rows": [asdict(row) for row in rows]}, indent=2)
            console.print(f"wrote {write_whole(Path(self.json), data.encode() + bytes([10]))}", soft_wrap=True)
        return 0
