"""The parameters that peers write when they end, and their average, which is the run's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from msgspec import Struct
from safetensors.torch import save_file
from torch import Tensor

from paceline.tensors.layout import Layout
from paceline.tensors.piece_optimizers import SCALARS, State
from paceline.tensors.shard_optimizer import THERE

ITERATION, VALUES, LEARNED = "iteration", "values", "state."


class Final(Struct):
    """The average of the peers' parameters and optimizer states."""

    values: Tensor
    learned: State
    iteration: int
    count: int
    distance: float
    """The mean distance of the peers from the average."""


def final_name(process: str) -> str:
    return f"final-{process}"


def final_path(folder: Path, rank: int, incarnation: int) -> Path:
    """Returns where a peer that ends writes its parameters."""
    return folder / final_name(f"{rank}.{incarnation}")


def write_final(path: Path, values: Tensor, learned: State, iteration: int) -> None:
    """Writes a peer's parameters atomically."""
    part = path.with_name(f"part-{path.name}")
    held = {LEARNED + name: value for name, value in learned.items()}
    save_file({VALUES: values, ITERATION: torch.tensor([iteration]), **held}, part)
    part.replace(path)


def average(left: Sequence[Mapping[str, Tensor]], layout: Layout) -> Final:
    """Averages all; of counts, as of steps, it takes the largest."""
    values = torch.zeros(layout.numel, dtype=layout.torch_dtype)
    for each in left:
        values.add_(each[VALUES], alpha=1.0 / len(left))
    learned: State = {}
    for name in sorted({name for each in left for name in each if name.startswith(LEARNED)}):
        have = torch.stack([each[name] for each in left if name in each])
        counts = name.removeprefix(LEARNED) in (*SCALARS, THERE)
        learned[name.removeprefix(LEARNED)] = have.amax(0) if counts else have.mean(0)
    iteration = max(int(each[ITERATION].item()) for each in left)
    apart = sum(float(torch.linalg.vector_norm(each[VALUES] - values)) for each in left) / len(left)
    return Final(values, learned, iteration, len(left), apart)
