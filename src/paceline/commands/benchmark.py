"""What all benchmarks share: options are checked, rows measured, printed as a table and written as JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from string import Formatter
from typing import Any, ClassVar

from paceline.api import check_count
from paceline.commands.options import File, check_file
from paceline.commands.tables import print_table, write_json


@dataclass(kw_only=True)
class Benchmark(ABC):
    """One command of `paceline bench`. Its options that are whole numbers are counts."""

    LEAST: ClassVar[Mapping[str, int]] = {"seed": 0}
    """The smallest values of those that need not be 1 or more."""

    json: File = None
    """Write the results as JSON to this file."""

    def main(self) -> int:
        check_file("--json", self.json)
        for name in (field.name for field in fields(self)):
            given = getattr(self, name)
            for value in given if isinstance(given, tuple) else (given,):
                if isinstance(value, int) and not isinstance(value, bool):
                    check_count(name.replace("_", "-"), value, self.LEAST.get(name, 1))
        write_json(self.json, self.measure())
        return 0

    @abstractmethod
    def measure(self) -> dict[str, Any]:
        """Measures, prints, and returns what is written."""


def print_rows(
    title: str, columns: Mapping[str, str], rows: Iterable[object], text: Collection[str] = (), missing: str = ""
) -> None:
    """Prints a table of objects: heading -> how a row is written there, as in `{0.ratio:.1f}x`; None is a dash, and a
    line below says what is `missing`."""
    cells = [[written(form, row) for form in columns.values()] for row in rows]
    print_table(title, list(columns), cells, text, missing=missing)


def written(form: str, row: object) -> str:
    names = [name.partition(".")[2] for _, name, _, _ in Formatter().parse(form) if name]
    return "-" if any(getattr(row, name) is None for name in names) else form.format(row)
