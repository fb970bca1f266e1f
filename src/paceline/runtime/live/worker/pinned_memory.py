"""The memory of a worker whose model is on a GPU: the segment is pinned, and streams copy from and to it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.runtime.live.storage import shared_memory
from paceline.runtime.live.worker import cuda_copies
from paceline.runtime.live.worker.copied_gradient import CopiedGradient
from paceline.runtime.live.worker.data_path import ParameterPath
from paceline.runtime.live.worker.staged_gradient import StagedGradient
from paceline.runtime.live.worker.stream_copies import CopyStream, StreamCopies
from paceline.runtime.live.worker.worker_memory import WorkerMemory
from paceline.tensors.layout import Layout

logger = logging.getLogger(__name__)


class CopiedParameters:
    """Copies the parameters from shared memory to the model, which has memory of its own."""

    def __init__(self, copies: StreamCopies, views: Sequence[Tensor]) -> None:
        self.load = copies.load
        self.close = copies.settle
        copies.settle()
        copies.parameters = views

    def first_moved(self) -> int | None:
        return None


class PinnedMemory(WorkerMemory):
    """Pinned shared memory of the host, for a worker whose model is on a GPU: gradients are copied there,
    parameters from there."""

    copies: StreamCopies

    def __init__(
        self,
        folder: Path,
        process: tuple[int, int],
        layout: Layout,
        tensors: Sequence[Tensor],
        overlap: bool,
        copy_streams: Mapping[torch.device, CopyStream],
    ) -> None:
        super().__init__(folder, layout, tensors)
        self.own = shared_memory.create(shared_memory.segment_path(folder, *process), layout)
        self.rank = process[0]
        self.pinned: list[Tensor] = []
        self.gradient = self.own
        views = layout.views(self.own)
        self.copies = StreamCopies(tensors, views, views, copy_streams)
        self.pin(self.own)
        self.parameters = self.own_parameters()
        staged = StagedGradient(layout, tensors, self.copies, self.early)
        self.path = self.from_segment = staged if overlap else CopiedGradient(self.copies)

    def own_parameters(self) -> ParameterPath:
        return CopiedParameters(self.copies, self.layout.views(self.own))

    def common_parameters(self, path: Path) -> ParameterPath:
        common = shared_memory.attach(path, self.layout)
        self.pin(common)
        return CopiedParameters(self.copies, self.layout.views(common))

    def settle(self) -> None:
        self.copies.settle()

    def load(self) -> None:
        super().load()
        self.versions = [tensor._version for tensor in self.tensors]

    def pin(self, segment: Tensor) -> None:
        """Registers a segment with the first GPU, for all: else copies are slower."""
        for device in list(self.copies.copy_streams)[:1]:
            problem = cuda_copies.pin(segment, device)
            if problem:
                logger.warning(f"worker {self.rank}: copies from and to the GPU are slow: {problem}")
            else:
                self.pinned.append(segment)

    def close(self) -> None:
        super().close()
        for segment in self.pinned:
            cuda_copies.unpin(segment)
