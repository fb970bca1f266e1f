"""Plain TCP, for runs without keys: no thread, no queue of its own, no copy but the kernel's.

A caller says `GREETING`, the length of its name, and its name; a listener says `GREETING`. Then messages: how many
parts, the length of each, and they. Whatever else is said ends the connection.

Everything is done by the thread that uses it, when it looks: what does not fit into the kernel's buffers leaves, and
what has come is read, while somebody waits. Large parts are read straight to where they stay, which the reader may
choose (`landing`).

That a host is gone the kernels find out: they ask each other when nothing was said for a second, and what nobody
confirms is noticed here. A program that hangs is not noticed.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from paceline.errors import PacelineError
from paceline.runtime.live.across.posting import (
    BROKE_OFF,
    FRAME,
    HANDSHAKE_S,
    SLACK,
    SPARE,
    UNREACHED,
    Happening,
    Taken,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from paceline.runtime.live.across.posting import Part

GREETING = b"paceline tcp 1\n"
WAITING = 1024
"""Callers that may wait to be accepted."""
STRANGERS = 256
"""Connections of whom nobody knows yet who they are; with more, the oldest is closed."""
AT_ONCE = 1 << 14
"""Bytes read when it is not known yet what comes. More would be copied once more."""
LUMP = 1 << 18
"""Bytes of a large part that are waited for at least."""
VIEWS = 512
"""Pieces of memory that the kernel takes at once."""
LOOK_S = 0.5
"""How often it is looked whether the other ends still confirm what they get."""
SILENT_MS = 1500
IDLE_S, AGAIN_S, TIMES = 1, 1, 2
"""How long nothing is said before the kernel asks, how long it waits, how often it asks."""
COUNT = struct.Struct("<I")
IN, BOTH = select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT

Landing = Callable[[bytes, Sequence[int]], Sequence[memoryview] | None]
"""Where the frames behind this message, of these lengths, are to be read to; None if that does not matter."""


class Line:
    """One connection."""

    def __init__(self, connection: socket.socket, greeting: bytes) -> None:
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
        self.began_s = time.monotonic()
        self.name = b""
        """Who called, once it has said so."""
        self.stands = False
        """Greetings are exchanged."""
        self.leaving: deque[list[memoryview]] = deque([[memoryview(greeting)]])
        """Messages of which not all has left."""
        self.asks = 0
        """What the epoll tells of it."""
        self.begun = b""
        """The beginning of something that is not all there."""
        self.parts: list[Buffer] = []
        """Of the message that is coming, where they go; and of these the rest that is to be read."""
        self.unread: list[memoryview] = []
        self.lump = 1
        self.unwanted = 0
        """Bytes to come of a message that is too large."""

    def send_some(self) -> None:
        """As much as leaves right now."""
        while self.leaving:
            views = self.leaving[0]
            advance(views, self.socket.sendmsg(views[:VIEWS]))
            if views:
                return
            self.leaving.popleft()

    def expect(self) -> None:
        """Have the kernel wait for this much before it says that something is there: to be woken costs, too."""
        lump = max(1, min(LUMP, sum(map(len, self.unread))))
        if lump != self.lump:
            self.lump = lump
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, lump)

    def is_silent(self) -> bool:
        """Whether the other end has not confirmed for too long what was sent, though it was sent again."""
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
        retransmits, probes = info[2], info[3]
        unacked, last_ack_ms = struct.unpack_from("I", info, 24)[0], struct.unpack_from("I", info, 56)[0]
        return last_ack_ms > SILENT_MS and bool((unacked and retransmits) or probes > TIMES)


class PlainPost:
    """A listener's socket and its connections, or a caller's one connection."""

    def __init__(self, largest: int, hwm: int, landing: Landing | None = None) -> None:
        self.largest = largest
        self.hwm = hwm
        self.landing = landing
        self.epoll = select.epoll()
        self.door: socket.socket | None = None
        self.lines: dict[int, Line] = {}
        """By descriptor."""
        self.routes: dict[bytes, Line] = {}
        """By the name of who called; at a caller by ""."""
        self.strangers: dict[int, Line] = {}
        """Those who have not said yet who they are, the oldest first."""
        self.inbox: deque[Taken] = deque()
        self.happenings: deque[tuple[Happening, int, str]] = deque()
        self.scratch = memoryview(bytearray(AT_ONCE))
        self.looked_s = time.monotonic()

    def listen(self, host: str, ports: tuple[int, int]) -> int:
        first, last = ports
        try:
            interface = socket.gethostbyname(host)
            for port in range(first, last + 1):
                door = socket.socket()
                try:
                    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    door.bind((interface, port))
                    door.listen(WAITING)
                except OSError as error:
                    door.close()
                    if error.errno != errno.EADDRINUSE:
                        raise
                else:
                    door.setblocking(False)
                    self.door = door
                    self.epoll.register(door.fileno(), IN)
                    return int(door.getsockname()[1])
        except OSError as error:
            raise PacelineError(f"cannot listen on {host!r}, ports {first} to {last}: {error.strerror}") from None
        raise PacelineError(f"cannot listen on {host!r}: every port from {first} to {last} is taken")

    def call(self, address: str, name: bytes, server_key: str) -> None:
        del server_key
        self.shut(0)
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        line = Line(socket.socket(), GREETING + bytes([len(name)]) + name)
        try:
            begun = line.socket.connect_ex((socket.gethostbyname(host), int(port)))
        except OSError as error:
            begun = error.errno or errno.EHOSTUNREACH
        if begun not in (0, errno.EINPROGRESS):
            line.socket.close()
            self.happenings.append((Happening.OVER, -1, UNREACHED))
            return
        self._add(line)

    def _add(self, line: Line) -> None:
        self.lines[line.descriptor] = self.strangers[line.descriptor] = line
        line.asks = BOTH
        self.epoll.register(line.descriptor, BOTH)

    def admit(self, is_known: Callable[[str], bool]) -> None:
        """Nobody is asked for a key."""

    def happened(self) -> Iterator[tuple[Happening, int, str]]:
        if time.monotonic() - self.looked_s > LOOK_S:
            self._look_whether_all_live()
        while self.happenings:
            yield self.happenings.popleft()

    def send(self, route: bytes, parts: Sequence[Part], passing: bool = False) -> bool:
        line = self.routes.get(route)
        if line is None or (self.hwm and len(line.leaving) >= self.hwm):
            return False
        message = [memoryview(b"")]
        lengths = []
        for part in parts:
            views = [memoryview(each).cast("B") for each in (part if isinstance(part, tuple) else (part,))]
            lengths.append(sum(map(len, views)))
            message += filter(None, views)
        message[0] = memoryview(struct.pack(f"<{1 + len(lengths)}I", len(lengths), *lengths))
        line.leaving.append(message)
        if len(line.leaving) == 1:
            self._send(line)
        if passing:
            message[:] = [memoryview(bytes(view)) for view in message]
        return True

    def take(self) -> Taken | None:
        if not self.inbox:
            self._look(0.0)
        return self.inbox.popleft() if self.inbox else None

    def wait(self, timeout_s: float) -> None:
        self._look(timeout_s)

    def rest_s(self) -> float:
        return 0.0 if self.happenings else LOOK_S

    def shut(self, linger_ms: int) -> None:
        until = time.monotonic() + linger_ms / 1000
        for line in list(self.lines.values()):
            with contextlib.suppress(OSError):
                while line.stands and line.leaving and (left_s := until - time.monotonic()) > 0:
                    select.select([], [line.socket], [], left_s)
                    line.send_some()
            self._end(line)
        self.happenings.clear()
        self.inbox.clear()

    def close(self, linger_ms: int) -> None:
        if self.epoll.closed:
            return
        if self.door is not None:
            self.epoll.unregister(self.door.fileno())
            self.door.close()
        self.shut(linger_ms)
        self.epoll.close()

    def _look(self, timeout_s: float) -> None:
        """Do what can be done, once for each connection; wait for something if there is nothing."""
        for descriptor, event in self.epoll.poll(timeout_s):
            line = self.lines.get(descriptor)
            if line is not None:
                if event & select.EPOLLOUT:
                    self._send(line)
                if event & ~select.EPOLLOUT and line.descriptor in self.lines:
                    self._hear(line)
            elif self.door is not None:
                self._accept(self.door)

    def _accept(self, door: socket.socket) -> None:
        try:
            connection, _ = door.accept()
        except OSError:  # it is gone again, or there are too many
            connection = None
        if connection is not None:
            line = Line(connection, GREETING)
            self._add(line)
            self.happenings.append((Happening.BEGUN, line.descriptor, ""))
        if connection is None or len(self.strangers) > STRANGERS:
            for oldest in list(self.strangers.values())[:1]:
                self._lose(oldest, BROKE_OFF)

    def _send(self, line: Line) -> None:
        try:
            line.send_some()
        except BlockingIOError:
            pass
        except OSError:
            # It will also be heard that it is over, after whatever came before.
            line.leaving.clear()
        asks = BOTH if line.leaving else IN
        if asks != line.asks:
            line.asks = asks
            self.epoll.modify(line.descriptor, asks)

    def _hear(self, line: Line) -> None:
        """Read what is there of one message, or several small ones."""
        while True:
            into = line.unread[:VIEWS] or [self.scratch]
            try:
                count = line.socket.recvmsg_into(into)[0]
            except BlockingIOError:
                return
            except OSError:
                count = 0
            if not count:
                self._lose(line, BROKE_OFF if line.begun or line.stands else UNREACHED)
                return
            full = count == sum(map(len, into))
            if not line.unread:
                if not self._understand(line, line.begun + bytes(self.scratch[:count])):
                    self._lose(line, BROKE_OFF)
                    return
            else:
                advance(line.unread, count)
                if not line.unread:
                    self._done(line)
            if not full or not line.unread:
                line.expect()
                return

    def _understand(self, line: Line, data: bytes) -> bool:
        """Read what has come outside of large parts; False if it is nothing that is ever said."""
        at = 0
        while at < len(data):
            if line.unwanted:
                skipped = min(line.unwanted, len(data) - at)
                line.unwanted -= skipped
                at += skipped
                continue
            used = self._begin(line, data, at) if line.stands else self._greet(line, data)
            if used is None:
                return False
            if not used:
                break
            at += used
            if line.unread:
                at += self._fill(line, data, at)
        line.begun = data[at:]
        return True

    def _greet(self, line: Line, data: bytes) -> int | None:
        """How much of it was the greeting: 0 if it is not all there, None if it is none."""
        size = len(GREETING)
        if data[:size] != GREETING[: len(data)]:
            return None
        if self.door is not None:
            if len(data) <= size or len(data) <= size + data[size]:
                return 0
            line.name = data[size + 1 : size + 1 + data[size]]
            if not line.name:
                return None
            size += 1 + len(line.name)
            if (before := self.routes.get(line.name)) is not None:
                self._lose(before, BROKE_OFF)
        elif len(data) < size:
            return 0
        else:
            self.happenings.append((Happening.STANDS, line.descriptor, ""))
        line.stands = True
        self.routes[line.name] = line
        del self.strangers[line.descriptor]
        return size

    def _begin(self, line: Line, data: bytes, at: int) -> int | None:
        """A message begins here: how long its head is; 0 if that is not all there, None if it can be none."""
        if len(data) < at + COUNT.size:
            return 0
        count: int = COUNT.unpack_from(data, at)[0]
        most = self.largest // FRAME + SPARE
        if not 0 < count <= 2 * most:
            return None
        head = COUNT.size * (1 + count)
        if len(data) < at + head:
            return 0
        lengths: tuple[int, ...] = struct.unpack_from(f"<{count}I", data, at + COUNT.size)
        if max(lengths) > FRAME + SLACK:
            return None
        if sum(lengths) > self.largest or count > most:
            line.unwanted = sum(lengths)
            self.inbox.append(Taken(line.name, line.descriptor, "", (), False))
            return head
        first = data[at + head : at + head + lengths[0]]
        landed = self.landing(first, lengths[1:]) if self.landing is not None and len(first) == lengths[0] else None
        parts: list[memoryview] = [np.empty(lengths[0], np.uint8).data]
        parts += landed if landed is not None else (np.empty(size, np.uint8).data for size in lengths[1:])
        line.parts = list(parts)
        line.unread = [part for part in parts if part.nbytes]
        if not line.unread:
            self._done(line)
        return head

    def _fill(self, line: Line, data: bytes, at: int) -> int:
        """The beginning of the parts, as far as it is here already: how much that was."""
        used = 0
        while line.unread and at + used < len(data):
            part = line.unread[0]
            some = min(part.nbytes, len(data) - at - used)
            part[:some] = data[at + used : at + used + some]
            used += some
            advance(line.unread, some)
        if not line.unread:
            self._done(line)
        return used

    def _done(self, line: Line) -> None:
        self.inbox.append(Taken(line.name, line.descriptor, "", line.parts, True))
        line.parts = []

    def _look_whether_all_live(self) -> None:
        self.looked_s = now = time.monotonic()
        for line in list(self.lines.values()):
            if line.stands and line.is_silent():
                self._lose(line, "is gone")
            elif not line.stands and now - line.began_s > HANDSHAKE_S:
                self._lose(line, BROKE_OFF if line.asks == IN else UNREACHED)

    def _lose(self, line: Line, reason: str) -> None:
        self.happenings.append((Happening.OVER, line.descriptor, "is gone" if line.stands else reason))
        self._end(line)

    def _end(self, line: Line) -> None:
        del self.lines[line.descriptor]
        self.strangers.pop(line.descriptor, None)
        if self.routes.get(line.name) is line:
            del self.routes[line.name]
        self.epoll.unregister(line.descriptor)  # a forked process may hold it too, and then closing is not enough
        line.socket.close()


def advance(views: list[memoryview], count: int) -> None:
    """So many bytes of these are done with."""
    done = 0
    while done < len(views) and count >= views[done].nbytes:
        count -= views[done].nbytes
        done += 1
    del views[:done]
    if count:
        views[0] = views[0][count:]
