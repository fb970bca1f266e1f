"""The checksum of messages that travel without keys: the CRC-32 of zlib, over `_checksum.c` if that is there.

Both compute the same, so a host that has no compiler, or a processor without carry-less multiplication, understands
the others: it is only slower.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.runtime.live.messaging import _checksum
else:
    try:
        from paceline.runtime.live.messaging import _checksum
    except ImportError:
        _checksum = zlib

crc32 = _checksum.crc32
"""crc32(data, value=0): the checksum of these bytes, or of them behind others of which `value` is the checksum."""


def are_fast() -> bool:
    """Whether the compiled loop is there, and the processor can run it."""
    return crc32 is not zlib.crc32
