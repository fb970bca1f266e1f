"""Plain TCP, for runs without keys: no thread, no queue of its own, no copy but the kernel's.

Everything is done by the thread that uses it, when it looks: what does not fit into the kernel's buffers leaves, and
what has come is read, while somebody waits. Who computes meanwhile has a thread look after it (`Aside`).

That a host is gone the kernels find out: they ask each other when nothing was said for a second, and what nobody
confirms is noticed here. A program that hangs is not noticed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from paceline.runtime.live.across.line import AT_ONCE, GREETING, Landing, Line, Over, Rules
from paceline.runtime.live.across.posting import BROKE_OFF, HANDSHAKE_S, UNREACHED, Happening, Taken, first_free

if TYPE_CHECKING:
    from paceline.runtime.live.across.posting import Part, Post

WAITING = 1024
"""Callers that may wait to be accepted."""
STRANGERS = 256
"""Connections of whom nobody knows yet who they are; with more, the oldest is closed."""
LOOK_S = 0.5
"""How often it is looked whether the other ends still confirm what they get."""
AHEAD = 64
"""Messages that a thread reads before somebody wants them."""
TOO_MANY = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""The kernel has no room for one more connection."""
IN, BOTH = select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT


def plain_post(largest: int, hwm: int, landing: Landing | None, aside: bool) -> Post:
    """With `aside`, one that a thread looks after."""
    post = PlainPost(largest, hwm, landing)
    return Aside(post) if aside else post


class PlainPost:
    """A listener's socket and its connections, or a caller's one connection."""

    def __init__(self, largest: int, hwm: int, landing: Landing | None = None) -> None:
        self.rules = Rules(False, largest, landing)
        self.hwm = hwm
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
        door = first_free(host, ports, listening)
        door.setblocking(False)
        self.door = door
        self.rules = Rules(True, self.rules.largest, self.rules.landing)
        self.epoll.register(door.fileno(), IN)
        return int(door.getsockname()[1])

    def call(self, address: str, name: bytes, server_key: str) -> None:
        del server_key
        self.shut(0)
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        try:
            line = Line(socket.socket(), self.rules, GREETING + bytes([len(name)]) + name)
        except OSError:  # there are too many
            self.happenings.append((Happening.OVER, -1, UNREACHED))
            return
        try:
            begun = line.socket.connect_ex((socket.gethostbyname(host), int(port)))
        except OSError as error:
            begun = error.errno or errno.EHOSTUNREACH
        if begun in (0, errno.EINPROGRESS):
            self._add(line)
        else:
            line.socket.close()
            self.happenings.append((Happening.OVER, -1, UNREACHED))

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

    def has_room(self) -> bool:
        """Whether some can be sent over a connection."""
        return any(len(line.leaving) <= self.hwm // 2 for line in self.routes.values())

    def take(self) -> Taken | None:
        while not self.inbox and self.wait(0.0):
            pass
        return self.inbox.popleft() if self.inbox else None

    def wait(self, timeout_s: float) -> bool:
        """And do what can be done for one connection; False if there was none.

        One at a time, the others have their turn next: what is read is used while it is in the cache.
        """
        ready = self.epoll.poll(timeout_s, 1)
        for descriptor, event in ready:
            line = self.lines.get(descriptor)
            if line is not None:
                if event & select.EPOLLOUT:
                    self._send(line)
                if event & ~select.EPOLLOUT and line.descriptor in self.lines:
                    self._hear(line)
            elif self.door is not None:
                self._accept(self.door)
        return bool(ready)

    def rest_s(self) -> float:
        return 0.0 if self.happenings else LOOK_S

    def shut(self, linger_ms: int) -> None:
        until = time.monotonic() + linger_ms / 1000
        for line in list(self.lines.values()):
            poll = select.poll()
            poll.register(line.descriptor, select.POLLOUT)
            with contextlib.suppress(OSError):
                while line.stands and line.leaving and (left_s := until - time.monotonic()) > 0:
                    poll.poll(1000 * left_s)
                    with contextlib.suppress(BlockingIOError):
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

    def _add(self, line: Line) -> None:
        self.lines[line.descriptor] = self.strangers[line.descriptor] = line
        line.asks = BOTH
        self.epoll.register(line.descriptor, BOTH)

    def _accept(self, door: socket.socket) -> None:
        try:
            connection, _ = door.accept()
        except OSError as error:
            if error.errno not in TOO_MANY:
                return  # it is gone again
            if not self.strangers:
                self.epoll.modify(door.fileno(), 0)  # until it is looked again
        else:
            line = Line(connection, self.rules, GREETING)
            self._add(line)
            self.happenings.append((Happening.BEGUN, line.descriptor, ""))
            if len(self.strangers) <= STRANGERS:
                return
        for oldest in list(self.strangers.values())[:1]:
            self._lose(oldest, BROKE_OFF)

    def _send(self, line: Line) -> None:
        try:
            line.send_some()
        except BlockingIOError:
            pass
        except OSError:
            # It is heard that it is over, after whatever came before. If it was not, half a message would stand there.
            line.leaving.clear()
            line.shut_down()
        asks = BOTH if line.leaving else IN
        if asks != line.asks:
            line.asks = asks
            self.epoll.modify(line.descriptor, asks)

    def _hear(self, line: Line) -> None:
        try:
            heard = line.read(self.scratch)
        except Over:
            self._lose(line, BROKE_OFF if line.reached else UNREACHED)
            return
        if line.stands and line.descriptor in self.strangers:
            self._meet(line)
        for parts in heard:
            self.inbox.append(Taken(line.name, line.descriptor, "", parts or (), parts is not None))

    def _meet(self, line: Line) -> None:
        """It has greeted."""
        del self.strangers[line.descriptor]
        if (before := self.routes.get(line.name)) is not None:
            self._lose(before, BROKE_OFF)
        self.routes[line.name] = line
        if self.door is None:
            self.happenings.append((Happening.STANDS, line.descriptor, ""))

    def _look_whether_all_live(self) -> None:
        self.looked_s = now = time.monotonic()
        if self.door is not None:
            self.epoll.modify(self.door.fileno(), IN)
        for line in list(self.lines.values()):
            if line.stands and line.is_silent():
                self._lose(line, "")
            elif not line.stands and now - line.began_s > HANDSHAKE_S:
                self._lose(line, BROKE_OFF if line.reached else UNREACHED)

    def _lose(self, line: Line, reason: str) -> None:
        self.happenings.append((Happening.OVER, line.descriptor, "is gone" if line.stands else reason))
        self._end(line)

    def _end(self, line: Line) -> None:
        del self.lines[line.descriptor]
        self.strangers.pop(line.descriptor, None)
        if self.routes.get(line.name) is line:
            del self.routes[line.name]
        self.epoll.unregister(line.descriptor)  # a forked process may hold it too, and then closing is not enough
        line.shut_down()  # for the same reason
        line.socket.close()


class Aside:
    """A plain post that a thread looks after, for those who compute while messages come and leave."""

    def __init__(self, post: PlainPost) -> None:
        self.post = post
        self.lock = threading.RLock()
        """Whoever uses the post has it."""
        self.room = threading.Condition(self.lock)
        self.epoll = select.epoll()
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        """Rung when something has come, or happened, or can leave that could not."""
        self.epoll.register(self.bell, IN)
        self.ending = os.eventfd(0, os.EFD_NONBLOCK)
        self.full = False
        """What a caller was to send last found no room. (A listener cuts such a process off.)"""
        self.thread: threading.Thread | None = None

    def listen(self, host: str, ports: tuple[int, int]) -> int:
        with self._used():
            return self.post.listen(host, ports)

    def call(self, address: str, name: bytes, server_key: str) -> None:
        with self._used():
            self.post.call(address, name, server_key)

    def admit(self, is_known: Callable[[str], bool]) -> None:
        """Nobody is asked for a key."""

    def happened(self) -> Iterator[tuple[Happening, int, str]]:
        with self._used():
            happened = list(self.post.happened())
        return iter(happened)

    def send(self, route: bytes, parts: Sequence[Part], passing: bool = False) -> bool:
        with self._used():
            sent = self.post.send(route, parts, passing)
            self.full = not sent and self.post.door is None
            return sent

    def take(self) -> Taken | None:
        with self._used():
            self.room.notify()
            return self.post.take()

    def wait(self, timeout_s: float) -> bool:
        return bool(self.epoll.poll(timeout_s))

    def rest_s(self) -> float:
        return self.post.rest_s()

    def shut(self, linger_ms: int) -> None:
        with self._used():
            self.post.shut(linger_ms)

    def close(self, linger_ms: int) -> None:
        if self.epoll.closed:
            return
        os.eventfd_write(self.ending, 1)
        with self._used():
            self.room.notify()
        if self.thread is not None:
            self.thread.join()
        self.post.close(linger_ms)
        self.epoll.close()
        os.close(self.bell)
        os.close(self.ending)

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        """Use the post; what is ready for whom has it then rings."""
        with self.lock:
            if self.thread is None:
                self.thread = threading.Thread(target=self._look_after, daemon=True, name="paceline tcp")
                self.thread.start()
            yield
            if self.post.inbox or self.post.happenings or (self.full and self.post.has_room()):
                os.eventfd_write(self.bell, 1)
            else:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.bell)

    def _look_after(self) -> None:
        """Until it is closed."""
        with select.epoll() as epoll:
            epoll.register(self.post.epoll.fileno(), IN)
            epoll.register(self.ending, IN)
            while all(descriptor != self.ending for descriptor, _ in epoll.poll()):
                with self._used():
                    self.post.wait(0.0)
                    if len(self.post.inbox) >= AHEAD:
                        self.room.wait()


def listening(interface: str, port: int) -> socket.socket:
    door = socket.socket()
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((interface, port))
        door.listen(WAITING)
    except OSError:
        door.close()
        raise
    return door
