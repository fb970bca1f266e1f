"""What a worker and a peer refuse, in one line, because a step would go wrong in silence."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.runtime.live.trainer.run_connection import RunConnection
from paceline.tensors.layout import Layout


def check_process(run: RunConnection) -> None:
    """Refuses a step in a process that the worker has forked."""
    if os.getpid() != run.pid:
        raise PacelineError(f"worker {run.rank} called step in a child process: only the process itself may")


def check_tensors(layout: Layout, gradients: Sequence[Tensor | None], changed: int | None, because: str) -> None:
    """Refuses sparse gradients, and a script that has `changed` a tensor of the model, which it must not `because`."""
    for index, gradient in enumerate(gradients):
        if gradient is not None and gradient.layout is not torch.strided:
            raise PacelineError(f"{layout.entries[index].name} has a sparse gradient: only dense ones can be used")
    if changed is not None:
        raise PacelineError(
            f"{layout.entries[changed].name} was changed by the script: once wrapped, {because}; load or change them "
            "before paceline.Optimizer is made"
        )
