"""What a reproduction is: a paper's experiment, done again in virtual time, and what came out beside the paper's.

One reproduction is one file. On top stands an essay: what the paper's figure shows, what is simulated here, how the
two differ. Below, a frozen dataclass whose fields are the sizes (so that tests can take small ones) and whose
`measure` gives `Findings`: rows, as measured, and claims, each with the paper's figure, ours, and whether the
direction is the same. A claim that does not come out is a finding like any other and says why.

Equal seeds give equal findings, to the byte: nothing in them depends on how fast the machine is. Only where the
paper's figure is the time a search takes (zipline-search) is that measured, in columns of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, ClassVar

import torch

Say = Callable[[str], None]
"""Takes one line for each step done."""
Row = dict[str, Any]
"""One line of a table: numbers and words by the name of their column."""


@dataclass(frozen=True)
class Claim:
    """One sentence of a paper, its figure, ours, and whether they go the same way."""

    claim: str
    paper: str
    ours: str
    holds: bool
    remark: str = ""
    """Why it does not hold, or where it stops to hold."""

    @property
    def verdict(self) -> str:
        if self.holds:
            return f"the same direction ({self.remark})" if self.remark else "the same direction"
        return f"not reproduced: {self.remark}" if self.remark else "not reproduced"


@dataclass
class Findings:
    """What a reproduction has measured."""

    rows: list[Row] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)

    def tables(self) -> list[list[Row]]:
        """Returns the rows, those with the same columns together."""
        return [list(rows) for _, rows in groupby(self.rows, key=list)]

    def data(self, name: str, seed: int) -> dict[str, Any]:
        """Returns what is written to a JSON file."""
        return {"name": name, "seed": seed, "rows": self.rows, "claims": [asdict(claim) for claim in self.claims]}


@dataclass(frozen=True)
class Reproduction(ABC):
    """The base of reproductions. The docstring of a subclass is its line in the catalogue."""

    name: ClassVar[str]
    paper: ClassVar[str]
    """The paper, with its figures or tables."""
    device: str = field(default="cpu", kw_only=True)
    """Where gradients are computed."""

    def __init_subclass__(cls, name: str, paper: str) -> None:
        cls.name, cls.paper = name, paper

    @property
    @abstractmethod
    def steps(self) -> int:
        """How many lines `measure` reports, for the progress bar."""

    @abstractmethod
    def measure(self, seed: int, say: Say) -> Findings:
        """Does the experiment."""

    def run(self, seed: int, say: Say) -> Findings:
        """Measures with one thread of torch: sums then come out alike on any number of cores, and small ones sooner."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self.measure(seed, say)
        finally:
            torch.set_num_threads(threads)
