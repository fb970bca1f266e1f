"""Training a bundled workload through the front door, as a user's script would: what live comparisons run."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from paceline import session
from paceline.live_evaluation import LiveEvaluation
from paceline.optim import Optimizer
from paceline.sample_order import Batch, BatchSizes, SampleOrder
from paceline.sampling import BatchSampler
from paceline.tensors.optimizers import OptimizerSpec
from paceline.workloads.base import Workload

SHOWN_EVERY_S = 0.25


def turns_of(
    size: int, batch: Batch | BatchSizes, seed: int, opt: Optimizer
) -> Iterator[tuple[torch.Tensor, float | None]]:
    """Yields the samples of this worker's steps, and what their gradients weigh if the sampler does not say it."""
    world = session.init()
    if isinstance(batch, BatchSizes):
        sampler = BatchSampler(range(size), batch.batch, batch.balance, batch.least, batch.most, seed)
        while True:
            for samples in sampler:
                yield torch.tensor(samples), None
    order = SampleOrder(size, world.size, batch, seed)
    while True:
        turn = torch.from_numpy(order.of_worker(world.rank, opt.global_step))
        yield turn, None if order.is_even else len(turn)


def train(
    workload: Workload,
    optimizer: OptimizerSpec,
    batch: Batch | BatchSizes,
    iterations: int,
    seed: int,
    evaluation: LiveEvaluation | None = None,
) -> None:
    """Train in this process's world. After its iterations worker 0 has `evaluation` look at the model.

    Without one it evaluates itself and logs that, and is late for the others.
    """
    world = session.init()
    module = workload.module(seed)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    opt = Optimizer(optimizer.build([trained]), model=module, options=optimizer.extras)
    inputs, labels = workload.train
    turns = turns_of(len(inputs), batch, seed, opt)
    shown_s = 0.0
    while opt.global_step < iterations:
        samples, weight = next(turns)
        x, y = inputs[samples], labels[samples]

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            opt.zero_grad()
            loss = workload.loss(module(x), y)
            loss.backward()
            return loss

        loss = opt.step(closure, weight=weight)
        if world.rank != 0 or not opt.at_round_end:
            continue
        if evaluation is None or world.live is None:
            session.log(**workload.evaluate(module))
            continue
        for point in evaluation.observe(module, world.live.run.now(), world.live.version):
            session.log(**point.values)
        if time.monotonic() - shown_s >= SHOWN_EVERY_S:  # only whoever watches sees it
            shown_s = time.monotonic()
            session.log(batch_loss=loss)
