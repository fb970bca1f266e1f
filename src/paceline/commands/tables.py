"""What the commands that measure print and write: a table, and the same rows as JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from paceline.commands.terminal import console, print_plain
from paceline.run import write_whole

DASH = "-"
"""In the place of a number that there is not."""


def print_table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    text: Collection[str] = (),
    bold: bool = False,
    missing: str = "",
) -> None:
    """Print a table. The columns named in `text` are set to the left, numbers to the right.

    If a cell is a dash, a line below says what is `missing`.
    """
    rows = list(rows)
    style = "bold" if bold else "table.title"
    table = Table(title=title, title_justify="left", title_style=style, box=SIMPLE_HEAD, padding=(0, 0))
    for heading in headings:
        table.add_column(heading, justify="left" if heading in text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    explain_dashes(rows, missing)


def explain_dashes(rows: Iterable[Iterable[str]], missing: str) -> None:
    """Say below a table what its dashes mean, if it has one."""
    if missing and any(cell == DASH for row in rows for cell in row):
        print_plain(f"{DASH}: {missing}")


def write_json(file: str | None, data: Any) -> None:
    """Write `data`, dataclasses in it as objects, to the file of `--json` if one was named, and say so."""
    if file is not None:
        text = json.dumps(data, indent=2, allow_nan=False, default=asdict) + "\n"
        print_plain(f"wrote {write_whole(Path(file), text.encode())}")


def dash(value: float | None, form: str, unit: str = "") -> str:
    """A number as `form` says, or a dash if there is none."""
    return DASH if value is None else f"{value:{form}}{unit}"
