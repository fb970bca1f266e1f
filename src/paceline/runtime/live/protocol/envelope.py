"""The envelope of messages between a worker and a server of different hosts: the run and the server's incarnation.

Messages of another run, or to an earlier incarnation of the server, are refused. On one host the folder and the path of
the socket ensure that.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from paceline.runtime.live.protocol.wire import encode


class Envelope(Struct, frozen=True, array_like=True):
    run: str
    incarnation: int
    message: msgspec.Raw


unwrap = msgspec.msgpack.Decoder(Envelope).decode


def wrap(run: str, incarnation: int, message: bytes) -> bytes:
    """Encodes a message for another host."""
    return encode(Envelope(run, incarnation, msgspec.Raw(message)))
