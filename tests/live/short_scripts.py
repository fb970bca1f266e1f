"""A script of few steps, in the midst of which a worker does something."""

from __future__ import annotations

from collections.abc import Callable

import torch

import paceline

STEPS = 40
WHEN = 5


def training(deed: Callable[[], object]) -> Callable[[], None]:
    """The script: worker 1 does it at its fifth step."""

    def work() -> None:
        model = torch.nn.Linear(3, 2)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
        for step in range(STEPS):
            if (paceline.init().rank, step) == (1, WHEN):
                deed()
            opt.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            opt.step()

    return work
