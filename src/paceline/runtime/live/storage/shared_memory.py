"""Shared memory as files: a folder for the run, a segment for each worker.

A worker's segment holds one flat vector. It is the worker's push buffer and its pull buffer: between its push
and the answer the slice belongs to the shard, at all other times to the worker. So nobody ever reads what
somebody else writes, without locks, fences or a second buffer. A worker that sends gradients while backward
reads its parameters in place (`overlap=True` on the CPU) has one more segment for them: shards only read it.

Under a policy that never changes parameters while somebody computes (BSP), one server on one host steps them in a
segment that all workers read (`COMMON`): theirs then hold gradients only, and nothing is written back. As soon as the
server is another one, or there are more, everybody goes back to a segment of their own.

Files are mapped directly: `multiprocessing.shared_memory` on Python 3.11 unlinks segments others still use.
The space is reserved at once (`posix_fallocate`), since a full /dev/shm would otherwise kill a process later.
The driver holds a lock on the folder; a folder whose lock is free belongs to nobody and is removed at the next start.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import stat
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.folder_lock import is_in_use as is_in_use
from paceline.runtime.live.storage import abort_flag
from paceline.tensors.layout import Layout

PREFIX = "paceline-"
MAKING = ".paceline-"
WHOLE = "whole"
"""The name of the segment with the whole model: worker 0's values at the beginning, the servers' at the end."""
AVERAGE = "average"
"""The name of the segment for the servers' moving average of the model, if they keep one. It is made at the beginning
too, so that what is enough memory then is enough at the end."""
COMMON = "common"
"""The name of the segment in which a server steps the parameters that all workers read."""
INITIAL_STATE = "initial-state"
"""The name of the file with the state that worker 0's optimizer has before the run, if any."""


def base_folder() -> Path:
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


class RunFolder:
    """The folder of one live run, with its sockets, segments and configuration. It is removed at the end of the run."""

    def __init__(self) -> None:
        remove_stale()
        # Locked before it has the name by which others look for what nobody owns.
        making = Path(tempfile.mkdtemp(prefix=f"{MAKING}{os.getpid()}-", dir=base_folder()))
        self.lock = os.open(making / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.path = making.with_name(PREFIX + making.name.removeprefix(MAKING))
        making.rename(self.path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def remove_stale() -> list[Path]:
    """Removes what killed runs left behind, and nothing of a live run."""
    removed = stale()
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)
    return removed


def stale() -> list[Path]:
    """Lists the folders of runs that have ended: nobody holds their lock."""
    return [folder for folder in base_folder().glob(PREFIX + "*") if _is_stale(folder)]


def _is_stale(folder: Path) -> bool:
    try:
        return folder.stat().st_uid == os.getuid() and (folder / "lock").exists() and not is_in_use(folder)
    except OSError:
        return False


def is_run_folder(folder: Path) -> bool:
    """Whether this is the folder of a run of this user, in shared memory. It is not opened."""
    try:
        status = folder.lstat()
    except (OSError, ValueError):
        return False
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return ours and folder.parent == base_folder() and folder.name.startswith(PREFIX)


def segment_path(folder: Path, worker: int, incarnation: int) -> Path:
    """Returns the path of a worker's segment."""
    return folder / f"worker-{worker}.{incarnation}"


def staging_path(folder: Path, worker: int, incarnation: int) -> Path:
    """Returns the path of a worker's segment for gradients, if they have one of their own."""
    return folder / f"worker-{worker}.{incarnation}-staging"


def create(path: Path, layout: Layout) -> Tensor:
    """Makes a segment that holds one flat vector."""
    buffer = reserve(path, max(layout.numel * layout.itemsize, 1))
    # The map lives as long as the tensor: torch keeps a reference to the buffer.
    return torch.frombuffer(buffer, dtype=layout.torch_dtype, count=layout.numel)


def reserve(path: Path, nbytes: int) -> mmap.mmap:
    """Makes a file in shared memory, and maps it."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        return mmap.mmap(descriptor, nbytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno != errno.ENOSPC:
            raise
        free = shutil.disk_usage(path.parent).free
        raise PacelineError(
            f"no room for {nbytes / 1e6:.1f} MB of shared memory in {path.parent.parent} "
            f"({free / 1e6:.1f} MB free): free some, or enlarge it (mount -o remount,size=...)"
        ) from None
    finally:
        os.close(descriptor)


def remove(folder: Path, rank: int, incarnation: int) -> None:
    """Removes the segments of a worker that has ended; servers that still use them have them mapped."""
    segment_path(folder, rank, incarnation).unlink(missing_ok=True)
    staging_path(folder, rank, incarnation).unlink(missing_ok=True)
    abort_flag.path(folder, rank, incarnation).unlink(missing_ok=True)


def attach(path: Path, layout: Layout) -> Tensor:
    """Maps the vector of a segment that another process made."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        return _map(descriptor, layout)
    finally:
        os.close(descriptor)


def _map(descriptor: int, layout: Layout) -> Tensor:
    nbytes = max(layout.numel * layout.itemsize, 1)
    size = os.fstat(descriptor).st_size
    if size != nbytes:
        raise PacelineError(f"a segment has {size} bytes, the layout needs {nbytes}")
    # The map lives as long as the tensor: torch keeps a reference to the buffer.
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=layout.torch_dtype, count=layout.numel)
