"""TCP, with keys or without: no thread, no queue of its own, no copy but the kernel's and what is encrypted.

The thread that uses it does everything, when it waits: it sends what did not fit into the kernel's buffers, and reads
what has arrived. For those who compute meanwhile there is `ThreadedTransport`.

The kernels find out that a host is gone: they probe each other when nothing was said for a second, and what nobody
confirms is noticed here. A program that hangs is not noticed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from paceline.runtime.live.messaging.addresses import host_and_port
from paceline.runtime.live.messaging.greetings import KeyedAnswer, KeyedCall, OpenAnswer, OpenCall
from paceline.runtime.live.messaging.handshake import HandshakeFailed
from paceline.runtime.live.messaging.keys import KeyPair
from paceline.runtime.live.messaging.tcp_connection import PATIENCE, TcpConnection
from paceline.runtime.live.messaging.tcp_framing import SCRATCH, ConnectionLimits, FramePlacement
from paceline.runtime.live.messaging.transport import (
    BROKE_OFF,
    DAMAGED,
    HANDSHAKE_S,
    UNREACHED,
    ConnectionEvent,
    ReceivedMessage,
    first_free,
)

if TYPE_CHECKING:
    from paceline.runtime.live.messaging.transport import Part

BACKLOG = 1024
UNIDENTIFIED = 256
"""Connections that have not greeted yet; with more, the oldest is closed."""
LOOK_S = 0.5
"""How often the transport checks whether the other ends still confirm what they get."""
AHEAD = 64
"""Messages that a thread reads before somebody wants them."""
TOO_MANY = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""The kernel has no room for one more connection."""
IN, BOTH = select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT


class TcpTransport:
    """A listener's socket and its connections, or a client's one connection."""

    def __init__(
        self,
        keys: KeyPair | None,
        largest: int,
        most_waiting: int,
        place_frames: FramePlacement | None = None,
        is_known: Callable[[str], bool] | None = None,
    ) -> None:
        """A listener with keys admits those whose public key `is_known`."""
        self.keys = keys
        self.limits = ConnectionLimits(largest, place_frames)
        self.is_known = is_known or (lambda key: False)
        self.most_waiting = most_waiting
        self.epoll = select.epoll()
        self.acceptor: socket.socket | None = None
        self.connections: dict[int, TcpConnection] = {}
        """All connections, by descriptor."""
        self.routes: dict[bytes, TcpConnection] = {}
        """Those that have greeted, by the client's name; at a client by ""."""
        self.unidentified: dict[int, TcpConnection] = {}
        """Those that have not greeted yet, by descriptor, the oldest first."""
        self.inbox: deque[ReceivedMessage] = deque()
        self.pending_events: deque[tuple[ConnectionEvent, int, str]] = deque()
        self.scratch = memoryview(bytearray(SCRATCH))
        self.checked_s = time.monotonic()

    def listen(self, host: str, ports: tuple[int, int]) -> int:
        acceptor = first_free(host, ports, listening)
        acceptor.setblocking(False)
        self.acceptor = acceptor
        self.epoll.register(acceptor.fileno(), IN)
        return int(acceptor.getsockname()[1])

    def connect(self, address: str, name: bytes, server_key: str) -> None:
        self.close_connections(0)
        host, port = host_and_port(address)
        try:
            greeting = OpenCall(name) if self.keys is None else KeyedCall(self.keys, server_key)
        except HandshakeFailed:
            self.pending_events.append((ConnectionEvent.CLOSED, -1, BROKE_OFF))
            return
        try:
            connection = TcpConnection(socket.socket(), self.limits, greeting)
        except OSError:  # there are too many
            self.pending_events.append((ConnectionEvent.CLOSED, -1, UNREACHED))
            return
        try:
            begun = connection.socket.connect_ex((socket.gethostbyname(host), port))
        except OSError as error:
            begun = error.errno or errno.EHOSTUNREACH
        if begun in (0, errno.EINPROGRESS):
            self._add(connection)
        else:
            connection.socket.close()
            self.pending_events.append((ConnectionEvent.CLOSED, -1, UNREACHED))

    def events(self) -> Iterator[tuple[ConnectionEvent, int, str]]:
        if time.monotonic() - self.checked_s > LOOK_S:
            self._check_all()
        while self.pending_events:
            yield self.pending_events.popleft()

    def send(self, route: bytes, parts: Sequence[Part], may_change: bool = False) -> bool:
        connection = self.routes.get(route)
        if connection is None or (self.most_waiting and len(connection.outgoing) >= self.most_waiting):
            return False
        message = connection.add(parts)
        if len(connection.outgoing) == 1:
            self._send(connection)
        if may_change:
            message.keep()
        return True

    def is_sending(self, route: bytes) -> bool:
        connection = self.routes.get(route)
        return connection is not None and connection.is_sending()

    def patience_s(self, route: bytes) -> float:
        connection = self.routes.get(route)
        return PATIENCE * connection.round_trip_s() if connection is not None else 0.0

    def has_room(self) -> bool:
        """Whether some connection takes more messages."""
        return any(len(connection.outgoing) <= self.most_waiting // 2 for connection in self.routes.values())

    def receive(self) -> ReceivedMessage | None:
        while not self.inbox and self.wait(0.0):
            pass
        return self.inbox.popleft() if self.inbox else None

    def wait(self, timeout_s: float) -> bool:
        """Waits for one connection and does what can be done for it; False if there was none.

        The others have their turn next: what is read is used while it is in the cache.
        """
        ready = self.epoll.poll(timeout_s, 1)
        for descriptor, event in ready:
            connection = self.connections.get(descriptor)
            if connection is not None:
                if event & select.EPOLLOUT:
                    self._send(connection)
                if event & ~select.EPOLLOUT and connection.descriptor in self.connections:
                    self._read(connection)
            elif self.acceptor is not None:
                self._accept(self.acceptor)
        return bool(ready)

    def rest_s(self) -> float:
        return 0.0 if self.pending_events else LOOK_S

    def close_connections(self, linger_ms: int) -> None:
        until = time.monotonic() + linger_ms / 1000
        for connection in list(self.connections.values()):
            poll = select.poll()
            poll.register(connection.descriptor, select.POLLOUT)
            with contextlib.suppress(OSError):
                established = connection.reader.is_established
                while established and connection.has_unsent and (left_s := until - time.monotonic()) > 0:
                    poll.poll(1000 * left_s)
                    with contextlib.suppress(BlockingIOError):
                        connection.send_some()
            self._remove(connection)
        self.pending_events.clear()
        self.inbox.clear()

    def close(self, linger_ms: int) -> None:
        if self.epoll.closed:
            return
        if self.acceptor is not None:
            self.epoll.unregister(self.acceptor.fileno())
            self.acceptor.close()
        self.close_connections(linger_ms)
        self.epoll.close()

    def _add(self, connection: TcpConnection) -> None:
        self.connections[connection.descriptor] = self.unidentified[connection.descriptor] = connection
        connection.interest = BOTH
        self.epoll.register(connection.descriptor, BOTH)

    def _accept(self, acceptor: socket.socket) -> None:
        try:
            accepted, _ = acceptor.accept()
        except OSError as error:
            if error.errno not in TOO_MANY:
                return  # it is gone again
            if not self.unidentified:
                self.epoll.modify(acceptor.fileno(), 0)  # until the next check
        else:
            greeting = OpenAnswer() if self.keys is None else KeyedAnswer(self.keys, self.is_known)
            connection = TcpConnection(accepted, self.limits, greeting)
            self._add(connection)
            self.pending_events.append((ConnectionEvent.ACCEPTED, connection.descriptor, ""))
            if len(self.unidentified) <= UNIDENTIFIED:
                return
        for oldest in list(self.unidentified.values())[:1]:
            self._lose(oldest, BROKE_OFF)

    def _send(self, connection: TcpConnection) -> None:
        try:
            connection.send_some()
        except BlockingIOError:
            pass
        except OSError:
            # The end is read after whatever came before it. Without `drop`, half a message could stay unfinished.
            connection.drop()
        interest = BOTH if connection.has_unsent else IN
        if interest != connection.interest:
            connection.interest = interest
            self.epoll.modify(connection.descriptor, interest)

    def _read(self, connection: TcpConnection) -> None:
        messages, reader = connection.read(self.scratch), connection.reader
        if connection.greeting:
            self._send(connection)
        if reader.is_established and connection.descriptor in self.unidentified:
            self._identify(connection)
        for parts in messages:
            self.inbox.append(ReceivedMessage(reader.name, connection.descriptor, parts or (), parts is not None))
        if connection.closed is not None:
            self._lose(connection, connection.closed or (BROKE_OFF if connection.has_greeted else UNREACHED))

    def _identify(self, connection: TcpConnection) -> None:
        """The other end has greeted; an older connection of the same name is closed."""
        del self.unidentified[connection.descriptor]
        name = connection.reader.name
        if (before := self.routes.get(name)) is not None:
            self._lose(before, BROKE_OFF)
        self.routes[name] = connection
        if self.acceptor is None:
            self.pending_events.append((ConnectionEvent.ESTABLISHED, connection.descriptor, ""))

    def _check_all(self) -> None:
        """Closes connections whose other end is silent, or has not greeted in time."""
        self.checked_s = now = time.monotonic()
        if self.acceptor is not None:
            self.epoll.modify(self.acceptor.fileno(), IN)
        for connection in list(self.connections.values()):
            limit_s = HANDSHAKE_S + PATIENCE * connection.round_trip_s()
            if not connection.reader.is_established and now - connection.began_s > limit_s:
                self._lose(connection, BROKE_OFF if connection.has_greeted else UNREACHED)
            elif connection.reader.is_established and connection.is_silent():
                self._lose(connection, "")

    def _lose(self, connection: TcpConnection, reason: str) -> None:
        why = "is gone" if connection.reader.is_established and reason != DAMAGED else reason
        self.pending_events.append((ConnectionEvent.CLOSED, connection.descriptor, why))
        self._remove(connection)

    def _remove(self, connection: TcpConnection) -> None:
        del self.connections[connection.descriptor]
        self.unidentified.pop(connection.descriptor, None)
        if self.routes.get(connection.reader.name) is connection:
            del self.routes[connection.reader.name]
        self.epoll.unregister(connection.descriptor)  # a forked process may hold it too, and then closing is not enough
        connection.shut_down()  # for the same reason
        connection.socket.close()


class ThreadedTransport:
    """A TCP transport that a thread looks after, for those who compute while messages come and leave."""

    def __init__(self, transport: TcpTransport) -> None:
        self.transport = transport
        self.lock = threading.RLock()
        """Held by whoever uses the transport."""
        self.room = threading.Condition(self.lock)
        self.epoll = select.epoll()
        self.ready = os.eventfd(0, os.EFD_NONBLOCK)
        """Set when something has come, or happened, or can leave that could not."""
        self.epoll.register(self.ready, IN)
        self.ending = os.eventfd(0, os.EFD_NONBLOCK)
        self.full = False
        """What a client sent last found no room. (A listener cuts such a process off.)"""
        self.thread: threading.Thread | None = None

    def listen(self, host: str, ports: tuple[int, int]) -> int:
        with self._used():
            return self.transport.listen(host, ports)

    def connect(self, address: str, name: bytes, server_key: str) -> None:
        with self._used():
            self.transport.connect(address, name, server_key)

    def events(self) -> Iterator[tuple[ConnectionEvent, int, str]]:
        with self._used():
            events = list(self.transport.events())
        return iter(events)

    def send(self, route: bytes, parts: Sequence[Part], may_change: bool = False) -> bool:
        with self._used():
            sent = self.transport.send(route, parts, may_change)
            self.full = not sent and self.transport.acceptor is None
            return sent

    def is_sending(self, route: bytes) -> bool:
        with self.lock:
            return self.transport.is_sending(route)

    def patience_s(self, route: bytes) -> float:
        with self.lock:
            return self.transport.patience_s(route)

    def receive(self) -> ReceivedMessage | None:
        with self._used():
            self.room.notify()
            return self.transport.receive()

    def wait(self, timeout_s: float) -> bool:
        return bool(self.epoll.poll(timeout_s))

    def rest_s(self) -> float:
        return self.transport.rest_s()

    def close_connections(self, linger_ms: int) -> None:
        with self._used():
            self.transport.close_connections(linger_ms)

    def close(self, linger_ms: int) -> None:
        if self.epoll.closed:
            return
        os.eventfd_write(self.ending, 1)
        with self._used():
            self.room.notify()
        if self.thread is not None:
            self.thread.join()
        self.transport.close(linger_ms)
        self.epoll.close()
        os.close(self.ready)
        os.close(self.ending)

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        """Holds the transport, and sets or clears `ready` after it was used."""
        with self.lock:
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, daemon=True, name="paceline tcp")
                self.thread.start()
            yield
            if self.transport.inbox or self.transport.pending_events or (self.full and self.transport.has_room()):
                os.eventfd_write(self.ready, 1)
            else:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.ready)

    def _run(self) -> None:
        """Sends and reads until the transport is closed."""
        with select.epoll() as epoll:
            epoll.register(self.transport.epoll.fileno(), IN)
            epoll.register(self.ending, IN)
            while all(descriptor != self.ending for descriptor, _ in epoll.poll()):
                with self._used():
                    self.transport.wait(0.0)
                    if len(self.transport.inbox) >= AHEAD:
                        self.room.wait()


def listening(interface: str, port: int) -> socket.socket:
    acceptor = socket.socket()
    try:
        acceptor.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        acceptor.bind((interface, port))
        acceptor.listen(BACKLOG)
    except OSError:
        acceptor.close()
        raise
    return acceptor
