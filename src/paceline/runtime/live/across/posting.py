"""What listeners and links between hosts (`far.py`) post messages through: ZeroMQ with keys (`zeromq.py`), plain TCP
without (`plain.py`).

A message is posted as parts of at most `FRAME` bytes: what is said, and frames behind it. It arrives whole or not at
all. What happens to connections is told beside the messages.
"""

from __future__ import annotations

import enum
import errno
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from msgspec import Struct

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Part = Buffer | tuple[Buffer, ...]
    """It may lie in several places; with keys it is copied then."""

FRAME = 1 << 20
"""Bytes of the largest frame. The connection that sends a larger one is closed."""
SLACK = 1 << 10
"""What encryption adds to a frame, and more."""
SPARE = 1 << 10
"""Frames of a message that need not be full."""
HANDSHAKE_S = 3.0
"""Who has not said by then who it is, is cut off."""
BROKE_OFF = "broke off: it may have another key, or keys where we have none, or be busy"
UNREACHED = "cannot be reached"
Bound = TypeVar("Bound")
HELLO: Sequence[Buffer] = (b"",)
"""The first message of a caller: a listener cannot answer whom it has not heard."""


class Happening(enum.Enum):
    """What happens to a connection."""

    BEGUN = enum.auto()
    """A listener has accepted it. Nobody knows whose it is."""
    STANDS = enum.auto()
    """A caller was let in."""
    OVER = enum.auto()
    """It ended, or a caller's attempt did."""


class Taken(Struct, frozen=True):
    """A message as it came."""

    route: bytes
    """How its sender is answered; "" at a caller. Without keys, the sender's name."""
    descriptor: int
    """Of the connection it came over."""
    key: str
    """The public key of its sender, if there are keys."""
    parts: Sequence[Buffer]
    whole: bool
    """These are all parts. Of a message that is too large few are, or none."""

    @property
    def is_hello(self) -> bool:
        return len(self.parts) == 1 and not len(memoryview(self.parts[0]))

    def opened(self) -> tuple[bytes, list[memoryview]] | None:
        """The message and its frames; None if it is none."""
        if not self.whole or self.is_hello:
            return None
        parts = [memoryview(part) for part in self.parts]
        if parts[0].nbytes:
            return bytes(parts[0]), parts[1:]
        end = 2 + int.from_bytes(parts[1][:4], "little")
        return b"".join(parts[2:end]), parts[end:]


def wrapped(message: bytes, frames: Sequence[Part]) -> Sequence[Part]:
    """The parts of a message. A header that is larger than a frame travels in pieces: nothing, how many, they."""
    if 0 < len(message) <= FRAME:
        return (message, *frames)
    pieces = [message[at : at + FRAME] for at in range(0, len(message), FRAME)]
    return (b"", len(pieces).to_bytes(4, "little"), *pieces, *frames)


def first_free(host: str, ports: tuple[int, int], bind: Callable[[str, int], Bound]) -> Bound:
    """What `bind(interface, port)` makes of the first port of the range that is free."""
    first, last = ports
    try:
        interface = socket.gethostbyname(host)
        for port in range(first, last + 1):
            try:
                return bind(interface, port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
    except OSError as error:
        raise PacelineError(f"cannot listen on {host!r}, ports {first} to {last}: {error.strerror}") from None
    raise PacelineError(f"cannot listen on {host!r}: every port from {first} to {last} is taken")


class Post(Protocol):
    """A listener's socket or a caller's, and something to wait for whatever happens to it."""

    epoll: select.epoll

    def listen(self, host: str, ports: tuple[int, int]) -> int:
        """On the first free port of the range; which that is."""

    def call(self, address: str, name: bytes, server_key: str) -> None:
        """Once, in place of any call before: whether it stands, and when it is over, is told."""

    def admit(self, is_known: Callable[[str], bool]) -> None:
        """Let in those who ask to be and whose key is known, and nobody else."""

    def happened(self) -> Iterator[tuple[Happening, int, str]]:
        """What has happened to connections: what, the descriptor, why."""

    def send(self, route: bytes, parts: Sequence[Part], passing: bool = False) -> bool:
        """False if it does not leave: nobody is at the other end of the route, or too much waits for it.

        What is in `parts` must not change before it has arrived, unless it is `passing`: then it may at once.
        """

    def take(self) -> Taken | None:
        """The next message, if there is one."""

    def wait(self, timeout_s: float) -> bool:
        """Until something may have come, or can leave; False if that is not so within the time."""

    def rest_s(self) -> float:
        """How long this can be left alone if nothing comes."""

    def shut(self, linger_ms: int) -> None:
        """Close the socket, not the rest."""

    def close(self, linger_ms: int) -> None: ...
