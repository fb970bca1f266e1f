"""How gradients get into shared memory and parameters out of it, wherever the model is.

On the CPU a gradient is copied by the thread that calls, which looks for NaN and Inf meanwhile (`passes.py`). A large
one is copied around the caches: a copy through them reads what it is about to overwrite.
On a device the copies run in a lane of their own (`Lane`, on a GPU a stream) straight from and to the segment, and
the device itself looks at the gradient. A gradient is there when `finish` has returned, no sooner; a segment may be
given away when `settle` has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from paceline.tensors import passes
from paceline.tensors.layout import Layout, Part

AROUND = 1 << 21
"""Parameters of a model whose gradients go around the caches: nothing of them would be there when the server reads."""


class Lane(Protocol):
    """Copies of one device, in order, beside what the device computes."""

    def enqueue(self, work: Callable[[], None], uses: Iterable[Tensor]) -> None:
        """Do `work` after all the device was given so far. Its memory in `uses` is not reused before that."""

    def hold_back(self) -> None:
        """What the device is given from now on waits until the lane is empty."""

    def join(self) -> None:
        """Return when the lane is empty."""


class Transfer:
    """Moves the gradient of one model to `gradient` and its parameters from `parameters` (views of segments).

    The two may be the same memory if the model has its own: gradients then follow the parameters in their lane.
    `lanes` names the devices that have one; tensors of all others are copied at once.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        gradient: Sequence[Tensor],
        parameters: Sequence[Tensor],
        lanes: Mapping[torch.device, Lane],
    ) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]
        self.gradient = gradient
        self.parameters = parameters
        self.lanes = lanes
        self.around = sum(tensor.numel() for tensor in tensors) >= AROUND
        self.looked: dict[int, bool | Tensor] = {}
        """What was found in each gradient: whether it is finite, or a number on the device that is if it is."""

    def write(self, gradients: Sequence[Tensor | None]) -> bool:
        """Put a whole gradient in its place; whether it is finite."""
        if not self.lanes:
            self.looked.clear()
            finite = True
            for gradient, view in zip(gradients, self.gradient, strict=True):
                if gradient is None:
                    view.zero_()
                else:
                    finite &= passes.copy_and_look(gradient, view, self.around)
            return finite
        self.clear(index for index, gradient in enumerate(gradients) if gradient is None)
        self.put({index: gradient for index, gradient in enumerate(gradients) if gradient is not None})
        return self.finish()

    def put(self, gradients: Mapping[int, Tensor]) -> None:
        """Begin to copy the gradients of these tensors, and to look at them."""
        for device, indices in by_device(gradients).items():
            mine = {index: gradients[index] for index in indices}
            lane = self.lanes.get(device)
            if lane is not None:
                lane.enqueue(partial(self._copy_out, mine), mine.values())
            else:
                for index, gradient in mine.items():
                    self.looked[index] = passes.copy_and_look(gradient, self.gradient[index], self.around)

    def _copy_out(self, gradients: Mapping[int, Tensor]) -> None:
        values = list(gradients.values())
        torch._foreach_copy_([self.gradient[index] for index in gradients], values, non_blocking=True)
        full = {index: value for index, value in gradients.items() if value.numel()}
        largest = torch._foreach_norm(list(full.values()), math.inf) if full else ()
        self.looked.update(zip(full, largest, strict=True))

    def clear(self, absent: Iterable[int]) -> None:
        """These tensors have no gradient: shards that need one for a mean read zeros."""
        indices = list(absent)
        if indices:
            self.settle()
        for index in indices:
            self.gradient[index].zero_()
            self.looked.pop(index, None)

    def finish(self) -> bool:
        """Return when all that was put is there; whether it is finite."""
        self.settle()
        here = all(found for found in self.looked.values() if isinstance(found, bool))
        found = {index: value for index, value in self.looked.items() if isinstance(value, Tensor)}
        self.looked.clear()
        there = (torch.stack([found[index] for index in indices]) for indices in by_device(found).values())
        return here and all(bool(torch.isfinite(numbers).all()) for numbers in there)

    def load(self) -> None:
        """Have the model hold the parameters that are in the segment, in time for whatever uses them next."""
        for device, indices in by_device(dict(enumerate(self.tensors))).items():
            tensors = [self.tensors[index] for index in indices]
            values = [self.parameters[index] for index in indices]
            lane = self.lanes.get(device)
            if lane is None:
                torch._foreach_copy_(tensors, values)
            else:
                lane.enqueue(partial(torch._foreach_copy_, tensors, values, non_blocking=True), tensors)
                lane.hold_back()

    def settle(self) -> None:
        """Return when nothing is being copied, from or to the segments."""
        for lane in self.lanes.values():
            lane.join()


def by_device(tensors: Mapping[int, Tensor]) -> dict[torch.device, list[int]]:
    groups: dict[torch.device, list[int]] = {}
    for index, tensor in tensors.items():
        groups.setdefault(tensor.device, []).append(index)
    return groups


def write_slice(gradients: Sequence[Tensor | None], segment: Tensor, layout: Layout, part: Part) -> None:
    """Write one shard's slice of a gradient once more."""
    flat = [None if gradient is None else gradient.reshape(-1) for gradient in gradients]
    starts = list(accumulate((entry.numel for entry in layout.entries), initial=0))
    for piece in layout.pieces(part, layout.numel):
        there, gradient = segment[piece.start : piece.start + piece.length], flat[piece.entry]
        if gradient is None:
            there.zero_()
        else:
            first = piece.start - starts[piece.entry]
            there.copy_(gradient[first : first + piece.length])
