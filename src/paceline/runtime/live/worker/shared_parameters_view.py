"""A worker's view of parameters that a server steps in a segment for all to read.

The segment is mapped privately: the worker sees what the server writes, and what the script writes to its model is seen
by itself alone, and until its next step only, as if the model had memory of its own. (The kernel gives this process a
copy of a page when it writes to it, and from then on it would not see the server's any more. So before parameters are
used again, such copies are dropped. There can be none if this process had no page fault since the last refresh;
otherwise /proc/self/pagemap knows: eight bytes a page to read, where dropping them unasked would have all pages mapped
again, one by one.)
"""

from __future__ import annotations

import mmap
import os
import resource
from pathlib import Path

import torch

from paceline.tensors.layout import Layout

PAGE = mmap.PAGESIZE
COPIED = -(1 << 63) + (1 << 61)
"""Below this, as a signed number, are the entries of pages that are present (bit 63), neither a file's nor shared (61)
nor swapped out (62): copies. From SWAPPED on are those that were swapped out."""
SWAPPED = 1 << 62


class SharedParametersView:
    """The vector in a file that another process writes, mapped privately."""

    def __init__(self, path: Path, layout: Layout) -> None:
        nbytes = max(layout.numel * layout.itemsize, 1)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            self.map = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_PRIVATE)
        finally:
            os.close(descriptor)
        self.vector = torch.frombuffer(self.map, dtype=layout.torch_dtype, count=layout.numel)
        self.offset = 8 * (self.vector.data_ptr() // PAGE)
        self.buffer = bytearray(8 * -(-nbytes // PAGE))
        self.entries = torch.frombuffer(self.buffer, dtype=torch.int64)
        self.faults = 0
        """How many page faults this process had had at the last refresh; 0 if that is not known."""
        try:
            self.pagemap: int | None = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.pagemap = None

    def refresh(self) -> None:
        """Shows what the server has written, whatever the script has written to the model."""
        faults = page_faults()
        if faults != self.faults or not faults:
            self.faults = faults
            if self.written():
                self.map.madvise(mmap.MADV_DONTNEED)

    def written(self) -> bool:
        """Returns whether the script has written to the view; True if that cannot be found out."""
        if self.pagemap is None or os.preadv(self.pagemap, [self.buffer], self.offset) != len(self.buffer):
            return True
        lowest, highest = torch.aminmax(self.entries)
        return int(lowest) < COPIED or int(highest) >= SWAPPED

    def close(self) -> None:
        """Stops refreshing; existing tensors stay valid."""
        if self.pagemap is not None:
            os.close(self.pagemap)
            self.pagemap = None


def page_faults() -> int:
    """Returns how many page faults this process has had, in all its threads; 0 where nobody counts them."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_minflt + used.ru_majflt
