"""`paceline bench`, live: exchange, straggler and peers beside what you would pick instead; safety, what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from paceline.bench import exchange, peer_exchange, safety, start, straggler, tcp_exchange, thin
from paceline.commands.benchmark import Benchmark, print_rows
from paceline.commands.run import check_script
from paceline.commands.tables import print_table
from paceline.commands.terminal import print_plain
from paceline.errors import ConfigError
from paceline.tensors import fused_kernels, wire_precision


@dataclass(kw_only=True)
class BenchExchange(Benchmark):
    """Push a gradient, get parameters back: paceline, DDP over Gloo, torch RPC, and Ray if it is installed.

    paceline bench exchange --params 100000 1000000 10000000 --json exchange.json
    paceline bench exchange --optimizer adamw
    paceline bench exchange --transport tcp     # as between hosts: torch RPC and Ray held to TCP too
    """

    params: tuple[int, ...] = (100_000, 1_000_000, 10_000_000)
    """Sizes of the model, in float32."""
    workers: int = 4
    """How many workers push."""
    rounds: int = 5
    """Interleaved rounds; the median counts."""
    optimizer: Literal["sgd", "momentum", "adamw"] = "sgd"
    """What steps the parameters, everywhere; torch's fused implementation where torch steps them."""
    transport: Literal["shm", "tcp"] = "shm"
    """Through shared memory, or over TCP on the loopback: as floats are, with keys (encrypted), and as bfloat16."""

    def measure(self) -> dict[str, Any]:
        over = exchange if self.transport == "shm" else tcp_exchange
        rows = over.run(list(self.params), self.workers, self.rounds, self.optimizer, print_plain)
        ends = ("unit", "memory") if self.transport == "shm" else ("wire", "keys")
        print_table(
            f"exchange, {self.optimizer}, {self.workers} workers, 1 server, {self.transport}",
            ("mode", "params", "paceline", "floor", "peers", "ratio", *ends),
            [self._cells(row) for row in rows],
            text=("mode", "peers", "unit", "wire"),
        )
        for line in (*tcp_exchange.cost_of_keys(rows), *exchange.without_a_lock(rows)):
            print_plain(line)
        if not fused_kernels.are_compiled():
            print_plain(fused_kernels.NOT_COMPILED)
        return {"rows": rows}

    def _cells(self, row: exchange.Row) -> tuple[str, ...]:
        others = ", ".join(f"{name} {_figure(value)}" for name, value in row.peers.items())
        figures = (_figure(row.paceline), _figure(row.floor), others, f"{row.ratio:.2f}x")
        if row.shared_floats is None:
            ends = (row.wire, "yes" if row.keys else "no")
        else:
            ends = (row.unit, f"{row.shared_floats:.1f} P")
        return (row.mode, f"{row.params:.0e}", *figures, *ends)


def _figure(value: float) -> str:
    """Writes three digits, and whole numbers as they are."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


@dataclass(kw_only=True)
class BenchStraggler(Benchmark):
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
    """The seed of the first round."""

    def measure(self) -> dict[str, Any]:
        setting = straggler.Setting(self.workers, self.cluster, self.target, self.lr, self.seed)
        rows, ratio = straggler.run(setting, self.rounds, print_plain)
        columns = {
            "name": "{0.name}", "time to target": "{0.took}", "iterations": "{0.iterations:g}",
            "bytes": "{0.bytes:,.0f}",
        }  # fmt: skip
        print_rows(f"time to {self.target}, {self.workers} workers", columns, rows, text=("name",))
        for peer, value in ratio.items():
            if value is not None:
                print_plain(f"the best policy is {value:.2f}x sooner than {peer}")
        return {"rows": rows, "ratio": ratio}


@dataclass(kw_only=True)
class BenchThin(Benchmark):
    """Training over thin lines between three hosts (network namespaces: as root), beside DDP over Gloo.

    paceline bench thin --json thin.json                          # half an hour
    paceline bench thin --lines 10Mbit/100ms --steps 128 --batch 2
    """

    lines: tuple[str, ...] = ("50Mbit/50ms", "10Mbit/100ms")
    """Rate and delay one way. Over the first one is trained to the end, over the others for --rounds rounds."""
    workload: str = "char-transformer:width=256,layers=4,context=32"
    """What is trained."""
    optimizer: str = "adamw:lr=0.001"
    """The workers' own optimizer; without local steps the servers'."""
    batch: int = 4
    """Samples of a worker's step."""
    steps: int = 1280
    """Steps of each worker."""
    local_steps: int = 64
    """Steps of a round."""
    rounds: int = 2
    """Rounds over the lines after the first."""
    wire: str = "int4"
    """How floats travel over the lines."""

    def measure(self) -> dict[str, Any]:
        wire_precision.check_wire(self.wire)
        lines = [thin.read_line(line) for line in self.lines]
        setting = thin.Setting(self.workload, self.optimizer, self.batch, self.steps)
        rows = thin.run(setting, lines, self.local_steps, self.wire, self.rounds, print_plain)
        columns = {
            "line": "{0.link}", "name": "{0.name}", "steps": "{0.steps}", "time": "{0.time_s:.0f} s",
            "computing": "{0.computing_share:.0%}", "loss": "{0.loss:.4f}", "bytes": "{0.bytes:,}",
        }  # fmt: skip
        print_rows("thin lines, three hosts", columns, rows, text=("line", "name"))
        return {"rows": rows}


@dataclass(kw_only=True)
class BenchSafety(Benchmark):
    """What acknowledgements, deduplication, finite checks and the trace cost in a run without faults.

    paceline bench safety --params 1000000 --iteration-ms 20
    """

    params: int = 1_000_000
    """Size of the model, in float32."""
    iteration_ms: float = 20.0
    """How long a worker computes."""
    iterations: int = 200
    """Iterations of each of 4 workers."""

    def measure(self) -> dict[str, Any]:
        if not 0 < self.iteration_ms < float("inf"):
            raise ConfigError(f"iteration-ms={self.iteration_ms:g} is out of range: more than 0")
        rows = safety.run(self.params, self.iteration_ms / 1000, self.iterations)
        columns = {
            "part": "{0.part}", "worker": "{0.worker_us:.0f} us", "server": "{0.server_us:.0f} us",
            "of the iteration": "{0.share:.2%}",
        }  # fmt: skip
        title = f"CPU time a push, {self.params:,} parameters, {self.iteration_ms:g} ms of computing"
        print_rows(title, columns, rows, text=("part",))
        return {"rows": rows}


@dataclass(kw_only=True)
class BenchStart(Benchmark):
    """Start many workers: from the command to the first step of the last one, under `paceline run` and torchrun.

    paceline bench start --workers 32 --json start.json
    """

    workers: tuple[int, ...] = (32,)
    """How many workers, one after the other."""
    script: str = "examples/digits.py"
    """The script; it is told --steps 1."""
    preload: tuple[str, ...] = ("sklearn.datasets",)
    """Modules of the script's that `paceline run` imports once."""
    rounds: int = 1
    """Interleaved rounds; the median counts."""

    def measure(self) -> dict[str, Any]:
        check_script([self.script], "bench start")
        rows = start.run(self.workers, [self.script, "--steps", "1"], self.preload, self.rounds, print_plain)
        columns = {
            "workers": "{0.workers}", "paceline run": "{0.first_step_s:.2f} s", "torchrun": "{0.torchrun_s:.2f} s",
            "memory": "{0.worker_mb:.0f} MB", "torchrun's": "{0.torchrun_mb:.0f} MB",
        }  # fmt: skip
        print_rows(f"to the first step of the last worker, {self.script}", columns, rows)
        return {"rows": rows}


@dataclass(kw_only=True)
class BenchPeers(Benchmark):
    """Send parameters to two neighbours, average theirs in: paceline's peers, and a send/recv ring over Gloo.

    paceline bench peers --params 1000000 --json peers.json
    """

    LEAST: ClassVar = {"peers": 3}

    params: tuple[int, ...] = (1_000_000,)
    """Sizes of the model, in float32."""
    peers: int = 4
    """How many peers are in the ring."""
    max_gap: int = 2
    """How far ahead of a neighbour a peer may be: what memory is allowed depends on it."""
    rounds: int = 5
    """Interleaved rounds; the median counts."""

    def measure(self) -> dict[str, Any]:
        rows = peer_exchange.run(list(self.params), self.peers, self.max_gap, self.rounds, print_plain)
        columns = {
            "params": "{0.params:.0e}", "paceline": "{0.paceline_ms:.3g} ms", "Gloo": "{0.gloo_ms:.3g} ms",
            "ratio": "{0.ratio:.2f}x", "of CPU": "{0.paceline_cpu_ms:.3g} ms", "Gloo's": "{0.gloo_cpu_ms:.3g} ms",
            "CPU ratio": "{0.cpu_ratio:.2f}x", "memory": "{0.memory_floats:.1f} P", "allowed": "{0.allowed_floats} P",
        }  # fmt: skip
        print_rows(f"exchange with two neighbours and average, {self.peers} peers in a ring", columns, rows)
        return {"rows": rows}
