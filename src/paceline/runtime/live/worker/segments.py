"""A worker's shared memory: its segment, and the way in and out.

On the CPU the model's tensors become views of the segment (`adopt`): what the servers write there is in the
model, without a copy. Gradients that come while backward still reads the model (`overlap`) therefore have a
segment of their own. A model on a GPU has memory of its own instead: its one segment is pinned, and `transfer`
copies.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from paceline.runtime.live import memory
from paceline.runtime.live.worker import cuda, staging
from paceline.tensors.assignment import Ranges
from paceline.tensors.layout import Layout


class Segments:
    """The memory that worker `rank`, in its `incarnation`, shares with the servers."""

    def __init__(
        self, folder: Path, rank: int, incarnation: int, layout: Layout, tensors: Sequence[Tensor], overlap: bool
    ) -> None:
        self.layout = layout
        self.tensors = tensors
        self.parameters = memory.create(memory.segment_path(folder, rank, incarnation), layout)
        self.views = layout.views(self.parameters)
        lanes = cuda.lanes_for(tensors)
        self.in_place = not lanes and all(tensor.device.type == "cpu" for tensor in tensors)
        self.gradient = self.parameters
        if overlap and self.in_place:
            self.gradient = memory.create(memory.staging_path(folder, rank, incarnation), layout)
        self.transfer = staging.Transfer(tensors, layout.views(self.gradient), self.views, lanes)
        problem = cuda.pin(self.parameters, next(iter(lanes))) if lanes else ""
        self.pinned = bool(lanes) and not problem
        if problem:
            print(f"worker {rank}: copies from and to the GPU are slow: {problem}", file=sys.stderr)

    def adopt(self) -> None:
        """Once the first parameters are there: have the model's tensors be views of the segment, on the CPU."""
        if self.in_place:
            for tensor, view in zip(self.tensors, self.views, strict=True):
                tensor.data = view

    def moved(self, index: int) -> bool:
        """Whether the script has given this tensor other memory."""
        return self.in_place and self.tensors[index].data_ptr() != self.views[index].data_ptr()

    def restore(self, part: Ranges, gradients: Sequence[Tensor | None]) -> None:
        """Write a shard's part of the gradient again: a server that is gone may have written over half of it.

        In a segment of their own gradients stay as they are: no shard writes there.
        """
        if self.gradient is self.parameters and gradients:
            staging.write_slice(gradients, self.gradient, self.layout, part)

    def close(self) -> None:
        self.transfer.settle()
        if self.pinned:
            cuda.unpin(self.parameters)
