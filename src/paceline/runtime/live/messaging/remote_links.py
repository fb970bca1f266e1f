"""Messages between hosts, over TCP: listeners and links, as `messaging/unix_sockets.py` has them within one.

A message is a header and any number of raw frames of at most `FRAME` bytes behind it, all of it or nothing. With keys
everything is encrypted, a listener admits nobody whose key was not enrolled, and the sender of a message is whom its
key was enrolled as; a name in a message is never believed. Without keys whoever reaches the port is believed.

A connection is never reopened behind its user's back: a link whose connection broke is `gone` until it is reopened, for
nobody can tell what of it arrived. Before it was established there is nothing to lose: a link that finds nobody, or
that is refused, tries again by itself for as long as somebody waits for it.

A host that is gone is noticed within three seconds; a program that hangs is not noticed at all.

A forked child must not touch what its parent made here, not even to close it. It holds the parent's connections too:
if the parent is killed and the child lives, the other ends do not see it (the driver does), and the port stays taken.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.errors import printable
from paceline.runtime.live.messaging.connection_registry import ConnectionRegistry
from paceline.runtime.live.messaging.keys import KeyPair, make_keys
from paceline.runtime.live.messaging.tcp_framing import FramePlacement
from paceline.runtime.live.messaging.tcp_transport import TcpTransport, ThreadedTransport
from paceline.runtime.live.messaging.transport import (
    DAMAGED,
    FRAME,
    HANDSHAKE_S,
    HELLO,
    ConnectionEvent,
    ReceivedMessage,
    Transport,
    wrapped,
)

if TYPE_CHECKING:
    from paceline.runtime.live.messaging.transport import Part

logger = logging.getLogger(__name__)

__all__ = ["FRAME", "KeyPair", "RemoteLink", "RemoteListener", "make_keys"]

LARGEST = 1 << 32
"""Bytes of the largest message, frames and all, unless a listener is told otherwise."""
ANSWER = 1 << 40
"""Bytes of the largest message that a link takes of its listener."""
QUEUE = 64
"""Messages that may wait for one process at each end, unless said otherwise; 0 for any number."""
BETWEEN = 32
"""Messages received before connections are looked after again."""
BACK_OFF_S = (0.1, 1.0)
"""The pause after a link's first failed attempt to connect, and the longest pause."""
ATTEMPT_S = 3 * HANDSHAKE_S
"""An attempt of which nothing is heard for so long is given up."""
LINGER_MS = 1000
"""How long the last messages may take to leave when a connection is closed."""


class RemoteListener:
    """Accepts any number of named processes on one port, and receives their messages while somebody waits for it.

    `ports` are the first and the last that may be used; (0, 0) leaves it to the system. A process for which more than
    `most_waiting` messages wait is disconnected. If it is `threaded`, messages come and leave while nobody waits.
    """

    def __init__(
        self,
        host: str,
        ports: tuple[int, int],
        keys: KeyPair | None,
        largest: int = LARGEST,
        most_waiting: int = QUEUE,
        threaded: bool = False,
    ) -> None:
        self.keys = keys
        self.largest = largest
        self.connections = ConnectionRegistry()
        self.inbox: deque[tuple[bytes, bytes, list[memoryview]]] = deque()
        self.ended: list[bytes] = []
        self.news = False
        """Whether somebody is gone and the waiter does not know."""
        self.received = 0
        self.warned: set[tuple[bytes, str]] = set()
        """Whose messages could not be read, and why, as far as it was logged."""
        transport = TcpTransport(keys, largest, most_waiting, is_known=self.connections.names.__contains__)
        self.transport: Transport = ThreadedTransport(transport) if threaded else transport
        try:
            self.port = self.transport.listen(host, ports)
        except BaseException:
            self.transport.close(0)
            raise

    def enrol(self, public: str, name: bytes) -> None:
        """Whoever has this key is this process, and nobody else is."""
        self.connections.enrol(public, name)

    def expel(self, name: bytes) -> None:
        """Forgets the key of a process and ends its connection."""
        self.connections.expel(name)

    def connected(self, name: bytes) -> bool:
        return name in self.connections.named

    def gone(self) -> list[bytes]:
        """Whose connection ended since the last call, when all that came over it has been received.

        Some may be back by now (`connected`).
        """
        ended, self.ended = self.ended, []
        return ended

    def receive(self) -> tuple[bytes, bytes, list[memoryview]] | None:
        """The next (name, message, frames)."""
        if self.inbox:
            return self.inbox.popleft()
        self.received += 1
        if self.received % BETWEEN == 0:
            self._update_connections()
        return self._receive()

    def send(self, name: bytes, message: bytes, frames: Sequence[Part] = (), may_change: bool = False) -> bool:
        """False if that process is not connected.

        The memory of `frames` must not change before they have arrived, unless it is said that it `may_change`.
        """
        connection = self.connections.named.get(name)
        if connection is None:
            return False
        if self.transport.send(connection.route, wrapped(message, frames), may_change):
            return True
        self.disconnect(name)
        return False

    def is_sending(self, name: bytes) -> bool:
        """Whether something of what was sent to that process has not left, or is on its way."""
        connection = self.connections.named.get(name)
        return connection is not None and self.transport.is_sending(connection.route)

    def patience_s(self, name: bytes) -> float:
        """How much longer than usual that process may be silent, as its line is."""
        connection = self.connections.named.get(name)
        return 0.0 if connection is None else self.transport.patience_s(connection.route)

    def disconnect(self, name: bytes) -> None:
        """Ends a connection over which nonsense came, or that is not read. The process may reconnect and repeat it."""
        if self.connections.disconnect(name):
            self.connections.ending.append(name)

    def fileno(self) -> int:
        """Readable when something may have come; before waiting for it, call `ready`."""
        return self.transport.epoll.fileno()

    def ready(self) -> bool:
        """Takes in what has come; whether there is a message, or somebody is gone who was not before."""
        self._update_connections()
        if not self.inbox and (message := self._receive()) is not None:
            self.inbox.append(message)
        news, self.news = self.news, False
        return news or bool(self.inbox)

    def rest_s(self) -> float:
        """How long this can be left alone if nothing comes."""
        return self.transport.rest_s()

    def close(self, discard: bool = False) -> None:
        """Closes all. What was sent last has a second to leave, or none with `discard`: it may not arrive."""
        self.transport.close(0 if discard else LINGER_MS)

    def _update_connections(self) -> None:
        """Takes note of connections that began or ended."""
        for event, descriptor, reason in self.transport.events():
            if event is ConnectionEvent.ACCEPTED:
                self.connections.accepted(descriptor)
                continue
            if reason == DAMAGED:
                self._warn(self.connections.at.get(descriptor, b"somebody"), reason)
            self.connections.closed(descriptor)

    def _receive(self) -> tuple[bytes, bytes, list[memoryview]] | None:
        """The next message of somebody who has a name."""
        while (received := self.transport.receive()) is not None:
            name = self._name(received)
            if name is None:
                continue
            if received.is_hello or not self.connections.is_on(name, received.route):
                self._update_connections()  # or a descriptor's last connection could end this one
                self.connections.identify(name, received.route, received.descriptor)
            message = received.opened()
            if message is not None:
                return (name, *message)
            if not received.whole:
                self._warn(name, f"sent more than {self.largest} bytes at once: not read")
        if self.connections.ending:
            self.ended += self.connections.ending
            self.connections.ending.clear()
            self.news = True
        return None

    def _warn(self, name: bytes, what: str) -> None:
        """Logs it once: it may happen again and again."""
        if (name, what) not in self.warned:
            self.warned.add((name, what))
            logger.warning(printable(f"paceline: {name.decode(errors='replace')} {what}"))

    def _name(self, received: ReceivedMessage) -> bytes | None:
        return self.connections.names.get(received.route.decode()) if self.keys is not None else received.route


class RemoteLink:
    """A connection to the listener of another host, by a name of one's own: with keys, the one its key was enrolled as.

    If it is `threaded`, messages come and leave while nobody waits. Frames may be read straight to where `place_frames`
    says.
    """

    def __init__(
        self,
        address: str,
        name: bytes,
        keys: KeyPair | None,
        server_key: str,
        most_waiting: int = QUEUE,
        place_frames: FramePlacement | None = None,
        threaded: bool = False,
    ) -> None:
        self.address = address
        self.name = name
        self.server_key = server_key
        transport = TcpTransport(keys, ANSWER, most_waiting, place_frames)
        self.transport: Transport = ThreadedTransport(transport) if threaded else transport
        self.refused = ""
        """Why the last attempt to connect failed, if it did."""
        self.gone = False
        """Whether an established connection broke: what was on its way may be lost. `reopen`, and send it again."""
        self.is_connected = False
        self.ending = False
        """Whether it broke, and what came over it may still be unread."""
        self.news = False
        """Whether it is gone and the waiter does not know."""
        self.warned = False
        """Whether damage on the way was logged."""
        self.outbox: deque[tuple[Sequence[Part], bool]] = deque()
        """What the transport has not taken, and whether its memory may change."""
        self.inbox: deque[tuple[bytes, list[memoryview]]] = deque()
        self.back_off_s = BACK_OFF_S[0]
        self.attempt_at = math.inf
        """When to try to connect again."""
        try:
            self.reopen()
        except BaseException:
            self.transport.close(0)
            raise

    def reopen(self) -> None:
        """Connects anew. What has not left yet never will."""
        self.outbox.clear()
        self.outbox.append((HELLO, False))
        self.inbox.clear()
        self.gone = False
        self.refused = ""
        self.back_off_s = BACK_OFF_S[0]
        self._connect()

    def send(self, message: bytes, frames: Sequence[Part] = (), may_change: bool = False) -> None:
        """Sends a message; while the link is `gone` it is lost.

        The memory of `frames` must not change before they have arrived, unless it is said that it `may_change`: what
        arrives may have changed then, too.
        """
        if not self.gone:
            self.outbox.append((wrapped(message, frames), may_change))
            self._update_connection()

    @property
    def is_idle(self) -> bool:
        """Whether it is connected, and nothing of what was sent is still on its way."""
        return self.is_connected and not self.outbox and not self.transport.is_sending(b"")

    def disconnect(self) -> None:
        """Ends a connection over which nonsense came: the link is `gone`."""
        self.transport.close_connections(0)
        self.is_connected = self.ending = False
        self.gone = self.news = True

    def receive(self) -> tuple[bytes, list[memoryview]] | None:
        """The next message, or None if there is none right now."""
        self._receive()
        return self.inbox.popleft() if self.inbox else None

    def wait_for(self, timeout_s: float) -> tuple[bytes, list[memoryview]] | None:
        """The next message, or None if there is none within the time, or the link is gone."""
        until = time.monotonic() + timeout_s
        while (message := self.receive()) is None and not self.gone:
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            self.transport.wait(min(left_s, self.rest_s()))
        return message

    def fileno(self) -> int:
        """Readable when something may have come; before waiting for it, call `ready`."""
        return self.transport.epoll.fileno()

    def ready(self) -> bool:
        """Takes in what has come; whether there is a message, or the link is gone and was not before."""
        self._receive()
        news, self.news = self.news, False
        return news or bool(self.inbox)

    def rest_s(self) -> float:
        """How long this can be left alone if nothing comes."""
        return min(self.transport.rest_s(), max(0.0, self.attempt_at - time.monotonic()))

    def close(self, discard: bool = False) -> None:
        """Closes all. What was sent last has a second to leave, or none with `discard`: it may not arrive."""
        self.attempt_at = math.inf
        self.transport.close(LINGER_MS if self.is_connected and not discard else 0)

    def _receive(self) -> None:
        """Has a message in the inbox, if there is one at all."""
        self._update_connection()
        if self.inbox:
            return
        received = self.transport.receive()
        message = None if received is None else received.opened()
        if message is not None:
            self.inbox.append(message)
        elif received is None and self.ending:
            self.disconnect()

    def _connect(self) -> None:
        self.is_connected = self.ending = False
        self.attempt_at = time.monotonic() + ATTEMPT_S
        self.transport.connect(self.address, self.name, self.server_key)

    def _update_connection(self) -> None:
        """Takes note of what happened to the connection, connects again if that is due, and sends what it takes."""
        for event, _, reason in self.transport.events():
            if event is ConnectionEvent.ESTABLISHED:
                self.is_connected = True
                self.refused = ""
                self.attempt_at = math.inf
            elif self.is_connected:
                self.ending = True
                if reason == DAMAGED and not self.warned:
                    self.warned = True
                    logger.warning(f"paceline: {self.address} {reason}")
            elif self.attempt_at > time.monotonic() + BACK_OFF_S[1]:  # of one attempt the first reason counts
                self.refused = f"{self.address} {reason}"
                self.attempt_at = time.monotonic() + self.back_off_s
                self.back_off_s = min(2 * self.back_off_s, BACK_OFF_S[1])
        if not self.is_connected and time.monotonic() >= self.attempt_at:
            self._connect()
        while self.is_connected and self.outbox and self.transport.send(b"", *self.outbox[0]):
            self.outbox.popleft()
