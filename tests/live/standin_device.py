"""A device of memory that is shared by descriptors, as a GPU's is, on the CPU: so the same code runs without a GPU."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paceline.runtime.live.storage import device_segments


class StandinDevice:
    """Memory in anonymous files. Its tensors are on the CPU."""

    place = torch.device("cpu")

    def __init__(self, name: str = "standin:0") -> None:
        self.name = name

    def allocate(self, nbytes: int) -> tuple[Tensor, int]:
        descriptor = os.memfd_create("standin", os.MFD_CLOEXEC)
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(descriptor, size)
        return self.open(descriptor, size, True), descriptor

    def open(self, descriptor: int, nbytes: int, writes: bool) -> Tensor:
        # Read-only memory cannot become a tensor without a warning: a private map cannot change the others' either.
        kind = mmap.MAP_SHARED if writes else mmap.MAP_PRIVATE
        return torch.frombuffer(mmap.mmap(descriptor, nbytes, flags=kind), dtype=torch.uint8)

    def free_bytes(self) -> int:
        return 1 << 40

    def settle(self) -> None:
        """The CPU does at once what it is given."""


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has models on the CPU count as on a device, in this process and the forks that it makes."""

    def device_of(tensors: Sequence[Tensor]) -> StandinDevice:
        return StandinDevice()

    monkeypatch.setitem(device_segments.KINDS, "standin", StandinDevice)
    monkeypatch.setattr(device_segments, "device_of", device_of)
