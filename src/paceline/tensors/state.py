"""The state of an optimizer, whole or sliced: torch's own form on one side, plain vectors on the other.

Whole, it is a vector over all parameters for each name ("exp_avg"), and an element per tensor for scalars
("step"). A shard has the part of it that belongs to its slice, with scalars by piece. Plain tensors travel as
safetensors, so neither form needs a pickle.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.tensors.layout import Layout
from paceline.tensors.optimizers import AVERAGE, PIECE, SAMPLES, SCALARS, THERE, State
from paceline.tensors.steppers import padded, unpadded


def from_torch(optimizer: torch.optim.Optimizer, tensors: Sequence[Tensor], layout: Layout) -> State:
    """The whole state of a torch optimizer over `tensors`, which lie as `layout` says."""
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
    """The state of each tensor, as a torch optimizer holds it; empty where there is none."""
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


def cut(whole: State, layout: Layout, part: slice) -> State:
    """A shard's part of the whole."""
    pieces = layout.pieces(part, PIECE)
    owners = torch.tensor([piece.entry for piece in pieces], dtype=torch.int64)
    mine: State = {}
    for name, value in whole.items():
        if name == SAMPLES:
            mine[name] = value
        else:
            mine[name] = value[owners] if name in (*SCALARS, THERE) else value[part]
    return mine


def join(parts: Sequence[State], layout: Layout) -> State:
    """The whole, from all shards' parts in order."""
    whole: State = {}
    for part, state in zip(layout.slices(len(parts)), parts, strict=True):
        pieces = layout.pieces(part, PIECE)
        for name, value in state.items():
            if name == SAMPLES:
                whole[name] = torch.maximum(whole.get(name, value), value)
            elif name in (*SCALARS, THERE):
                target = whole.setdefault(name, torch.zeros(len(layout.entries)))
                for piece, number in zip(pieces, value, strict=True):
                    target[piece.entry] = torch.maximum(target[piece.entry], number)
            else:
                whole.setdefault(name, torch.zeros(layout.numel, dtype=layout.torch_dtype))[part] = value
    return whole
