"""The state of an optimizer, whole or sliced: torch's own form on one side, plain vectors on the other.

Whole, it is a vector over all parameters for each name ("exp_avg"), and an element per tensor for scalars
("step"). A shard has the part of it that belongs to its slice, with scalars by piece. Plain tensors travel as
safetensors, so neither form needs a pickle.

A part of the whole that changes servers is in a form between: vectors over some ranges, scalars by tensor
(`gather`). The whole is that form over everything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.tensors.assignment import Assignment, Ranges, initial, locate, overlap, size, tidy
from paceline.tensors.layout import Layout, Part, ranges_of
from paceline.tensors.piece_optimizers import SCALARS, State, padded, unpadded
from paceline.tensors.shard_optimizer import AVERAGE, PIECE, SAMPLES, THERE

COUNTED = (*SCALARS, THERE)
"""What is one number for each piece on a shard, and one for each tensor in the whole state."""


def nothing(layout: Layout) -> State:
    """Returns the whole state of an optimizer that has not stepped yet."""
    return {THERE: torch.zeros(len(layout.entries))}


def from_torch(optimizer: torch.optim.Optimizer, tensors: Sequence[Tensor], layout: Layout) -> State:
    """Returns the whole state of a torch optimizer over `tensors`, which lie as `layout` says."""
    states = [optimizer.state.get(tensor, {}) for tensor in tensors]
    whole: State = {THERE: torch.tensor([float(bool(each)) for each in states])}
    for name in dict.fromkeys(name for each in states for name, value in each.items() if value is not None):
        if name in SCALARS:
            whole[name] = torch.tensor([float(each.get(name, 0.0)) for each in states])
        else:
            whole[name] = torch.zeros(layout.numel, dtype=layout.torch_dtype)
            for view, each in zip(layout.views(whole[name]), states, strict=True):
                if each.get(name) is not None:
                    view.copy_(padded(each[name], view.numel()).view(view.shape))
    return whole


def to_torch(whole: State, layout: Layout) -> list[dict[str, Tensor]]:
    """Returns the state of each tensor, as a torch optimizer holds it; empty where there is none."""
    besides = (*SCALARS, THERE, AVERAGE, SAMPLES)
    views = {name: layout.views(value) for name, value in whole.items() if name not in besides}
    states: list[dict[str, Tensor]] = []
    for index, entry in enumerate(layout.entries):
        state: dict[str, Tensor] = {}
        if whole[THERE][index]:
            state = {name: whole[name][index].clone() for name in SCALARS if name in whole}
            for name, parts in views.items():
                state[name] = unpadded(name, parts[index].reshape(-1), entry.shape).clone()
        states.append(state)
    return states


def by_tensor(mine: State, layout: Layout, part: Part) -> State:
    """Returns a shard's state with scalars by tensor instead of by piece: the form in which parts are moved and
    joined."""
    owners = torch.tensor([piece.entry for piece in layout.pieces(part, PIECE)], dtype=torch.int64)
    return {
        name: torch.zeros(len(layout.entries)).scatter_reduce_(0, owners, value, "amax") if name in COUNTED else value
        for name, value in mine.items()
    }


def by_piece(moved: State, layout: Layout, part: Part) -> State:
    """Returns a shard's state as its optimizer takes it, from one with scalars by tensor."""
    owners = torch.tensor([piece.entry for piece in layout.pieces(part, PIECE)], dtype=torch.int64)
    return {name: value[owners] if name in COUNTED else value for name, value in moved.items()}


def gather(parts: Sequence[tuple[Ranges, State]], layout: Layout, to: Ranges) -> State:
    """Returns the state of the ranges `to`, from parts of the vector and their states, with scalars by tensor."""
    held: State = {}
    for ranges, state in parts:
        common = overlap(ranges, to)
        if not common:
            continue
        places = list(zip(locate(common, to), locate(common, ranges), strict=True))
        for name, value in state.items():
            if name in COUNTED or name == SAMPLES:
                held[name] = torch.maximum(held.get(name, value), value)
                continue
            vector = held.setdefault(name, torch.zeros(size(to), dtype=layout.torch_dtype))
            for there, here in places:
                vector[there] = value[here]
    return held


def cut(whole: State, layout: Layout, part: Part) -> State:
    """Returns a shard's part of the whole state."""
    to = tidy(ranges_of(part))
    return by_piece(gather([(((0, layout.numel),), whole)], layout, to), layout, to)


def join(parts: Sequence[State], layout: Layout, assignment: Assignment | None = None) -> State:
    """Returns the whole state, from all shards' parts in order."""
    assignment = assignment or initial(layout, len(parts))
    named = [(ranges, by_tensor(part, layout, ranges)) for ranges, part in zip(assignment, parts, strict=True)]
    return gather(named, layout, ((0, layout.numel),))
