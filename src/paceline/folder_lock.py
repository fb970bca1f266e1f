"""Whether somebody holds the lock of a live run's folder in shared memory: its driver does as long as it lives."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def is_in_use(folder: Path) -> bool:
    """Whether a run that goes on holds the lock of this folder."""
    try:
        lock = os.open(folder / "lock", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(lock)
