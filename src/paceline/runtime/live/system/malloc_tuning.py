"""How the C library is made to keep freed memory for the next message, instead of giving it back to the kernel.

The bytes of a gradient, or of the parameters of a large model, are freed again a moment after they came. By default
glibc gives them back, and the next message begins with thousands of page faults: a quarter of the processor time of an
exchange of 40 MB.
"""

from __future__ import annotations

import contextlib
import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
AT_LEAST = 1 << 26
LARGEST_CHUNK = 1 << 25
"""The size in bytes from which memory is always mapped separately: where glibc's own rule ends up."""


def keep_freed(nbytes: int) -> None:
    """Has this process keep up to so many freed bytes; C libraries other than glibc are left alone."""
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_CHUNK)
        libc.mallopt(M_TRIM_THRESHOLD, min(max(nbytes, AT_LEAST), (1 << 31) - 1))
