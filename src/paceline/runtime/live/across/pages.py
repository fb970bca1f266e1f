"""Have the C library keep freed memory for the next message, instead of giving it back to the kernel.

A gradient or the parameters of a large model come as a great many bytes, all freed again a moment later. By default
glibc gives them back, and the next message begins with thousands of page faults: a quarter of the processor time of an
exchange of 40 MB.
"""

from __future__ import annotations

import contextlib
import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
AT_LEAST = 1 << 26
LARGEST_CHUNK = 1 << 25
"""Bytes from which on memory is always mapped for itself: where glibc's own rule ends up."""


def keep_freed(nbytes: int) -> None:
    """Up to so many bytes that are freed stay with this process. Other C libraries are left alone."""
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_CHUNK)
        libc.mallopt(M_TRIM_THRESHOLD, min(max(nbytes, AT_LEAST), (1 << 31) - 1))
