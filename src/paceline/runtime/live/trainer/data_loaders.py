"""What can be found out about the `DataLoader` that draws from a sampler: its batches, and whether it draws ahead."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple
from weakref import ref

from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

FRAMES = 16
"""How many of its callers a sampler looks at to find its loader."""


class Loader(NamedTuple):
    """What is known of the loader that draws; of one that is not torch's own nothing is."""

    whole: int = 1
    """The size of its batches, if it drops others."""
    batch: int | None = None
    ahead: _MultiProcessingDataLoaderIter | None = None
    """The iterator of a loader with processes of its own, which draws ahead of the loop; it knows how far the loop is.
    """

    def used(self) -> Callable[[], int] | None:
        """Returns a function that tells how many samples the loop has got so far.

        Returns None if the loader does not know better than the sampler.
        """
        if self.ahead is None or self.batch is None or not hasattr(self.ahead, "_rcvd_idx"):
            return None
        batch, alive = self.batch, ref(self.ahead)

        def used() -> int:
            ahead = alive()
            # A loop that was left uses nothing more.
            return 0 if ahead is None else int(ahead._rcvd_idx) * batch

        return used


def find_loader() -> Loader:
    """Returns what is known of the loader among the callers of this function."""
    found = Loader()
    frame: FrameType | None = sys._getframe(1)
    for _ in range(FRAMES):
        if frame is None:
            break
        caller = frame.f_locals.get("self")
        if isinstance(caller, BatchSampler):
            found = found._replace(batch=caller.batch_size, whole=caller.batch_size if caller.drop_last else 1)
        elif isinstance(caller, _MultiProcessingDataLoaderIter):
            # Without batches it draws sample by sample.
            found = found._replace(ahead=caller, batch=found.batch or (None if caller._auto_collation else 1))
        frame = frame.f_back
    return found
