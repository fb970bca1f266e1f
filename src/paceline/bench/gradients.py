"""How much faster virtual workers' gradients are computed together than one by one.

Both compute what the simulator would: a gradient for each of so many workers, each on its own parameters and its own
samples. The plain loop is what a training script does, parameters loaded into the module, loss, backward. Rounds are
interleaved, so that a busy machine slows both, and the fastest of each counts: the others measure what else the
machine was doing. All ways must agree to a tenth of each gradient's norm, or there is no result. Rounding decides
whether units close to the kink of their ReLU count: that is a thousandth of the norm with floats, and a twentieth with
TF32.
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
from paceline.runtime.virtual.gradients import TRACED_AT, ways_to_compute
from paceline.tensors.devices import CPU, deterministic
from paceline.tensors.layout import flatten, layout_of
from paceline.workloads.base import Workload

ON_CPU = ("digits-mlp", "digits-cnn", "svm")
ON_GPU = (
    "fashion-resnet20:data=synthetic",
    "fashion-vgg:data=synthetic",
    "char-transformer",
    "char-transformer:width=256,layers=4",
    "matrix-factorization:data=1m",
)
"""What is measured if nothing is named: data do not matter, so a GPU needs no files."""
APART = 0.1


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
    device: str
    way: str
    """How the simulator computes them here."""
    ways_us: dict[str, float]
    """Every way that this workload can be computed in."""


def run(names: list[str], workers: int, rounds: int, device: torch.device, say: Callable[[str], None]) -> list[Row]:
    rows = []
    for name in names or (ON_CPU if device == CPU else ON_GPU):
        with deterministic(device):
            rows.append(measure(workloads.load(name), workers, rounds, device))
        say(f"{name}: " + ", ".join(f"{way} {us:.0f} us" for way, us in rows[-1].ways_us.items()))
    return rows


def measure(workload: Workload, workers: int, rounds: int, device: torch.device = CPU) -> Row:
    workload = workload.on(device)
    module = workload.module(0).to(device)
    layout = layout_of((name, tensor, 0) for name, tensor in module.named_parameters())
    flat = layout.empty(device)
    flatten(list(module.parameters()), layout.views(flat))
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(workers, layout.numel, generator=generator)
    each = list((flat + 0.01 * noise.to(device)).unbind())
    samples = torch.randint(0, len(workload.train[0]), (workers, workload.batch), generator=generator).to(device)
    ways = {way.name: way for way in ways_to_compute(workload, module, layout)}

    def compute(way: str) -> Tensor:
        found = ways[way](torch.stack(each), workload.train[0][samples], workload.train[1][samples])
        if device != CPU:
            torch.cuda.synchronize(device)
        return found

    *together, loop = ways
    for way in together:
        for _ in range(TRACED_AT):  # as in a run of some length
            found = compute(way)
        check_same(workload.name, found, compute(loop))
    timed = {way: partial(milliseconds, partial(compute, way), time.perf_counter) for way in ways}
    us = {way: 1e3 * min(all_ms) / workers for way, all_ms in in_turn(timed, rounds).items()}
    return Row(
        workload=workload.name,
        workers=workers,
        batch=workload.batch,
        threads=torch.get_num_threads(),
        batched_us=us[together[0]],
        loop_us=us[loop],
        ratio=us[loop] / us[together[0]],
        device=str(device) if device == CPU else torch.cuda.get_device_name(device),
        way=together[0],
        ways_us=us,
    )


def check_same(name: str, found: Tensor, expected: Tensor) -> None:
    """Refuses gradients that are further from the expected ones than rounding explains."""
    apart = float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())
    if not apart <= APART:
        raise PacelineError(f"{name}: gradients computed together differ by {apart:.2g} from those computed one by one")
