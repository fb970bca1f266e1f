"""The workers' segments, mapped by a server one after another: gradients at equal distances are one matrix.

That makes their mean one product (`tensors/columns.py`). Each rank has a place in a range of addresses; the segment of
the rank's process is mapped there. Whoever finds its place taken, by a process before it whose last gradient is still
needed, or has none, being one of more workers than there were at first, is mapped elsewhere, and added up.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from paceline.runtime.live import memory
from paceline.tensors.layout import Layout

NOWHERE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
MAP_NORESERVE = 0x4000
MAP_FIXED = 0x10
NO_ACCESS = 0
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


class Rack:
    def __init__(self, places: int, layout: Layout) -> None:
        self.layout = layout
        self.distance = -(-memory.nbytes_of(layout) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.taken: dict[int, int] = {}
        """The incarnation whose segment is in each rank's place."""
        self.places = places
        if places:
            # Addresses only: nothing is written there before a segment is. They are given back with the last tensor.
            try:
                room = mmap.mmap(-1, places * self.distance, NOWHERE | MAP_NORESERVE)
            except OSError:  # few addresses are allowed (ulimit -v)
                self.places = 0
            else:
                count = places * self.distance // layout.itemsize
                self.vector = torch.frombuffer(room, dtype=layout.torch_dtype, count=count)

    def attach(self, path: Path, rank: int, incarnation: int) -> Tensor:
        """The vector in a worker's segment."""
        if rank >= self.places or self.taken.get(rank, incarnation) != incarnation:
            return memory.attach(path, self.layout)
        descriptor = os.open(path, os.O_RDWR)
        try:
            memory.check_size(descriptor, self.layout)
            self._put(rank, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor)
        finally:
            os.close(descriptor)
        self.taken[rank] = incarnation
        start = rank * self.distance // self.layout.itemsize
        return self.vector[start : start + self.layout.numel]

    def clear(self, rank: int, incarnation: int) -> None:
        """This worker's segment is not needed any more."""
        if self.taken.get(rank) == incarnation:
            self._put(rank, NO_ACCESS, NOWHERE, -1)
            del self.taken[rank]

    def _put(self, rank: int, access: int, flags: int, descriptor: int) -> None:
        where = self.vector.data_ptr() + rank * self.distance
        if libc.mmap(where, self.distance, access, flags | MAP_FIXED, descriptor, 0) != where:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
