"""How much faster virtual workers' gradients are computed together than one by one.

Both compute what the simulator would: a gradient for each of so many workers, each on its own parameters and its own
samples. The plain loop is what a training script does, parameters loaded into the module, loss, backward. Rounds are
interleaved, so that a busy machine slows both, and the fastest of each counts: the others measure what else the
machine was doing. Both must agree, or there is no result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paceline import workloads
from paceline.bench.rounds import in_turn, milliseconds
from paceline.errors import PacelineError
from paceline.runtime.virtual.gradients import TRACED_AT, Batched, Compute, OneByOne
from paceline.tensors.layout import flatten, layout_of
from paceline.workloads.base import Workload


@dataclass(frozen=True)
class Row:
    """One workload: microseconds per gradient."""

    workload: str
    workers: int
    batch: int
    threads: int
    batched_us: float
    loop_us: float
    ratio: float


def run(names: list[str], workers: int, rounds: int, say: Callable[[str], None]) -> list[Row]:
    rows = []
    for name in names:
        workload = workloads.load(name)
        rows.append(measure(workload, workers, rounds))
        say(f"{name}: {rows[-1].batched_us:.0f} us batched, {rows[-1].loop_us:.0f} us one by one")
    return rows


def measure(workload: Workload, workers: int, rounds: int) -> Row:
    module = workload.module(0)
    layout = layout_of((name, tensor, 0) for name, tensor in module.named_parameters())
    flat = layout.empty()
    flatten(list(module.parameters()), layout.views(flat))
    generator = torch.Generator().manual_seed(0)
    each = list((flat + 0.01 * torch.randn(workers, layout.numel, generator=generator)).unbind())
    samples = torch.randint(0, len(workload.train[0]), (workers, workload.batch), generator=generator)
    ways: dict[str, Compute] = {
        "batched": Batched(workload, module, layout),
        "loop": OneByOne(workload, module, layout),
    }

    def compute(way: str) -> Tensor:
        return ways[way](torch.stack(each), workload.train[0][samples], workload.train[1][samples])

    for _ in range(TRACED_AT):  # as in a run of some length
        together = compute("batched")
    if not torch.allclose(together, compute("loop"), rtol=1e-3, atol=1e-4):
        raise PacelineError(f"{workload.name}: gradients computed together differ from those computed one by one")
    timed = {way: partial(milliseconds, partial(compute, way), time.perf_counter) for way in ways}
    batched, loop = (1e3 * min(all_ms) / workers for all_ms in in_turn(timed, rounds).values())
    return Row(workload.name, workers, workload.batch, torch.get_num_threads(), batched, loop, loop / batched)
