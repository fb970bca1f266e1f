"""One TCP connection without keys (`plain.py`), and what is said over it.

A caller says `GREETING`, the length of its name, and its name; a listener says `GREETING`. Then messages: how many
parts, the length of each, and they. Whatever else is said ends the connection. Large parts are read straight to where
they stay, which the reader may choose (`Landing`).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct

from paceline.runtime.live.across.posting import FRAME, SLACK, SPARE

GREETING = b"paceline tcp 1\n"
AT_ONCE = 1 << 14
"""Bytes read when it is not known yet what comes. They are copied once more."""
LUMP = 1 << 18
"""Bytes of a large part that are waited for at least."""
VIEWS = 512
"""Pieces of memory that the kernel takes at once."""
SILENT_MS = 1500
IDLE_S, AGAIN_S, TIMES = 1, 1, 2
"""How long nothing is said before the kernel asks, how long it waits, how often it asks."""
COUNT = struct.Struct("<I")

Landing = Callable[[bytes, Sequence[int]], Sequence[memoryview] | None]
"""Where the frames behind this message, of these lengths, are to be read to; None if that does not matter."""


class Over(Exception):
    """It has ended, or nothing that comes over it is to be believed any more."""


class Rules(Struct, frozen=True):
    """What may be said over a line."""

    listens: bool
    """This is the listener's end."""
    largest: int
    """Bytes of a message."""
    landing: Landing | None = None

    @property
    def most(self) -> int:
        """Parts of a message."""
        return self.largest // FRAME + SPARE


class Line:
    def __init__(self, connection: socket.socket, rules: Rules, greeting: bytes) -> None:
        connection.setblocking(False)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, IDLE_S),
            (socket.TCP_KEEPINTVL, AGAIN_S),
            (socket.TCP_KEEPCNT, TIMES),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.socket = connection
        self.descriptor = connection.fileno()
        self.rules = rules
        self.began_s = time.monotonic()
        self.name = b""
        """Who called, once it has said so."""
        self.stands = False
        """The other end has greeted."""
        self.reached = False
        """Our greeting has left."""
        self.leaving: deque[list[memoryview]] = deque([[memoryview(greeting)]])
        """Messages of which not all has left."""
        self.asks = 0
        """What is waited for; `plain.py` knows."""
        self.begun = b""
        """The beginning of something that is not all there."""
        self.parts: list[memoryview] = []
        """Of the message that is coming, where they go; and of these the rest that is to be read."""
        self.unread: list[memoryview] = []
        self.lump = 1
        self.unwanted = 0
        """Bytes to come of a message that is too large."""
        self.heard: list[list[memoryview] | None] = []
        """The parts of each message that has come; None for one that is too large."""

    def send_some(self) -> None:
        """As much as leaves right now."""
        while self.leaving:
            views = self.leaving[0]
            advance(views, self.socket.sendmsg(views[:VIEWS]))
            if views:
                return
            self.leaving.popleft()
            self.reached = True

    def read(self, scratch: memoryview) -> list[list[memoryview] | None]:
        """What is there of one message, or several small ones: the messages that are whole now (as `heard`)."""
        full = True
        while full and not self.heard:
            into = self.unread[:VIEWS] or [scratch]
            try:
                count = self.socket.recvmsg_into(into)[0]
            except BlockingIOError:
                break
            except OSError:
                raise Over from None
            if not count:
                raise Over
            full = count == sum(map(len, into))
            if self.unread:
                self._advance(count)
            else:
                self._understand(self.begun + bytes(scratch[:count]))
        self._expect()
        heard, self.heard = self.heard, []
        return heard

    def shut_down(self) -> None:
        """Nothing more is said over it, whoever else holds the socket."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def is_silent(self) -> bool:
        """Whether the other end has not confirmed for too long what was sent, though it was sent again."""
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
        retransmits, probes = info[2], info[3]
        unacked, last_ack_ms = struct.unpack_from("I", info, 24)[0], struct.unpack_from("I", info, 56)[0]
        return last_ack_ms > SILENT_MS and bool((unacked and retransmits) or probes > TIMES)

    def _expect(self) -> None:
        """Have the kernel wait for this much before it says that something is there: to be woken costs, too."""
        lump = max(1, min(LUMP, sum(map(len, self.unread))))
        if lump != self.lump:
            self.lump = lump
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, lump)

    def _advance(self, count: int) -> None:
        """So many bytes of the parts were read."""
        advance(self.unread, count)
        if not self.unread:
            self.heard.append(self.parts)
            self.parts = []

    def _understand(self, data: bytes) -> None:
        """This has come outside of large parts."""
        at = 0
        while at < len(data):
            if self.unwanted:
                used = min(self.unwanted, len(data) - at)
                self.unwanted -= used
            elif self.unread:
                used = min(self.unread[0].nbytes, len(data) - at)
                self.unread[0][:used] = data[at : at + used]
                self._advance(used)
            else:
                used = self._begin(data, at) if self.stands else self._greet(data)
                if not used:
                    break
            at += used
        self.begun = data[at:]

    def _greet(self, data: bytes) -> int:
        """How much of it was the greeting: 0 if it is not all there."""
        size = len(GREETING)
        if data[:size] != GREETING[: len(data)]:
            raise Over
        if self.rules.listens:
            if len(data) <= size or len(data) <= size + data[size]:
                return 0
            if not data[size]:
                raise Over
            self.name = data[size + 1 : size + 1 + data[size]]
            size += 1 + len(self.name)
        elif len(data) < size:
            return 0
        self.stands = True
        return size

    def _begin(self, data: bytes, at: int) -> int:
        """A message begins here: how long its head is; 0 if that is not all there.

        Where frames may land, its first part belongs to it, unless it is too long to be an answer.
        """
        if len(data) < at + COUNT.size:
            return 0
        count: int = COUNT.unpack_from(data, at)[0]
        rules = self.rules
        if not 0 < count <= 2 * rules.most:
            raise Over
        head = COUNT.size * (1 + count)
        if len(data) < at + head:
            return 0
        lengths: tuple[int, ...] = struct.unpack_from(f"<{count}I", data, at + COUNT.size)
        if max(lengths) > FRAME + SLACK:
            raise Over
        if sum(lengths) > rules.largest or count > rules.most:
            self.unwanted = sum(lengths)
            self.heard.append(None)
            return head
        landed = None
        if rules.landing is not None and lengths[0] <= AT_ONCE:
            first = data[at + head : at + head + lengths[0]]
            if len(first) < lengths[0]:
                return 0
            landed = rules.landing(first, lengths[1:])
        self.parts = [np.empty(lengths[0], np.uint8).data]
        self.parts += landed if landed is not None else (np.empty(size, np.uint8).data for size in lengths[1:])
        self.unread = [part for part in self.parts if part.nbytes]
        if not self.unread:
            self._advance(0)
        return head


def advance(views: list[memoryview], count: int) -> None:
    """So many bytes of these are done with."""
    done = 0
    while done < len(views) and count >= views[done].nbytes:
        count -= views[done].nbytes
        done += 1
    del views[:done]
    if count:
        views[0] = views[0][count:]
