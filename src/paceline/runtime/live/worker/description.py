"""What a worker trains, as the optimizer knows it and the driver is told."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.core.policy import Policy
from paceline.tensors.layout import Layout
from paceline.tensors.optimizers import OptimizerSpec
from paceline.tensors.steppers import State


@dataclass
class Described:
    """The model and its optimizer."""

    layout: Layout
    tensors: list[Tensor]
    """The trained tensors, as they lie in the layout."""
    optimizer: OptimizerSpec
    state: State
    """What the optimizer has learned already, whole."""
    others: dict[str, Tensor]
    """Frozen parameters and buffers, by name."""
    buffers: dict[str, Tensor]
    aliases: dict[str, str]
    """Second names of tied weights."""
    module: nn.Module | None = None
    """The model itself, if the script has named it."""

    def digest(self, policy: Policy | None) -> str:
        """What must be the same on every worker."""
        return f"{self.layout.digest()}/{self.optimizer.name}/{self.optimizer.extras}/{policy}"


def contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As safetensors wants them: whole, and no two sharing memory."""
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def leave_buffers(buffers: Mapping[str, Tensor], folder: Path, rank: int, incarnation: int) -> None:
    """For the mean over the workers that end well. Without room that is over the others'."""
    path = folder / f"buffers-{rank}.{incarnation}"
    try:
        save_file(contiguous(buffers), path)
    except (OSError, SafetensorError) as error:
        path.unlink(missing_ok=True)
        print(f"worker {rank}: its buffers do not count at the end: {error}", file=sys.stderr)
