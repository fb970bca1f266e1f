"""`paceline bench gpu`: exchanges and steps of a model on the GPU, beside the plain loop and DDP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from paceline import policies
from paceline.bench import gpu_exchange
from paceline.bench.transformer import Shape
from paceline.commands.benchmark import Benchmark, print_rows
from paceline.commands.options import Flag
from paceline.commands.terminal import print_plain


@dataclass(kw_only=True)
class BenchGpu(Benchmark):
    """Exchanges and steps of a transformer on the GPU: paceline, the plain loop, and DDP over NCCL or Gloo.

    paceline bench gpu --policies asp bsp hop:graph=complete --workers 1 2 4 --json gpu.json
    """

    policies: tuple[str, ...] = ("asp", "bsp", "hop:graph=complete")
    """The policies to measure."""
    workers: tuple[int, ...] = (1, 2, 4)
    """How many workers."""
    optimizer: Literal["sgd", "momentum", "adamw"] = "adamw"
    """What steps the parameters, everywhere."""
    servers_on: Literal["auto", "cpu", "gpu"] = "auto"
    """Where the servers have the parameters."""
    layers: int = Shape().layers
    """Layers of the transformer."""
    width: int = Shape().width
    """The size of a token's vector, a multiple of 64."""
    vocabulary: int = Shape().vocabulary
    """How many different tokens there are."""
    context: int = Shape().context
    """Tokens of a sample."""
    batch: int = Shape().batch
    """Samples of a batch."""
    without_ddp: Flag = False
    """Leave DDP out."""

    def measure(self) -> dict[str, Any]:
        for policy in self.policies:
            policies.parse(policy)
        gpu_exchange.check_gpu()
        shape = Shape(self.layers, self.width, self.vocabulary, self.context, self.batch)
        setting = gpu_exchange.Setting(shape, self.optimizer, self.servers_on)
        rows = gpu_exchange.run(setting, list(self.policies), list(self.workers), not self.without_ddp, print_plain)
        columns = {
            "policy": "{0.policy}", "workers": "{0.workers}", "exchange": "{0.exchange_ms:.4g} ms",
            "step": "{0.step_ms:.4g} ms", "plain": "{0.plain_step_ms:.4g} ms", "memory": "{0.memory_floats:.1f} P",
            "DDP": "{0.ddp_step_ms:.4g} ms", "over": "{0.ddp}",
        }  # fmt: skip
        title = f"{setting.params:,} parameters, {self.optimizer}, servers on {self.servers_on}"
        print_rows(title, columns, rows, text=("policy", "over"))
        return {"rows": rows}
