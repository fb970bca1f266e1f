"""The training script of `benchmarks/chaos.py`: a small network, and a vector that counts updates.

    paceline run --workers 3 benchmarks/chaos_job.py FOLDER STEPS servers|peers

The gradient of `count` is -1 everywhere, so each update raises it by the learning rate times its weight: the final
model itself says how many updates it has had, on every shard, since `count` is longer than all other parameters. With
servers all steps weigh the same, however small the last batch of an epoch is.
Each worker writes into FOLDER what it did, as it does it, so that a kill takes nothing away: a byte for each step
that it began (RANK.begun) and that was acknowledged (RANK.acked), and the samples that counted.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import paceline
from paceline.testing.samples import RecordedSampler

LR, BATCH, SAMPLES, COMPUTE_S = 0.1, 8, 256, 0.008


class CountingNetwork(nn.Module):
    """Classifies points, and counts the updates that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(1000))
        self.layers = nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 4))


def data() -> tuple[Tensor, Tensor]:
    """Points, and the class of each: the largest of four projections."""
    draw = torch.Generator().manual_seed(0)
    points, directions = torch.randn(SAMPLES, 16, generator=draw), torch.randn(16, 4, generator=draw)
    return points, (points @ directions).argmax(1)


def make_model() -> CountingNetwork:
    torch.manual_seed(0)
    return CountingNetwork()


def main(folder: Path, steps: int, weight: float | None) -> None:
    world = paceline.init()
    points, classes = data()
    model = make_model()
    opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=LR), model=model)
    sampler = RecordedSampler(points, folder)
    loader = DataLoader(range(SAMPLES), BATCH, sampler=sampler)  # type: ignore[arg-type]
    begun = (folder / f"{world.rank}.begun").open("ab", buffering=0)
    acked = (folder / f"{world.rank}.acked").open("ab", buffering=0)
    while opt.global_step < steps:
        for batch in loader:

            def closure(batch: Tensor = batch) -> Tensor:
                opt.zero_grad()
                loss = nn.functional.cross_entropy(model.layers(points[batch]), classes[batch])
                (loss - model.count.sum()).backward()
                return loss

            time.sleep(COMPUTE_S)
            begun.write(b".")
            try:
                loss = opt.step(closure, weight)
                if not opt.step_was_dropped:
                    acked.write(b".")
            finally:
                sampler.used(batch.tolist(), not opt.step_was_dropped)
            if opt.global_step % 10 == 0:
                paceline.log(loss=loss.item())
            if opt.global_step >= steps:
                break


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), weight=None if sys.argv[3] == "peers" else 1.0)
