"""`paceline bench peers`: parameters exchanged between neighbours, beside a ring over Gloo."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from paceline.api import check_count
from paceline.bench import peer_exchange
from paceline.commands.options import File, Outputs
from paceline.commands.screen import console
from paceline.run import write_whole


def _say(line: str) -> None:
    console.print(line, soft_wrap=True, markup=False)


@dataclass(kw_only=True)
class BenchPeers:
    """Send parameters to two neighbours, average theirs in: paceline's peers, and a send/recv ring over Gloo.

    paceline bench peers --params 1000000 --json peers.json
    """

    params: tuple[int, ...] = (1_000_000,)
    """Sizes of the model, in float32."""
    peers: int = 4
    """How many peers are in the ring."""
    max_gap: int = 2
    """How far ahead of a neighbour a peer may be: what memory is allowed depends on it."""
    rounds: int = 5
    """Interleaved rounds; the median counts."""
    json: File = None
    """Write the results as JSON to this file."""

    def main(self) -> int:
        Outputs(json=self.json).check()
        check_count("peers", self.peers, least=3)
        for name, value in (("max-gap", self.max_gap), ("rounds", self.rounds), *(("params", p) for p in self.params)):
            check_count(name, value)
        rows = peer_exchange.run(list(self.params), self.peers, self.max_gap, self.rounds, _say)
        title = f"exchange with two neighbours and average, {self.peers} peers in a ring"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0))
        for heading in ("params", "paceline", "Gloo", "ratio", "of CPU", "Gloo's", "ratio", "memory", "allowed"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(
                f"{row.params:.0e}", f"{row.paceline_ms:.3g} ms", f"{row.gloo_ms:.3g} ms", f"{row.ratio:.2f}x",
                f"{row.paceline_cpu_ms:.3g} ms", f"{row.gloo_cpu_ms:.3g} ms", f"{row.cpu_ratio:.2f}x",
                f"{row.memory_floats:.1f} P", f"{row.allowed_floats} P",
            )  # fmt: skip
        console.print(table)
        if self.json is not None:
            data = json.dumps({"rows": [asdict(row) for row in rows]}, indent=2)
            _say(f"wrote {write_whole(Path(self.json), data.encode() + bytes([10]))}")
        return 0
