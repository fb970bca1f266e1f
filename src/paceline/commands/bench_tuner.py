"""`paceline bench tuner`: how long SpecSync's tuning of an epoch takes, beside the paper's form of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from paceline.api import check_count
from paceline.bench import tuner
from paceline.commands.options import File, Outputs
from paceline.commands.screen import console
from paceline.run import write_whole


@dataclass(kw_only=True)
class BenchTuner:
    """SpecSync's ABORT_TIME and ABORT_RATE for an epoch of many workers, beside Algorithm 1 as the paper has it.

    paceline bench tuner --workers 40 100 1000 --json tuner.json
    """

    workers: tuple[int, ...] = (40, 100, 1_000)
    """How many workers, one after the other."""
    rounds: int = 5
    """Interleaved rounds; medians are compared."""
    seed: int = 0
    """Of the workers' speeds."""
    json: File = None
    """Write the results as JSON to this file."""

    def main(self) -> int:
        Outputs(json=self.json).check()
        for name, value in (("rounds", self.rounds), *(("workers", count) for count in self.workers)):
            check_count(name, value)
        check_count("seed", self.seed, least=0)
        rows = tuner.run(list(self.workers), self.rounds, self.seed, lambda line: console.print(line, soft_wrap=True))
        title = f"ms an epoch, median of {self.rounds}"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0))
        for heading in ("workers", "pushes", "tuner", "paper's form", "ratio"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            slow = "-" if row.paper_form_ms is None else f"{row.paper_form_ms:.1f}"
            ratio = "-" if row.ratio is None else f"{row.ratio:.0f}x"
            table.add_row(str(row.workers), str(row.notices), f"{row.tune_ms:.2f}", slow, ratio)
        console.print(table)
        if self.json is not None:
            data = json.dumps({"rows": [asdict(row) for row in rows]}, indent=2)
            console.print(f"wrote {write_whole(Path(self.json), data.encode() + bytes([10]))}", soft_wrap=True)
        return 0
