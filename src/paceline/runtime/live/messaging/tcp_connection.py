"""One TCP connection: its socket, what is to be sent, and a reader of what arrives (`tcp_framing.py`)."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.runtime.live.messaging.greetings import Greeting
from paceline.runtime.live.messaging.tcp_framing import ConnectionLimits, MessageReader, OutgoingMessage, advance
from paceline.runtime.live.messaging.transport import ConnectionClosed

if TYPE_CHECKING:
    from paceline.runtime.live.messaging.transport import Part

LOW_WATER = 1 << 18
"""Bytes of a large part that are waited for at least."""
VIEWS = 512
"""Pieces of memory that the kernel takes at once."""
SILENT_S = 1.5
PROBES = 2
OPTIONS = (
    (socket.TCP_NODELAY, 1),
    (socket.TCP_KEEPIDLE, 1),
    (socket.TCP_KEEPINTVL, 1),
    (socket.TCP_KEEPCNT, 100),
)
"""When nothing was said for a second the kernel probes the other end, once a second. How many of these may stay without
an answer depends on the line (`TcpConnection.is_silent`)."""
PATIENCE = 4
"""How many round trips somebody may be silent longer where they take long: what was lost is sent again, twice."""


class TcpConnection:
    """The socket of one connection, which never blocks."""

    def __init__(self, connection: socket.socket, limits: ConnectionLimits, greeting: Greeting) -> None:
        connection.setblocking(False)
        for option, value in OPTIONS:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.socket = connection
        self.descriptor = connection.fileno()
        self.began_s = time.monotonic()
        self.reader = MessageReader(limits, greeting)
        self.greeting = [memoryview(greeting.first)] if greeting.first else []
        """What of our greeting is not sent."""
        self.has_greeted = False
        self.outgoing: deque[OutgoingMessage] = deque()
        """Messages that are not sent, or not all."""
        self.low_water = 1
        self.interest = 0
        """The events that the transport's epoll waits for."""
        self.closed: str | None = None
        """None while the connection goes on; then why it ended, or "" if it just did."""

    def add(self, parts: Sequence[Part]) -> OutgoingMessage:
        """Returns a message that is sent after those before it."""
        message = OutgoingMessage(parts, self.reader.outgoing)
        self.outgoing.append(message)
        return message

    def send_some(self) -> None:
        """Sends as much as the kernel takes right now."""
        if self.greeting:
            advance(self.greeting, self.socket.sendmsg(self.greeting))
            if self.greeting:
                return
            self.has_greeted = True
        while self.outgoing:
            message = self.outgoing[0]
            message.refill()
            advance(message.ready, self.socket.sendmsg(message.ready[:VIEWS]))
            if message.ready:
                return
            if message.section is None:
                self.outgoing.popleft()

    def drop(self) -> None:
        """Sends nothing more: half a message may have been sent."""
        self.greeting.clear()
        self.outgoing.clear()
        self.shut_down()

    @property
    def has_unsent(self) -> bool:
        return bool(self.greeting or self.outgoing)

    def read(self, scratch: memoryview) -> list[list[memoryview] | None]:
        """Reads some of one message, or several small ones; the messages that are whole now (`MessageReader.messages`).

        If the connection is `closed` then, these are the last.
        """
        reader = self.reader
        try:
            self._read(scratch)
            self._set_low_water()
        except ConnectionClosed as reason:
            self.closed = str(reason)
        if reader.answer:
            self.greeting.append(memoryview(reader.answer))
            reader.answer = b""
        messages, reader.messages = reader.messages, []
        return messages

    def _read(self, scratch: memoryview) -> None:
        reader, full = self.reader, True
        while full and not reader.messages:
            into = reader.unread[:VIEWS] or [scratch]
            try:
                count = self.socket.recvmsg_into(into)[0]
            except BlockingIOError:
                return
            except OSError:
                raise ConnectionClosed from None
            if not count:
                raise ConnectionClosed
            full = count == sum(map(len, into))
            reader.take(count, scratch)

    def _set_low_water(self) -> None:
        """Has the kernel wait for this much before it says that something is there: to be woken costs, too."""
        low_water = max(1, min(LOW_WATER, sum(map(len, self.reader.unread))))
        if low_water != self.low_water:
            self.low_water = low_water
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)

    def shut_down(self) -> None:
        """Ends the connection, whoever else holds the socket."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def is_silent(self) -> bool:
        """Whether the other end has not confirmed for too long what was sent, though it was sent again."""
        info = self._info()
        retransmits, probes = info[2], info[3]
        unacked, last_ack_ms = struct.unpack_from("I", info, 24)[0], struct.unpack_from("I", info, 56)[0]
        limit_s = SILENT_S + PATIENCE * self.round_trip_s()
        return last_ack_ms > 1000 * limit_s and bool((unacked and retransmits) or probes >= PROBES)

    def round_trip_s(self) -> float:
        """Returns how long a packet and its answer take, with four deviations: seconds where a thin line is full."""
        rtt_us, deviation_us = struct.unpack_from("II", self._info(), 68)
        return float(rtt_us + 4 * deviation_us) / 1e6

    def is_sending(self) -> bool:
        """Whether something of what was sent has not left, or is on its way."""
        if self.has_unsent:
            return True
        queued = fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4))
        return bool(struct.unpack("i", queued)[0])

    def _info(self) -> bytes:
        return self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 76)
