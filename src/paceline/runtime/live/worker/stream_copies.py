"""Copies between a model on a GPU and shared memory, on a stream beside the computing one.

The copies go straight from and to the segment, and the device itself looks for NaN and Inf in the gradient. Tensors
whose device has no stream are copied at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from paceline.tensors import fused_kernels

TOGETHER = 1 << 25
"""Bytes of gradients that are copied together, at least."""


class CopyStream(Protocol):
    """Copies of one device, in order, beside what the device computes."""

    def enqueue(self, work: Callable[[], None], uses: Iterable[Tensor]) -> None:
        """Does `work` after all the device was given so far. Its memory in `uses` is not reused before that."""

    def hold_back(self) -> None:
        """Has what the device is given from now on wait until the stream is empty."""

    def join(self) -> None:
        """Returns when the stream is empty."""


class StreamCopies:
    """Moves the gradient of one model to `gradient` and its parameters from `parameters` (views of segments).

    The two may be the same memory: gradients then follow the parameters in their stream. `copy_streams` has the stream
    of each device that has one.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        gradient: Sequence[Tensor],
        parameters: Sequence[Tensor],
        copy_streams: Mapping[torch.device, CopyStream],
    ) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]
        self.gradient = gradient
        self.parameters = parameters
        self.copy_streams = copy_streams
        self.pending: dict[int, Tensor] = {}
        """Gradients that are copied together with the next ones."""
        self.found: dict[int, bool | Tensor] = {}
        """Whether each gradient is finite, or a number on the device that is if the gradient is."""

    def write(self, gradients: Sequence[Tensor | None]) -> bool:
        self.clear(index for index, gradient in enumerate(gradients) if gradient is None)
        self.put({index: gradient for index, gradient in enumerate(gradients) if gradient is not None})
        return self.finish()

    def put(self, gradients: Mapping[int, Tensor]) -> None:
        """Begins to copy these gradients, when there are enough: starting many small copies would take longer."""
        self.pending.update(gradients)
        if sum(gradient.nbytes for gradient in self.pending.values()) >= TOGETHER:
            self._copy_pending()

    def _copy_pending(self) -> None:
        gradients, self.pending = self.pending, {}
        for device, indices in by_device(gradients).items():
            mine = {index: gradients[index] for index in indices}
            copy_stream = self.copy_streams.get(device)
            if copy_stream is not None:
                copy_stream.enqueue(partial(self._copy_out, mine), mine.values())
            else:
                for index, gradient in mine.items():
                    self.found[index] = fused_kernels.copy_and_check_finite(gradient, self.gradient[index])

    def _copy_out(self, gradients: Mapping[int, Tensor]) -> None:
        values = list(gradients.values())
        torch._foreach_copy_([self.gradient[index] for index in gradients], values, non_blocking=True)
        full = {index: value for index, value in gradients.items() if value.numel()}
        largest = torch._foreach_norm(list(full.values()), math.inf) if full else ()
        self.found.update(zip(full, largest, strict=True))

    def clear(self, absent: Iterable[int]) -> None:
        indices = list(absent)
        if indices:
            self.settle()
        for index in indices:
            self.gradient[index].zero_()
            self.pending.pop(index, None)
            self.found.pop(index, None)

    def finish(self) -> bool:
        self._copy_pending()
        self.settle()
        here = all(found for found in self.found.values() if isinstance(found, bool))
        found = {index: value for index, value in self.found.items() if isinstance(value, Tensor)}
        self.found.clear()
        there = (torch.stack([found[index] for index in indices]) for indices in by_device(found).values())
        return here and all(bool(torch.isfinite(numbers).all()) for numbers in there)

    def load(self) -> None:
        """Has the model hold the parameters that are in the segment, in time for whatever uses them next."""
        for device, indices in by_device(dict(enumerate(self.tensors))).items():
            tensors = [self.tensors[index] for index in indices]
            values = [self.parameters[index] for index in indices]
            copy_stream = self.copy_streams.get(device)
            if copy_stream is None:
                torch._foreach_copy_(tensors, values)
            else:
                copy_stream.enqueue(partial(torch._foreach_copy_, tensors, values, non_blocking=True), tensors)
                copy_stream.hold_back()

    def settle(self) -> None:
        for copy_stream in self.copy_streams.values():
            copy_stream.join()


def by_device(tensors: Mapping[int, Tensor]) -> dict[torch.device, list[int]]:
    groups: dict[torch.device, list[int]] = {}
    for index, tensor in tensors.items():
        groups.setdefault(tensor.device, []).append(index)
    return groups
