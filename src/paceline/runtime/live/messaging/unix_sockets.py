"""Unix sockets, and the only file that knows them: listeners, links, and waiting for them and for processes.

Within one host this is the whole control channel (docs/decisions/0010). A message is preceded by four bytes of length.
The first one on a connection is the client's name; the folder with the sockets belongs to the user alone, so a name is
believed.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
from collections import deque
from pathlib import Path
from typing import Protocol

PATIENCE_S = 1.0
"""A client whose buffer is full and that does not read for so long is disconnected."""
LARGEST = 1 << 26
"""Bytes of one message. Layouts of large models are the largest; tensors are not sent this way."""
READ_BYTES = 1 << 16
BACKLOG = 1024
GONE = (BrokenPipeError, ConnectionResetError)


class Stream:
    """The messages of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.name: bytes | None = None
        self.inbox: deque[bytes] = deque()
        self.incomplete = bytearray()
        """The beginning of a message that has not arrived whole."""

    def send(self, message: bytes) -> None:
        self.socket.sendall(len(message).to_bytes(4, "little") + message)

    def take(self, flags: int) -> bool:
        """Moves what has arrived to the inbox; false at the end. Raises `BlockingIOError` if nothing has arrived."""
        try:
            data = self.socket.recv(READ_BYTES, flags)
        except GONE:
            return False
        if not data:
            return False
        if not self.incomplete and int.from_bytes(data[:4], "little") == len(data) - 4:
            self.inbox.append(data[4:])
            return True
        buffer = self.incomplete
        buffer += data
        start = 0
        while len(buffer) - start >= 4:
            end = start + 4 + int.from_bytes(buffer[start : start + 4], "little")
            if end - start > LARGEST:
                return False
            if end > len(buffer):
                break
            self.inbox.append(bytes(buffer[start + 4 : end]))
            start = end
        del buffer[:start]
        return True


class Listener:
    """Accepts any number of named clients at one path, and reads while a `Waiter` that watches it waits."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self.socket.bind(str(path))
        path.chmod(0o600)
        self.socket.listen(BACKLOG)
        self.waiter: Waiter | None = None
        self.streams: dict[int, Stream] = {}
        """All connections, by descriptor."""
        self.named: dict[bytes, Stream] = {}
        self.inbox: deque[tuple[bytes, bytes]] = deque()

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next (client, message) that was read."""
        return self.inbox.popleft() if self.inbox else None

    def send(self, client: bytes, message: bytes) -> bool:
        """Sends a message; false if the client is not connected."""
        stream = self.named.get(client)
        if stream is None:
            return False
        try:
            stream.send(message)
        except (*GONE, BlockingIOError):
            self._drop(stream)
            return False
        return True

    def hear(self, descriptor: int) -> None:
        """Reads from a connection, or accepts one if the descriptor is the listener's own."""
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
    """A connection to a listener, by a name of one's own."""

    def __init__(self, path: Path, name: bytes) -> None:
        self.path = path
        self.name = name
        self.patience_s = -1.0
        self.stream: Stream | None = None
        self.reopen()

    @property
    def gone(self) -> bool:
        """Whether nobody is at the other end. What is sent until somebody is, and the link is reopened, is lost."""
        return self.stream is None

    @property
    def heard_some(self) -> bool:
        """Whether a message was read and not received yet."""
        return self.stream is not None and bool(self.stream.inbox)

    def reopen(self) -> None:
        """Connects, if somebody listens."""
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


class RemoteSource(Protocol):
    """What a `Waiter` needs to know of a listener or a link of `messaging/remote_links.py`."""

    def fileno(self) -> int:
        """Readable when something may have come. Any use of the source may clear that."""

    def ready(self) -> bool:
        """Takes in what has come; whether there is something to receive. To be called before blocking."""

    def rest_s(self) -> float:
        """How long the source can be left alone if nothing comes."""


Source = Listener | Link | RemoteSource | int


class Waiter:
    """Waits until any of several listeners, links or file descriptors has something."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.sources: dict[int, Source] = {}
        """All sources, by descriptor."""
        self.remote: dict[int, RemoteSource] = {}
        """The sources that are remote, by file descriptor."""

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
            self.remote[source.fileno()] = source
            self.add(source.fileno(), source)

    def add(self, descriptor: int, source: Source) -> None:
        self.sources[descriptor] = source
        self.epoll.register(descriptor, select.EPOLLIN)

    def forget(self, descriptor: int) -> None:
        """Stops watching a descriptor. Closing it is not enough: a forked process may hold it too."""
        del self.sources[descriptor]
        self.remote.pop(descriptor, None)
        with contextlib.suppress(FileNotFoundError):
            self.epoll.unregister(descriptor)

    def rest_s(self) -> float:
        """How long all remote sources can be left alone if nothing comes."""
        return min((source.rest_s() for source in self.remote.values()), default=math.inf)

    def wait(self, timeout_s: float) -> list[Source]:
        """Blocks until a source is ready or the time is up; returns the sources that are."""
        ready: list[Source] = []
        if self.remote:
            ready += [source for source in self.remote.values() if source.ready()]
            timeout_s = 0.0 if ready else min(timeout_s, self.rest_s())
        for descriptor, _ in self.epoll.poll(timeout_s):
            source = self.sources.get(descriptor)
            if isinstance(source, Listener):
                source.hear(descriptor)
                if not source.inbox:
                    continue
            elif descriptor in self.remote and not self.remote[descriptor].ready():
                continue
            if source is not None and source not in ready:
                ready.append(source)
        return ready

    def close(self) -> None:
        self.epoll.close()


def server_path(folder: Path, shard: int, incarnation: int) -> Path:
    """Where an incarnation of a server listens: each has a path of its own, so that nobody reaches another."""
    return folder / f"server-{shard}.{incarnation}"


def timeval(seconds: float) -> bytes:
    """Packs a time-out for the kernel."""
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
