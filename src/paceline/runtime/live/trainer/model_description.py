"""The description of what a worker trains: the optimizer knows it, and the driver is told."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.core.local_steps import LocalSteps
from paceline.core.policy import Policy
from paceline.policies import without_folders
from paceline.tensors.layout import Layout
from paceline.tensors.optimizers import OptimizerSpec
from paceline.tensors.piece_optimizers import State

logger = logging.getLogger(__name__)


@dataclass
class ModelDescription:
    """A model and its optimizer."""

    layout: Layout
    tensors: list[Tensor]
    """The trained tensors, in the order of the layout."""
    optimizer: OptimizerSpec
    state: State
    """What the optimizer has learned before the run, of the whole vector."""
    others: dict[str, Tensor]
    """Frozen parameters and buffers, by name."""
    buffers: dict[str, Tensor]
    aliases: dict[str, str]
    """Second names of tied weights."""
    module: nn.Module | None = None
    """The model itself, if the script has named it."""
    local_steps: LocalSteps | None = None
    """How workers train alone between exchanges: then `optimizer` steps on what they have learned."""
    rounded: bool = False
    """Whether `tensors` are masters in float32 of parameters in half precision."""

    def digest(self, policy: Policy | None) -> str:
        """Returns a text that must be the same on every worker."""
        chosen = f"{without_folders(str(policy))}/{self.local_steps}"
        return f"{self.layout.digest()}/{self.optimizer.name}/{self.optimizer.extras}/{chosen}"


def contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies that safetensors can save: contiguous, and without shared memory."""
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def leave_buffers(buffers: Mapping[str, Tensor], folder: Path, rank: int, incarnation: int) -> None:
    """Leaves the buffers for the mean at the end; if saving fails, this worker is left out of the mean."""
    path = folder / f"buffers-{rank}.{incarnation}"
    try:
        save_file(contiguous(buffers), path)
    except (OSError, SafetensorError) as error:
        path.unlink(missing_ok=True)
        logger.warning(f"worker {rank}: its buffers do not count at the end: {error}")
