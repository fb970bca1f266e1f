"""What carries the messages of listeners and links between hosts (`messaging/remote_links.py`): TCP, in the thread that
uses it or in one of its own (`messaging/tcp_transport.py`).

A message is sent as parts of at most `FRAME` bytes: a header, and frames behind it. It arrives whole or not at all.
Connections that begin and end are reported beside the messages, as events.
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
    """A part may lie in several places."""

FRAME = 1 << 20
"""Bytes of the largest frame. The connection that sends a larger one is closed."""
SPARE = 1 << 10
"""How many more frames a message may have than full ones would need, since some are shorter."""
HANDSHAKE_S = 3.0
"""Whoever has not identified itself by then is disconnected."""
BROKE_OFF = "broke off: it may have another key, or keys where we have none, or be busy"
UNREACHED = "cannot be reached"
DAMAGED = "sent something that was damaged on its way; such connections are closed, and it is sent again"
UNKNOWN_KEY = "does not know this key"
Bound = TypeVar("Bound")
HELLO: Sequence[Buffer] = (b"",)
"""The first message of a client: a listener cannot answer whom it has not heard."""


class ConnectionClosed(Exception):
    """The connection has ended, or nothing that comes over it is to be believed any more. It may say why."""


class ConnectionEvent(enum.Enum):
    """What can happen to a connection."""

    ACCEPTED = enum.auto()
    """A listener has accepted a connection, and does not know yet whose it is."""
    ESTABLISHED = enum.auto()
    """A client was admitted."""
    CLOSED = enum.auto()
    """A connection, or a client's attempt to connect, has ended."""


class ReceivedMessage(Struct, frozen=True):
    """A message as it was received."""

    route: bytes
    """How its sender is answered: its public key as text or, without keys, its name; "" at a client."""
    descriptor: int
    """The descriptor of the connection it came over."""
    parts: Sequence[Buffer]
    whole: bool
    """False if the message was truncated because of its size."""

    @property
    def is_hello(self) -> bool:
        return len(self.parts) == 1 and not len(memoryview(self.parts[0]))

    def opened(self) -> tuple[bytes, list[memoryview]] | None:
        """The header and the frames; None of a hello, and of a truncated message."""
        if not self.whole or self.is_hello:
            return None
        parts = [memoryview(part) for part in self.parts]
        if parts[0].nbytes:
            return bytes(parts[0]), parts[1:]
        end = 2 + int.from_bytes(parts[1][:4], "little")
        return b"".join(parts[2:end]), parts[end:]


def wrapped(message: bytes, frames: Sequence[Part]) -> Sequence[Part]:
    """The parts of a message. An oversized header is sent as an empty part, a count, and then its chunks."""
    if 0 < len(message) <= FRAME:
        return (message, *frames)
    chunks = [message[at : at + FRAME] for at in range(0, len(message), FRAME)]
    return (b"", len(chunks).to_bytes(4, "little"), *chunks, *frames)


def first_free(host: str, ports: tuple[int, int], bind: Callable[[str, int], Bound]) -> Bound:
    """Returns what `bind(interface, port)` returns for the first port of the range that is free."""
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


class Transport(Protocol):
    """A listener's socket or a client's, and an epoll that is ready when something may have happened to it."""

    epoll: select.epoll

    def listen(self, host: str, ports: tuple[int, int]) -> int:
        """Listens on the first free port of the range, and returns it."""

    def connect(self, address: str, name: bytes, server_key: str) -> None:
        """Makes one attempt to connect, in place of any connection before. Its success or its end is an event."""

    def events(self) -> Iterator[tuple[ConnectionEvent, int, str]]:
        """What has happened to connections since the last call: the event, the descriptor, and why."""

    def send(self, route: bytes, parts: Sequence[Part], may_change: bool = False) -> bool:
        """Sends a message; false if nobody is at the other end of the route, or too much waits for it.

        The memory of `parts` must not change before it has arrived, unless it is said that it `may_change`.
        """

    def is_sending(self, route: bytes) -> bool:
        """Whether something of what was sent there has not left, or is on its way."""

    def patience_s(self, route: bytes) -> float:
        """How much longer than usual somebody at the end of this route may be silent, as the line is."""

    def receive(self) -> ReceivedMessage | None:
        """Returns the next message, if there is one."""

    def wait(self, timeout_s: float) -> bool:
        """Waits until something may have come, or can leave; false if nothing did within the time."""

    def rest_s(self) -> float:
        """How long the transport can be left alone if nothing comes."""

    def close_connections(self, linger_ms: int) -> None:
        """Closes all connections, and keeps the rest."""

    def close(self, linger_ms: int) -> None: ...
