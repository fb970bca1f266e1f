"""What a worker of `paceline bench thin` runs on its host: a bundled workload, under paceline or DDP.

python thin_worker.py paceline WORKLOAD OPTIMIZER BATCH STEPS
python thin_worker.py ddp WORKLOAD OPTIMIZER BATCH STEPS RANK SIZE ADDRESS      prints what it measured, as JSON
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline import workloads
from paceline.api import check_optimizer
from paceline.core.messages import Members
from paceline.sample_order import SampleOrder
from paceline.tensors.optimizers import OptimizerSpec
from paceline.workloads.base import Workload

WARM = 2


def backward(workload: Workload, module: nn.Module, order: SampleOrder, rank: int, step: int) -> None:
    samples = torch.from_numpy(order.of_worker(rank, step))
    inputs, labels = workload.train
    workload.loss(module(inputs[samples]), labels[samples]).backward()


def optimizer_of(workload: Workload, text: str, batch: int) -> OptimizerSpec:
    return check_optimizer(text, workload, batch, Members(1, 1))


def under_paceline(name: str, optimizer: str, batch: int, steps: int) -> None:
    torch.manual_seed(0)
    workload = workloads.load(name)
    world, module, spec = paceline.init(), workload.module(0), optimizer_of(workload, optimizer, batch)
    opt = paceline.Optimizer(spec.build([list(module.parameters())]), model=module, options=spec.extras)
    order = SampleOrder(len(workload.train[0]), world.size, batch, 0)
    while opt.global_step < steps:
        opt.zero_grad()
        backward(workload, module, order, world.rank, opt.global_step)
        opt.step()


def under_ddp(name: str, optimizer: str, batch: int, steps: int, rank: int, size: int, address: str) -> None:
    workload = workloads.load(name)
    module, spec = workload.module(0), optimizer_of(workload, optimizer, batch)
    order = SampleOrder(len(workload.train[0]), size, batch, 0)
    dist.init_process_group("gloo", address, rank=rank, world_size=size)
    wrapped = nn.parallel.DistributedDataParallel(module)
    inner = spec.build([list(module.parameters())])
    seconds = {"alone": 0.0, "all": 0.0}
    for step in range(WARM + steps):
        # Computing is measured apart, in steps that exchange nothing: DDP exchanges while backward runs.
        for kind in seconds:
            began = time.perf_counter()
            inner.zero_grad()
            if kind == "alone":
                with wrapped.no_sync():
                    backward(workload, wrapped, order, rank, step)
            else:
                backward(workload, wrapped, order, rank, step)
                inner.step()
            if step >= WARM:
                seconds[kind] += time.perf_counter() - began
    dist.destroy_process_group()
    print(json.dumps(seconds))


if __name__ == "__main__":
    way, given_workload, given_optimizer, *rest = sys.argv[1:]
    if way == "ddp":
        under_ddp(given_workload, given_optimizer, int(rest[0]), int(rest[1]), int(rest[2]), int(rest[3]), rest[4])
    else:
        under_paceline(given_workload, given_optimizer, int(rest[0]), int(rest[1]))
