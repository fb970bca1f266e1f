"""Single-process training on the joined batch: what BSP must equal."""

from __future__ import annotations

import torch

from paceline import workloads
from paceline.sample_order import Batch, SampleOrder
from paceline.tensors import optimizers
from paceline.workloads.base import in_dtype


def train_alone(
    workload_name: str,
    workers: int,
    iterations: int,
    optimizer: str,
    dtype: torch.dtype,
    seed: int = 0,
    batch: Batch | None = None,
) -> dict[str, torch.Tensor]:
    workload = workloads.load(workload_name)
    module = workload.module(seed, dtype)
    spec = optimizers.parse(optimizer)
    opt = spec.build([list(module.parameters())])
    order = SampleOrder(len(workload.train[0]), workers, batch or workload.batch, seed)
    x, y = (in_dtype(tensor, dtype) for tensor in workload.train)
    for step in range(iterations):
        samples = torch.from_numpy(order.joined(step))
        opt.zero_grad()
        workload.loss(module(x[samples]), y[samples]).backward()
        if spec.extras.clip_mean is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), spec.extras.clip_mean)
        opt.step()
    return {name: value.detach() for name, value in module.named_parameters()}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)
