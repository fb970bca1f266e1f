"""Segments in the memory of a device, which processes of one host share, by a path as those in shared memory.

The rules of ownership are those of `shared_memory.py`. The device works through what a process gives it by itself, so a
process says that memory is another's only when the device has done what it was given (`MemoryDevice.settle`): nobody
waits on a device for a process that may be gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.runtime.live.storage import shared_memory
from paceline.runtime.live.storage.cuda_memory import CudaDevice
from paceline.runtime.live.storage.shared_descriptors import DescriptorServer, fetch
from paceline.tensors.layout import Entry, Layout


class MemoryDevice(Protocol):
    """A device whose memory processes of one host can share."""

    name: str
    """The same in every process."""
    place: torch.device
    """How this process calls it."""

    def allocate(self, nbytes: int) -> tuple[Tensor, int]:
        """Returns new memory, as bytes, and a descriptor by which others map it; it lasts while anybody has it."""

    def open(self, descriptor: int, nbytes: int, writes: bool) -> Tensor:
        """Maps memory that another process made."""

    def free_bytes(self) -> int: ...

    def settle(self) -> None:
        """Returns when the device has done what this thread has given it."""


KINDS: dict[str, Callable[[str], MemoryDevice]] = {"cuda": CudaDevice.named}
"""What returns a device by its name, by what the name begins with."""


def device_named(name: str) -> MemoryDevice:
    kind = name.partition(":")[0]
    if kind not in KINDS:
        raise PacelineError(f"there is no device {name!r} here")
    return KINDS[kind](name)


def device_of(tensors: Sequence[Tensor]) -> MemoryDevice | None:
    """Returns the one device that holds all tensors, if it is one whose memory can be shared."""
    places = {tensor.device for tensor in tensors}
    place = places.pop()
    return CudaDevice.at(place.index) if not places and place.type == "cuda" else None


PROBE = Layout((Entry("probe", (1,), 0),), "float32")
PROBED = 0.7310585975646973
"""What is in a probe."""


def check_probe(path: Path) -> None:
    """Refuses a device if the memory that another process has made there cannot be read."""
    if attach(path, PROBE).item() != PROBED:
        raise PacelineError("what another process writes to the device's memory cannot be read")


class DeviceSegments:
    """The segments that this process has made, and those of others."""

    def __init__(self) -> None:
        self.offers = DescriptorServer()

    def create(self, path: Path, layout: Layout, device: MemoryDevice) -> Tensor:
        """Makes a segment of zeros that holds one flat vector."""
        memory, descriptor = device.allocate(max(layout.numel * layout.itemsize, 1))
        vector = as_vector(memory, layout).zero_()
        device.settle()
        self.offers.offer(path, descriptor, f"{memory.nbytes} {device.name}")
        return vector

    def create_probe(self, path: Path, device: MemoryDevice) -> None:
        """Makes a segment by which another process finds out whether it can map this one's."""
        self.create(path, PROBE, device).fill_(PROBED)
        device.settle()

    def remove(self, path: Path) -> None:
        """Hands out a segment of this process's no more; who has it mapped keeps it."""
        self.offers.withdraw(path)


def attach(path: Path, layout: Layout, writes: bool = True) -> Tensor:
    """Maps the vector of a segment that another process made, in shared memory or on a device."""
    if not path.is_socket():
        return shared_memory.attach(path, layout)
    descriptor, words = fetch(path)
    try:
        nbytes, _, name = words.partition(" ")
        memory = device_named(name).open(descriptor, int(nbytes), writes)
    finally:
        os.close(descriptor)
    if memory.nbytes < layout.numel * layout.itemsize:
        raise PacelineError(f"a segment has {memory.nbytes} bytes, the layout needs {layout.numel * layout.itemsize}")
    return as_vector(memory, layout)


def as_vector(memory: Tensor, layout: Layout) -> Tensor:
    return memory[: layout.numel * layout.itemsize].view(layout.torch_dtype)
