"""`paceline bench`: exchange and straggler, beside what you would pick instead; safety, what it costs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table

from paceline.api import check_count
from paceline.bench import exchange, safety, straggler, tcp_exchange
from paceline.commands.options import File, Outputs
from paceline.commands.screen import console
from paceline.errors import ConfigError
from paceline.run import write_whole
from paceline.tensors import passes


def _say(line: str) -> None:
    console.print(line, soft_wrap=True)


@dataclass(kw_only=True)
class BenchExchange:
    """Push a gradient, get parameters back: paceline, DDP over Gloo, torch RPC, and Ray if it is installed.

    paceline bench exchange --params 100000 1000000 10000000 --json exchange.json
    paceline bench exchange --transport tcp     # as between hosts: torch RPC and Ray held to TCP too
    """

    params: tuple[int, ...] = (100_000, 1_000_000, 10_000_000)
    """Sizes of the model, in float32."""
    workers: int = 4
    """How many workers push."""
    rounds: int = 5
    """Interleaved rounds; the median counts."""
    transport: Literal["shm", "tcp"] = "shm"
    """Through shared memory, or over TCP on the loopback: as floats are, with keys (CURVE), and as bfloat16."""
    json: File = None
    """Write the results as JSON to this file."""

    def main(self) -> int:
        Outputs(json=self.json).check()
        for name, value in (("workers", self.workers), ("rounds", self.rounds), *(("params", p) for p in self.params)):
            check_count(name, value)
        over = exchange if self.transport == "shm" else tcp_exchange
        rows = over.run(list(self.params), self.workers, self.rounds, _say)
        console.print(self._table(rows))
        for line in (*tcp_exchange.cost_of_keys(rows), *exchange.without_a_lock(rows)):
            _say(line)
        if not passes.are_compiled():
            _say(passes.NOT_COMPILED)
        if self.json is not None:
            data = json.dumps({"rows": [asdict(row) for row in rows]}, indent=2)
            _say(f"wrote {write_whole(Path(self.json), data.encode() + bytes([10]))}")
        return 0

    def _table(self, rows: list[exchange.Row]) -> Table:
        title = f"exchange, {self.workers} workers, 1 server, {self.transport}"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0))
        over_tcp = self.transport == "tcp"
        ends = ("wire", "keys") if over_tcp else ("unit", "memory")
        for heading in ("mode", "params", "paceline", "floor", "peers", "ratio", *ends):
            text = heading in ("mode", "peers", "unit", "wire")
            table.add_column(heading, justify="left" if text else "right", no_wrap=True)
        for row in rows:
            others = ", ".join(f"{name} {_figure(value)}" for name, value in row.peers.items())
            last = (row.wire, "yes" if row.keys else "no") if over_tcp else (row.unit, f"{row.shared_floats:.1f} P")
            figures = (_figure(row.paceline), _figure(row.floor), others, f"{row.ratio:.2f}x")
            table.add_row(row.mode, f"{row.params:.0e}", *figures, *last)
        return table


def _figure(value: float) -> str:
    """Three digits, and whole numbers as they are."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


@dataclass(kw_only=True)
class BenchStraggler:
    """Time to an accuracy under stragglers: paceline's policies, DDP and periodic model averaging over Gloo.

    paceline bench straggler --workers 8 --json straggler.json
    """

    workers: int = 8
    """How many workers train."""
    cluster: str = "random-slowdown:factor=6,compute_s=0.02"
    """Who is slow, and when; the same for all."""
    target: str = "accuracy=0.95"
    """What to reach."""
    lr: float = 0.1
    """The learning rate of all."""
    rounds: int = 3
    """Rounds with different seeds; the median counts."""
    seed: int = 0
    """Of the first round."""
    json: File = None
    """Write the results as JSON to this file."""

    def main(self) -> int:
        Outputs(json=self.json).check()
        check_count("workers", self.workers)
        check_count("rounds", self.rounds)
        setting = straggler.Setting(self.workers, self.cluster, self.target, self.lr, self.seed)
        rows, ratio = straggler.run(setting, self.rounds, _say)
        table = Table(
            title=f"time to {self.target}, {self.workers} workers",
            title_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 0),
        )
        for heading in ("name", "time to target", "iterations"):
            table.add_column(heading, justify="left" if heading == "name" else "right", no_wrap=True)
        for row in rows:
            took = "missed" if row.time_to_target_s is None else f"{row.time_to_target_s:.1f} s"
            table.add_row(row.name, took, f"{row.iterations:g}")
        console.print(table)
        for peer, value in ratio.items():
            if value is not None:
                _say(f"the best policy is {value:.2f}x sooner than {peer}")
        if self.json is not None:
            data = json.dumps({"rows": [asdict(row) for row in rows], "ratio": ratio}, indent=2)
            _say(f"wrote {write_whole(Path(self.json), data.encode() + bytes([10]))}")
        return 0


@dataclass(kw_only=True)
class BenchSafety:
    """What acknowledgements, deduplication, finite checks and the trace cost in a run without faults.

    paceline bench safety --params 1000000 --iteration-ms 20
    """

    params: int = 1_000_000
    """Size of the model, in float32."""
    iteration_ms: float = 20.0
    """How long a worker computes."""
    iterations: int = 200
    """Of each of 4 workers."""
    json: File = None
    """Write the results as JSON to this file."""

    def main(self) -> int:
        Outputs(json=self.json).check()
        check_count("params", self.params)
        check_count("iterations", self.iterations)
        if not 0 < self.iteration_ms < float("inf"):
            raise ConfigError(f"iteration-ms={self.iteration_ms:g} is out of range: more than 0")
        rows = safety.run(self.params, self.iteration_ms / 1000, self.iterations)
        title = f"CPU time a push, {self.params:,} parameters, {self.iteration_ms:g} ms of computing"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0))
        for heading in ("part", "worker", "server", "of the iteration"):
            table.add_column(heading, justify="left" if heading == "part" else "right", no_wrap=True)
        for row in rows:
            table.add_row(row.part, f"{row.worker_us:.0f} us", f"{row.server_us:.0f} us", f"{row.share:.2%}")
        console.print(table)
        if self.json is not None:
            data = json.dumps({"rows": [asdict(row) for row in rows]}, indent=2)
            _say(f"wrote {write_whole(Path(self.json), data.encode() + bytes([10]))}")
        return 0
