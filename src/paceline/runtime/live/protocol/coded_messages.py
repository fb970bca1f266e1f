"""Parameters in a code, from a server to a worker of another host."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from paceline.core.messages import Parameters
from paceline.runtime.live.protocol.wire import Fetched

NOTHING_HELD = 0
"""The number of no parameters."""


class CodedParameters(Struct, frozen=True, array_like=True, tag=True):
    """Parameters in a code, as the difference from those numbered `base`; with it they are `number`.

    From nothing they come as they are. The frames are behind this message.
    """

    parameters: Parameters
    number: int
    base: int


RemoteAnswer = Fetched | Parameters | CodedParameters
decode_remote_answer = msgspec.msgpack.Decoder(RemoteAnswer).decode
