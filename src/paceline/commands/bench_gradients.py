"""`paceline bench gradients`: virtual workers' gradients computed together, beside the plain loop."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from paceline.api import check_count
from paceline.bench import gradients
from paceline.commands.options import File, Outputs
from paceline.commands.screen import console
from paceline.run import write_whole


def _say(line: str) -> None:
    console.print(line, soft_wrap=True)


@dataclass(kw_only=True)
class BenchGradients:
    """Gradients of many virtual workers, computed in one go and one by one: what batching saves the simulator.

    paceline bench gradients --workload digits-mlp digits-cnn --workers 100 --json gradients.json
    """

    workload: tuple[str, ...] = ("digits-mlp", "digits-cnn", "svm")
    """Which workloads."""
    workers: int = 100
    """Gradients computed together."""
    rounds: int = 15
    """Interleaved rounds; the fastest of each counts."""
    json: File = None
    """Write the results as JSON to this file."""

    def main(self) -> int:
        Outputs(json=self.json).check()
        check_count("workers", self.workers)
        check_count("rounds", self.rounds)
        rows = gradients.run(list(self.workload), self.workers, self.rounds, _say)
        table = Table(
            title=f"us per gradient, {self.workers} workers, {rows[0].threads} threads",
            title_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 0),
        )
        for heading in ("workload", "batched", "one by one", "ratio"):
            table.add_column(heading, justify="left" if heading == "workload" else "right", no_wrap=True)
        for row in rows:
            table.add_row(row.workload, f"{row.batched_us:.0f}", f"{row.loop_us:.0f}", f"{row.ratio:.1f}x")
        console.print(table)
        if self.json is not None:
            data = json.dumps({"rows": [asdict(row) for row in rows]}, indent=2)
            _say(f"wrote {write_whole(Path(self.json), data.encode() + bytes([10]))}")
        return 0
