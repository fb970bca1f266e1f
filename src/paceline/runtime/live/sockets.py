"""Unix sockets, and the only file that knows them: listeners, links, and waiting for them and for processes.

Within one host this is the whole control channel. A round trip over a Unix socket costs about a third of one through
ZeroMQ's `ipc://`, which wakes a thread of its own at each end (docs/decisions/0010). A message is four bytes of
length and then itself. The first one on a connection is the caller's name; the folder the sockets lie in belongs to
the user alone, so a name is believed.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections import deque
from pathlib import Path
from typing import Protocol

PATIENCE_S = 1.0
"""A peer that does not read for so long, its buffer full, is cut off."""
LARGEST = 1 << 26
"""Bytes of one message. Layouts of large models are the largest; tensors never go through here."""
AT_ONCE = 1 << 16
WAITING = 1024
"""Callers that may wait to be accepted."""
GONE = (BrokenPipeError, ConnectionResetError)


class Stream:
    """Messages over one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.name: bytes | None = None
        self.inbox: deque[bytes] = deque()
        self.begun = bytearray()
        """The beginning of a message that is not all there."""

    def send(self, message: bytes) -> None:
        self.socket.sendall(len(message).to_bytes(4, "little") + message)

    def take(self, flags: int) -> bool:
        """Move what has arrived to the inbox; False when there will never be more. BlockingIOError: nothing yet."""
        try:
            data = self.socket.recv(AT_ONCE, flags)
        except GONE:
            return False
        if not data:
            return False
        if not self.begun and int.from_bytes(data[:4], "little") == len(data) - 4:
            self.inbox.append(data[4:])
            return True
        begun = self.begun
        begun += data
        start = 0
        while len(begun) - start >= 4:
            end = start + 4 + int.from_bytes(begun[start : start + 4], "little")
            if end - start > LARGEST:
                return False
            if end > len(begun):
                break
            self.inbox.append(bytes(begun[start + 4 : end]))
            start = end
        del begun[:start]
        return True


class Listener:
    """Accepts any number of named peers on one address. It hears them while a `Waiter` that watches it waits."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self.socket.bind(str(path))
        self.socket.listen(WAITING)
        self.waiter: Waiter | None = None
        self.streams: dict[int, Stream] = {}
        """By descriptor."""
        self.named: dict[bytes, Stream] = {}
        self.inbox: deque[tuple[bytes, bytes]] = deque()

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next (peer, message) that was heard."""
        return self.inbox.popleft() if self.inbox else None

    def send(self, peer: bytes, message: bytes) -> bool:
        """False if the peer is not there (any more)."""
        stream = self.named.get(peer)
        if stream is None:
            return False
        try:
            stream.send(message)
        except (*GONE, BlockingIOError):
            self._drop(stream)
            return False
        return True

    def hear(self, descriptor: int) -> None:
        """This socket, or one of the connections, has something."""
        stream = self.streams.get(descriptor)
        if stream is None:
            self._accept()
            return
        try:
            more = stream.take(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        inbox = stream.inbox
        if stream.name is None and inbox:
            stream.name = inbox.popleft()
            self.named[stream.name] = stream
        while inbox:
            assert stream.name is not None
            self.inbox.append((stream.name, inbox.popleft()))
        if not more:
            self._drop(stream)

    def _accept(self) -> None:
        try:
            connection, _ = self.socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(PATIENCE_S))
        self.streams[connection.fileno()] = Stream(connection)
        if self.waiter is not None:
            self.waiter.add(connection.fileno(), self)

    def _drop(self, stream: Stream) -> None:
        if self.streams.pop(stream.socket.fileno(), None) is None:
            return
        if self.waiter is not None:
            self.waiter.forget(stream.socket.fileno())
        if stream.name is not None and self.named.get(stream.name) is stream:
            del self.named[stream.name]
        stream.socket.close()

    def close(self) -> None:
        for stream in list(self.streams.values()):
            self._drop(stream)
        self.socket.close()


class Link:
    """A connection to a listener, under a name of one's own."""

    def __init__(self, path: Path, name: bytes) -> None:
        self.path = path
        self.name = name
        self.patience_s = -1.0
        self.stream: Stream | None = None
        self.reopen()

    @property
    def gone(self) -> bool:
        """Nobody is at the other end: `reopen` when somebody is again. What is sent until then is lost."""
        return self.stream is None

    @property
    def heard_some(self) -> bool:
        """Something was heard that was not received yet."""
        return self.stream is not None and bool(self.stream.inbox)

    def reopen(self) -> None:
        """Connect, if somebody listens."""
        self.close()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(self.path))
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return
        self.stream = Stream(connection)
        self.patience_s = -1.0
        self.send(self.name)

    def receive(self) -> bytes | None:
        """The next message, or None if there is none right now."""
        return self._next(socket.MSG_DONTWAIT)

    def wait_for(self, timeout_s: float) -> bytes | None:
        """The next message, or None if there is none within the time."""
        if timeout_s != self.patience_s and self.stream is not None:
            self.patience_s = timeout_s
            self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(timeout_s))
        return self._next(0)

    def _next(self, flags: int) -> bytes | None:
        stream = self.stream
        if stream is None:
            return None
        while not stream.inbox:
            try:
                if not stream.take(flags):
                    self.close()
                    return None
            except BlockingIOError:
                return None
        return stream.inbox.popleft()

    def send(self, message: bytes) -> None:
        if self.stream is not None:
            try:
                self.stream.send(message)
            except GONE:
                self.close()

    def close(self) -> None:
        if self.stream is not None:
            self.stream.socket.close()
            self.stream = None


class Far(Protocol):
    """What else can be waited for, here without knowing how it works: a listener or a link of `far.py`."""

    def fileno(self) -> int:
        """Readable when something may have come. Whatever is done with it may take that away again unseen."""

    def ready(self) -> bool:
        """Take in what has come; whether there is something for the caller. Asked before anybody blocks."""

    def rest_s(self) -> float:
        """How long it can be left alone if nothing comes."""


Source = Listener | Link | Far | int


class Waiter:
    """Waits until any of several listeners, links or file descriptors has something."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.sources: dict[int, Source] = {}
        """By descriptor."""
        self.far: dict[int, Far] = {}
        """Those of them that are."""

    def watch(self, source: Source) -> None:
        if isinstance(source, Listener):
            source.waiter = self
            self.add(source.socket.fileno(), source)
        elif isinstance(source, Link):
            if source.stream is None:
                raise ConnectionError(f"nobody listens at {source.path}")
            self.add(source.stream.socket.fileno(), source)
        elif isinstance(source, int):
            self.add(source, source)
        else:
            self.far[source.fileno()] = source
            self.add(source.fileno(), source)

    def add(self, descriptor: int, source: Source) -> None:
        self.sources[descriptor] = source
        self.epoll.register(descriptor, select.EPOLLIN)

    def forget(self, descriptor: int) -> None:
        """Before it is closed: a forked process may hold it too, and then closing is not enough."""
        del self.sources[descriptor]
        self.far.pop(descriptor, None)
        with contextlib.suppress(FileNotFoundError):
            self.epoll.unregister(descriptor)

    def wait(self, timeout_s: float) -> list[Source]:
        """Block until something is there or the time is up; what is ready."""
        ready: list[Source] = []
        if self.far:
            ready += [source for source in self.far.values() if source.ready()]
            timeout_s = 0.0 if ready else min(timeout_s, *(source.rest_s() for source in self.far.values()))
        for descriptor, _ in self.epoll.poll(timeout_s):
            source = self.sources.get(descriptor)
            if isinstance(source, Listener):
                source.hear(descriptor)
                if not source.inbox:
                    continue
            elif descriptor in self.far and not self.far[descriptor].ready():
                continue
            if source is not None and source not in ready:
                ready.append(source)
        return ready

    def close(self) -> None:
        self.epoll.close()


def server_path(folder: Path, shard: int, life: int) -> Path:
    """Where a server listens: each life of it somewhere else, so that nobody speaks to one and means another."""
    return folder / f"server-{shard}.{life}"


def timeval(seconds: float) -> bytes:
    """As the kernel wants a time-out."""
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
