"""Real gradients for virtual workers, computed late and together.

A virtual computation takes no time of its own: when it starts, the parameters it read and the samples it was
dealt are put aside, and its gradient is worked out when a shard first needs it. By then most other workers
have started theirs too, so all outstanding ones are computed in one `torch.func.vmap` call, which for a small
model costs little more than one of them alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, grad, vmap

from paceline.core.messages import Handle
from paceline.tensors.layout import Layout
from paceline.workloads.base import Workload

AT_ONCE = 256
Key = tuple[int, int, int]
"""(source, incarnation, iteration): the part of a handle that all shards share."""


@dataclass
class Pending:
    """A gradient that was ordered: what it is to be computed from, then what came out."""

    parameters: Tensor
    samples: NDArray[np.int64]
    uses: int
    """How many shards have not consumed their slice yet."""
    gradient: Tensor | None = None


class Gradients:
    def __init__(self, workload: Workload, layout: Layout, shards: list[slice]) -> None:
        self.module = workload.module(0, layout.torch_dtype)
        self.layout = layout
        self.shards = shards
        self.x, self.y = (
            tensor.to(layout.torch_dtype) if tensor.is_floating_point() else tensor for tensor in workload.train
        )
        self.pending: dict[Key, Pending] = {}

        def loss(flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
            output = functional_call(self.module, layout.named(flat), (x,))
            return workload.loss(output, y)

        self.batched = vmap(grad(loss), randomness="different")

    def order(self, key: Key, parameters: Tensor, samples: NDArray[np.int64]) -> None:
        self.pending[key] = Pending(parameters, samples, len(self.shards))

    def cancel(self, key: Key) -> None:
        """The computation died with its worker."""
        self.pending.pop(key, None)

    def take(self, handle: Handle, shard: int) -> Tensor:
        """The slice of a gradient for one shard; the last shard to take it frees it."""
        gradient = self.look(handle, shard)
        self.discard(handle)
        return gradient

    def look(self, handle: Handle, shard: int) -> Tensor:
        """The same, without taking it."""
        pending = self.pending[handle.source, handle.incarnation, handle.iteration]
        if pending.gradient is None:
            self._compute()
        return cast(Tensor, pending.gradient)[self.shards[shard]]

    def discard(self, handle: Handle) -> None:
        key = (handle.source, handle.incarnation, handle.iteration)
        pending = self.pending[key]
        pending.uses -= 1
        if pending.uses == 0:
            del self.pending[key]

    def _compute(self) -> None:
        outstanding = [pending for pending in self.pending.values() if pending.gradient is None]
        for first in range(0, len(outstanding), AT_ONCE):
            batch = outstanding[first : first + AT_ONCE]
            samples = torch.from_numpy(np.stack([pending.samples for pending in batch]))
            parameters = torch.stack([pending.parameters for pending in batch])
            gradients = self.batched(parameters, self.x[samples], self.y[samples])
            for pending, gradient in zip(batch, gradients, strict=True):
                pending.gradient = gradient
