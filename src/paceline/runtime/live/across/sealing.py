"""Messages between a worker and a server on different hosts say for whom they are: a run, and a life of the server.

What was said in another run, or to a life of the server that is over, is not heard. On one host the folder and the
path of the socket see to that.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from paceline.runtime.live.wire import encode


class Sealed(Struct, frozen=True, array_like=True):
    run: str
    life: int
    message: msgspec.Raw


unseal = msgspec.msgpack.Decoder(Sealed).decode


def seal(run: str, life: int, message: bytes) -> bytes:
    """An encoded message, ready for another host."""
    return encode(Sealed(run, life, msgspec.Raw(message)))
