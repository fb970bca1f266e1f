"""`paceline reproduce NAME`: a paper's experiment done again, the paper's figures beside ours."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Annotated

import tyro
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from paceline.api import check_count
from paceline.commands.options import File, Flag, Outputs
from paceline.commands.tables import DASH, explain_dashes, write_json
from paceline.commands.terminal import console
from paceline.errors import ConfigError
from paceline.reproductions import CATALOGUE, find
from paceline.reproductions.base import Claim, Reproduction, Row, Say
from paceline.tensors.devices import check_device


@dataclass(kw_only=True)
class Reproduce:
    """Do a paper's experiment again, small and in virtual time, and print the paper's figures beside ours.

    paceline reproduce backup-choice --json choice.json

    Models are small and the clock is simulated, so compare directions and ratios, not seconds. What does not come out
    is reported so. Each takes a minute or two; docs/reproductions.md has what they gave.
    """

    name: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME", help=f"One of: {', '.join(CATALOGUE)}.")
    ] = ""
    list: Flag = False
    """List the names, with paper and claim, and stop."""
    json: File = None
    """Write rows and claims as JSON to this file."""
    seed: int = 0
    """Equal seeds give equal results, to the byte."""
    device: str = "cpu"
    """Where gradients are computed: cpu, cuda, cuda:1 (docs/virtual-gpu.md)."""

    def main(self) -> int:
        if self.list:
            for name, kind in CATALOGUE.items():
                console.print(
                    Text.assemble((name, "bold"), f"  {kind.__doc__} ", (f"({kind.paper})", "dim")), soft_wrap=True
                )
            return 0
        if not self.name:
            raise ConfigError(f"name what to reproduce (known: {', '.join(CATALOGUE)}; --list tells about them)")
        reproduction = find(self.name, str(check_device(self.device)))
        check_count("seed", self.seed, least=0)
        Outputs(json=self.json).check()
        about = f"  {reproduction.__doc__} ({reproduction.paper})"
        console.print(Text.assemble((self.name, "bold"), about), soft_wrap=True)
        with StepProgress(reproduction) as say:
            findings = reproduction.run(self.seed, say)
        for rows in findings.tables():
            console.print(table_of(rows))
            cells = (map(written, row.values()) for row in rows)
            explain_dashes(cells, "not reached, or there is nothing to measure or to compare with")
        for claim in findings.claims:
            print_claim(claim)
        write_json(self.json, findings.data(self.name, self.seed))
        return 0


def table_of(rows: list[Row]) -> Table:
    """Makes a table of rows with the same columns. Numbers are on the right; what is missing is a dash."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 0), pad_edge=False)
    for name, value in rows[0].items():
        table.add_column(name.replace("_", " "), justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*map(written, row.values()))
    return table


def written(value: object) -> str:
    if value is None:
        return DASH
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_claim(claim: Claim) -> None:
    console.print(Text(claim.claim, style="bold"), soft_wrap=True)
    for label, text in (("paper", claim.paper), ("ours", claim.ours), ("verdict", claim.verdict)):
        console.print(f"    {label + ':':9}{text}", soft_wrap=True, markup=False)


class StepProgress:
    """Shows how far a reproduction is: a bar in a terminal, a line a step without one."""

    def __init__(self, reproduction: Reproduction) -> None:
        self.progress = Progress(
            TextColumn(reproduction.name),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("starting", total=reproduction.steps)

    def __enter__(self) -> Say:
        self.progress.start()
        return self.say

    def say(self, line: str) -> None:
        if console.is_terminal:
            self.progress.update(self.task, advance=1, description=line)
        else:
            console.print(line, soft_wrap=True, markup=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
