"""Training a bundled workload through the front door, as a user's script would: what live comparisons run."""

from __future__ import annotations

import torch

from paceline import session
from paceline.dealing import Dealer
from paceline.optim import Optimizer
from paceline.tensors.optimizers import OptimizerSpec
from paceline.workloads.base import Workload


def train(workload: Workload, optimizer: OptimizerSpec, batch: int, iterations: int, seed: int) -> None:
    """Train in this process's world; worker 0 evaluates and logs after each of its iterations."""
    world = session.init()
    module = workload.module(seed)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    opt = Optimizer(optimizer.build([trained]), model=module, options=optimizer.extras)
    dealer = Dealer(len(workload.train[0]), world.size, batch, seed)
    inputs, labels = workload.train
    while opt.global_step < iterations:
        samples = torch.from_numpy(dealer.deal(world.rank, opt.global_step))
        x, y = inputs[samples], labels[samples]

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            opt.zero_grad()
            loss = workload.loss(module(x), y)
            loss.backward()
            return loss

        opt.step(closure)
        if world.rank == 0:
            measured = workload.evaluate(module)
            session.log(**{name: value for name, value in measured.items() if value is not None})
