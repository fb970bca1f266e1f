"""ZeroMQ, and the only file that knows it: its sockets, their options, its keys, and what happens to connections.
Everything is encrypted.

Whom to admit is the decision of the thread that uses the listener (ZAP, ZeroMQ's own protocol for it): nobody is
admitted while nobody waits. Frames of 64 KiB and more are not copied, on their way out or in.
"""

from __future__ import annotations

import contextlib
import errno
import math
import select
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import zmq
from msgspec import Struct
from zmq.utils import z85

from paceline.runtime.live.messaging.transport import (
    BROKE_OFF,
    FRAME,
    HANDSHAKE_S,
    SLACK,
    SPARE,
    UNREACHED,
    ConnectionEvent,
    ReceivedMessage,
    first_free,
)

if TYPE_CHECKING:
    from paceline.runtime.live.messaging.transport import Part

HEARTBEAT_MS, HEARTBEAT_LIMIT_MS = 500, 1500
HANDSHAKE_MS = int(1000 * HANDSHAKE_S)
NEVER_MS = 3_600_000
"""When ZeroMQ reconnects by itself. Its own value for never, -1, hangs the closing of one connection in four."""
POLLIN = int(zmq.POLLIN)
ZAP = "inproc://zeromq.zap.01"
DOMAIN = b"paceline"


class KeyPair(Struct, frozen=True):
    """A key pair for CURVE, each key of 40 printable characters (Z85)."""

    public: str
    secret: str


def make_keys() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def public_of(secret: str) -> str:
    return zmq.curve_public(secret.encode()).decode()


def is_key(text: str) -> bool:
    """Whether this text is 32 bytes, encoded."""
    try:
        return len(text) == 40 and z85.encode(z85.decode(text)).decode() == text
    except (ValueError, KeyError, struct.error):
        return False


EVENTS = {
    zmq.EVENT_ACCEPTED: ConnectionEvent.ACCEPTED,
    zmq.EVENT_HANDSHAKE_SUCCEEDED: ConnectionEvent.ESTABLISHED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: ConnectionEvent.CLOSED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: ConnectionEvent.CLOSED,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: ConnectionEvent.CLOSED,
    zmq.EVENT_CLOSED: ConnectionEvent.CLOSED,
    zmq.EVENT_DISCONNECTED: ConnectionEvent.CLOSED,
}
OF_LISTENERS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
OF_CLIENTS = sum(EVENTS)
REASONS = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "does not know this key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: BROKE_OFF,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: BROKE_OFF,
    zmq.EVENT_CLOSED: UNREACHED,
}
"""Why a client was not admitted."""


class ZeromqTransport:
    """A listener's socket (ROUTER) or a client's (DEALER)."""

    def __init__(self, keys: KeyPair, largest: int, hwm: int) -> None:
        self.keys = keys
        self.largest = largest
        self.hwm = hwm
        self.context = zmq.Context(io_threads=1)  # one for each: ZAP decides for a whole context
        self.context.set(zmq.BLOCKY, 0)  # sockets do not linger unless they are closed so
        self.abandoned = weakref.finalize(self, destroy, self.context, 0)
        """Ends the context of a transport that is garbage and was never closed: as garbage it could block."""
        self.abandoned.atexit = False
        self.epoll = select.epoll()
        self.socket: zmq.Socket[bytes] | None = None
        self.monitor: zmq.Socket[bytes] | None = None
        self.zap: zmq.Socket[bytes] | None = None
        self.listens = False
        self.opened = 0
        """How many sockets were opened so far."""

    def listen(self, host: str, ports: tuple[int, int]) -> int:
        self.zap = self.context.socket(zmq.REP)  # before there is a port to come to
        self.zap.bind(ZAP)
        self.epoll.register(self.zap.fileno(), select.EPOLLIN)
        router = self._open(zmq.ROUTER, OF_LISTENERS)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        self.listens = True

        def bind(interface: str, port: int) -> int:
            try:
                router.bind(f"tcp://{interface}:{port or '*'}")
            except zmq.ZMQError as error:
                raise OSError(error.errno, error.strerror) from None
            return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

        return first_free(host, ports, bind)

    def connect(self, address: str, name: bytes, server_key: str) -> None:
        del name  # it is the key's
        self.close_connections(0)
        dealer = self._open(zmq.DEALER, OF_CLIENTS)
        dealer.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, HANDSHAKE_MS)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
        dealer.connect(address)

    def _open(self, kind: int, events: int) -> zmq.Socket[bytes]:
        opened: zmq.Socket[bytes] = self.context.socket(kind)
        self.socket = opened
        for option, value in (
            (zmq.SNDHWM, self.hwm),
            (zmq.RCVHWM, self.hwm),
            (zmq.MAXMSGSIZE, FRAME + SLACK),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_LIMIT_MS),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.IPV6, 0),
        ):
            opened.setsockopt(option, value)
        opened.setsockopt(zmq.CURVE_PUBLICKEY, self.keys.public.encode())
        opened.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret.encode())
        self.opened += 1
        opened.monitor(f"inproc://monitor-{self.opened}", events)
        self.monitor = self.context.socket(zmq.PAIR)
        self.monitor.setsockopt(zmq.RCVHWM, 0)  # or ZeroMQ's thread would wait for us when much happens
        self.monitor.connect(f"inproc://monitor-{self.opened}")
        self.epoll.register(opened.fileno(), select.EPOLLIN)
        self.epoll.register(self.monitor.fileno(), select.EPOLLIN)
        return opened

    def admit(self, is_known: Callable[[str], bool]) -> None:
        while self.zap is not None and has_message(self.zap):
            version, number, domain, _, _, mechanism, *credentials = self.zap.recv_multipart()
            key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" and domain == DOMAIN else ""
            verdict = (b"200", b"", key.encode()) if is_known(key) else (b"400", b"this key is not known", b"")
            self.zap.send_multipart((version, number, *verdict, b""))

    def events(self) -> Iterator[tuple[ConnectionEvent, int, str]]:
        while self.monitor is not None and has_message(self.monitor):
            event, value = struct.unpack("=Hi", self.monitor.recv_multipart()[0])
            if event in EVENTS:
                yield EVENTS[event], value, REASONS.get(event, "is gone")

    def send(self, route: bytes, parts: Sequence[Part], may_change: bool = False) -> bool:
        if self.socket is None:
            return False
        try:
            whole = [b"".join(part) if isinstance(part, tuple) else part for part in parts]
            self.socket.send_multipart(
                [route, *whole] if self.listens else whole, zmq.NOBLOCK, copy=may_change, track=False
            )
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            return False
        return True

    def receive(self) -> ReceivedMessage | None:
        """Returns the next message, truncated if it has too many bytes or frames."""
        if self.socket is None:
            return None
        try:
            part = self.socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        route = b""
        if self.listens:
            route = part.bytes
            part = self.socket.recv(copy=False)
        first, largest = part, self.largest
        parts, size, most, whole = [part.buffer], len(part), largest // FRAME + SPARE, len(part) <= largest
        while part.more:
            part = self.socket.recv(copy=False)
            size += len(part)
            if whole and size <= largest and len(parts) < most:
                parts.append(part.buffer)
            else:
                whole = False
                del parts[1:]
        return ReceivedMessage(
            route, int(first.get(zmq.SRCFD)), str(first.get("User-Id")) if route else "", parts, whole
        )

    def wait(self, timeout_s: float) -> bool:
        return bool(self.epoll.poll(timeout_s))

    def rest_s(self) -> float:
        return math.inf

    def close_connections(self, linger_ms: int) -> None:
        for socket in (self.monitor, self.socket):
            if socket is not None:
                with contextlib.suppress(OSError):  # it was not opened all the way
                    self.epoll.unregister(socket.fileno())
        if self.socket is not None:
            self.socket.disable_monitor()
        if self.monitor is not None:
            self.monitor.close(0)
        if self.socket is not None:
            self.socket.close(linger_ms)
        self.socket = self.monitor = None

    def close(self, linger_ms: int) -> None:
        if self.epoll.closed:
            return
        if self.zap is not None:
            self.zap.close(0)
            self.zap = None
        self.close_connections(linger_ms)
        self.epoll.close()
        self.abandoned.detach()
        destroy(self.context, linger_ms)


def destroy(context: zmq.Context[zmq.Socket[bytes]], linger_ms: int) -> None:
    """Closes what is open, without lingering, and waits for ZeroMQ's threads.

    This was seen to block for ever when somebody was refused just then. Hence a thread does it, which is waited for a
    while and keeps the context from being ended once more as garbage: that would block whoever collects it.
    """
    ending = threading.Thread(target=context.destroy, args=(0,), daemon=True)
    ending.start()
    ending.join(linger_ms / 1000 + 1.0)


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message can be received."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & POLLIN)
