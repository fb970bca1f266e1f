"""`paceline bench zipline`: how long a plan takes, beside the paper's fastest search, compiled."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from paceline.api import check_count
from paceline.bench import zipline
from paceline.commands.options import File, Outputs
from paceline.commands.screen import console
from paceline.run import write_whole


def _say(line: str) -> None:
    console.print(line, soft_wrap=True, markup=False)


@dataclass(kw_only=True)
class BenchZipline:
    """The plan of ElasticBSP's next barrier for many workers, beside ZipLineOptBS compiled from C++.

    paceline bench zipline --workers 1000 10000 --iterations 150 --json zipline.json
    """

    workers: tuple[int, ...] = (1_000, 10_000)
    """How many workers, one after the other."""
    iterations: int = 150
    """How many iterations of each are predicted: the paper's R."""
    rounds: int = 9
    """Interleaved rounds; medians are compared."""
    seed: int = 0
    """Of the workers' speeds."""
    json: File = None
    """Write the results as JSON to this file."""

    def main(self) -> int:
        Outputs(json=self.json).check()
        sizes = (("workers", count) for count in self.workers)
        for name, value in (("iterations", self.iterations), ("rounds", self.rounds), *sizes):
            check_count(name, value)
        check_count("seed", self.seed, least=0)
        rows = zipline.run(list(self.workers), self.iterations, self.rounds, self.seed, _say)
        table = Table(
            title=f"ms a plan, median of {self.rounds}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 0)
        )
        for heading in ("workers", "iterations", "plan", "ZipLineOptBS in C++", "ratio", "the paper's"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(
                str(row.workers), str(row.iterations), f"{row.plan_ms:.2f}", _number(row.opt_bs_ms, ".1f"),
                _number(row.ratio, ".1f", "x"), _number(row.paper_opt_bs_ms, "g"),
            )  # fmt: skip
        console.print(table)
        if self.json is not None:
            data = json.dumps({"rows": [asdict(row) for row in rows]}, indent=2)
            _say(f"wrote {write_whole(Path(self.json), data.encode() + bytes([10]))}")
        return 0


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
