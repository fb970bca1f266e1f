"""Parts of the parameters on their way from server to server, when the number of servers changes.

What a server gives away, values and the optimizer's state of those ranges, it writes to a file of the run's folder
for each server that gets some of it: safetensors in shared memory, no pickle and no disk. A server takes what was
left for it and joins it to what it keeps. Nothing else is copied between servers.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.runtime.live.protocol import resizing_messages
from paceline.tensors import state
from paceline.tensors.assignment import Ranges, overlap
from paceline.tensors.device_optimizer import SliceOptimizer
from paceline.tensors.layout import Layout
from paceline.tensors.piece_optimizers import State

VALUES = "values"
"""Among the vectors of a state: the parameters themselves."""


def file_of(folder: Path, number: int, giver: int, taker: int) -> Path:
    return folder / f"moved-{number}-{giver}-{taker}"


def held_by(optimizer: SliceOptimizer, layout: Layout, part: Ranges) -> State:
    """Everything a server has, with scalars by tensor: as it can be cut and joined."""
    return {VALUES: optimizer.values, **state.by_tensor(optimizer.state(), layout, part)}


def give(folder: Path, order: resizing_messages.Give, shard: int, layout: Layout, optimizer: SliceOptimizer) -> None:
    """Write what others are to have of this shard's part."""
    mine = order.before[shard]
    held = held_by(optimizer, layout, mine)
    for taker, theirs in enumerate(order.after):
        common = overlap(mine, theirs)
        if taker != shard and common:
            save_file(state.gather([(mine, held)], layout, common), file_of(folder, order.number, shard, taker))


def take(
    folder: Path, order: resizing_messages.Give, shard: int, layout: Layout, optimizer: SliceOptimizer | None
) -> tuple[Tensor, State]:
    """The values and the state of this shard's new part, from what it keeps (if it is no new one) and what it gets."""
    ours = order.after[shard]
    parts: list[tuple[Ranges, State]] = []
    if optimizer is not None:
        parts.append((order.before[shard], held_by(optimizer, layout, order.before[shard])))
    for giver, theirs in enumerate(order.before):
        common = overlap(theirs, ours)
        if giver != shard and common:
            parts.append((common, load_file(file_of(folder, order.number, giver, shard))))
    joined = state.gather(parts, layout, ours)
    values = joined.pop(VALUES, layout.empty()[:0])
    return values, state.by_piece(joined, layout, ours)


def clear(folder: Path, number: int) -> None:
    """Give the memory back, once everybody has taken what is theirs, or nobody is to."""
    for path in folder.glob(f"moved-{number}-*"):
        path.unlink()
