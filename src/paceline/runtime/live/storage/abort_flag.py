"""A word of shared memory by which the scheduler aborts a worker's computation.

A hook that runs before each layer cannot wait for a socket, and on a GPU it runs in a thread of autograd's. So the
driver's process, where the scheduler is, writes the iteration to abort into a small file of the run's folder that the
worker has mapped; reading it costs a tenth of a microsecond. Eight aligned bytes are written at once, and only the
newest value matters: nothing can queue up, and an iteration that is over is ignored.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from paceline.core.messages import Resync, View

SIZE = 8


class AbortFlag:
    """The word of one worker: `word[0]` is the iteration that was aborted last, plus 1, and 0 before that."""

    def __init__(self, path: Path, create: bool = False) -> None:
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        try:
            if create:
                os.posix_fallocate(descriptor, 0, SIZE)
            self.memory = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        self.word = memoryview(self.memory).cast("q")

    def set(self, iteration: int) -> None:
        self.word[0] = iteration + 1

    def close(self) -> None:
        self.word.release()
        self.memory.close()


class AbortFlags:
    """The driver's side: the flags of the workers of its host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.flags: dict[tuple[int, int], AbortFlag] = {}
        """The flags that are open, by (worker, incarnation)."""

    def set(self, resync: Resync) -> None:
        """Aborts a computation. A worker without a flag cannot be interrupted, or is gone."""
        process = (resync.worker, resync.incarnation)
        flag = self.flags.get(process)
        if flag is None:
            try:
                flag = self.flags[process] = AbortFlag(path(self.folder, *process))
            except FileNotFoundError:
                return
        flag.set(resync.iteration)

    def announce(self, view: View) -> None:
        """Closes the flags of workers that are not in the view."""
        for process in self.flags.keys() - set(view.members):
            self.flags.pop(process).close()

    def close(self) -> None:
        self.announce(View(0, ()))


def path(folder: Path, worker: int, incarnation: int) -> Path:
    return folder / f"worker-{worker}.{incarnation}-abort"
