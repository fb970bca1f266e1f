"""A worker's shared memory: its segment, and the way in and out.

On the CPU the model's tensors become views of the segment (`adopt`): what the servers write there is in the
model, without a copy. Gradients that come while backward still reads the model (`overlap`) therefore have a
segment of their own. A model on a GPU has memory of its own instead: its segment is pinned, and `transfer` copies.

Where a server steps the parameters for all to read (`Door.common`), the model is views of those instead, through a
window (`window.py`), and the segment holds gradients only.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from paceline.runtime.live import memory
from paceline.runtime.live.worker import cuda, staging
from paceline.runtime.live.worker.window import Window
from paceline.tensors.assignment import Ranges
from paceline.tensors.layout import Layout


class Segments:
    """The memory that worker `rank`, in its `incarnation`, shares with the servers."""

    def __init__(
        self, folder: Path, rank: int, incarnation: int, layout: Layout, tensors: Sequence[Tensor], overlap: bool
    ) -> None:
        self.folder = folder
        self.rank = rank
        self.layout = layout
        self.tensors = tensors
        self.own = memory.create(memory.segment_path(folder, rank, incarnation), layout)
        self.parameters = self.own
        self.views = layout.views(self.parameters)
        self.lanes = cuda.lanes_for(tensors)
        self.in_place = not self.lanes and all(tensor.device.type == "cpu" for tensor in tensors)
        self.adopted = False
        self.window: Window | None = None
        self.gradient = self.own
        if overlap and self.in_place:
            self.gradient = memory.create(memory.staging_path(folder, rank, incarnation), layout)
        self.transfer = staging.Transfer(tensors, layout.views(self.gradient), self.views, self.lanes)
        self.pinned: list[Tensor] = []
        self._pin(self.own)

    def _pin(self, segment: Tensor) -> None:
        if not self.lanes:
            return
        problem = cuda.pin(segment, next(iter(self.lanes)))
        if problem:
            print(f"worker {self.rank}: copies from and to the GPU are slow: {problem}", file=sys.stderr)
        else:
            self.pinned.append(segment)

    def adopt(self) -> None:
        """Once the first parameters are there: have the model's tensors be views of them, on the CPU."""
        self.adopted = True
        if self.in_place:
            for tensor, view in zip(self.tensors, self.views, strict=True):
                tensor.data = view

    def share(self) -> None:
        """Look for the parameters where the server steps them: a model on a GPU copies from there."""
        if self.parameters is not self.own:
            return
        path = self.folder / memory.COMMON
        # The server that said so may be gone by now, and its segment: then the next one says something else.
        with contextlib.suppress(FileNotFoundError):
            if self.in_place:
                self.window = Window(path, self.layout)
                self._look_in(self.window.vector)
            else:
                common = memory.attach(path, self.layout)
                self._pin(common)
                self._look_in(common)

    def unshare(self, handing_in: bool) -> None:
        """Look for them in this worker's own segment.

        While it is `handing_in` a gradient, that is what the segment holds until the answer; else a model on the CPU
        takes its parameters along.
        """
        if self.parameters is self.own:
            return
        self.transfer.settle()
        if self.in_place and not handing_in:
            self.own.copy_(self.parameters)
        if self.window is not None:
            self.window.close()
            self.window = None
        self._look_in(self.own)

    def _look_in(self, segment: Tensor) -> None:
        self.parameters = segment
        self.views = self.layout.views(segment)
        self.transfer.parameters = self.views
        if self.adopted:
            self.adopt()

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
        for segment in self.pinned:
            cuda.unpin(segment)
        if self.window is not None:
            self.window.close()
