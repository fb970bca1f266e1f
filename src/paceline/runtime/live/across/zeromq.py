"""ZeroMQ, and the only file that knows it: its sockets, their options, its keys, and what happens to connections.

Who is let in is asked of the listener's owner (ZeroMQ's own protocol for it, ZAP), by the thread that uses the socket:
nobody gets in while nobody waits. Frames of 64 KiB and more are not copied, on their way out or in.
"""

from __future__ import annotations

import enum
import errno
import select
import socket as system
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import zmq
from msgspec import Struct
from zmq.utils import z85

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from typing_extensions import Buffer

FRAME = 1 << 20
"""Bytes of the largest frame. ZeroMQ closes the connection that sends a larger one."""
SLACK = 1 << 10
"""What encryption adds to a frame, and more."""
SPARE = 1 << 10
"""Frames of a message that need not be full."""
HEARTBEAT_MS, HEARTBEAT_LIMIT_MS = 500, 1500
HANDSHAKE_MS = 3000
LINGER_MS = 1000
"""How long what was said last may take to leave, when a connection is closed."""
NEVER_MS = 3_600_000
"""Until ZeroMQ mends a connection by itself. Its own word for never, -1, hangs the closing of one call in four."""
POLLIN = int(zmq.POLLIN)
ZAP = "inproc://zeromq.zap.01"
DOMAIN = b"paceline"


class KeyPair(Struct, frozen=True):
    """For CURVE, each of 40 printable characters (Z85)."""

    public: str
    secret: str


def make_keys() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def public_of(secret: str) -> str:
    return zmq.curve_public(secret.encode()).decode()


def is_key(text: str) -> bool:
    """Whether this is the text of 32 bytes."""
    try:
        return len(text) == 40 and z85.encode(z85.decode(text)).decode() == text
    except (ValueError, KeyError, struct.error):
        return False


class Happening(enum.Enum):
    """What happens to a connection."""

    BEGUN = enum.auto()
    """A listener has accepted it. Nobody knows whose it is."""
    STANDS = enum.auto()
    """A caller was let in."""
    OVER = enum.auto()
    """It ended, or a caller's attempt did."""


HAPPENINGS = {
    zmq.EVENT_ACCEPTED: Happening.BEGUN,
    zmq.EVENT_HANDSHAKE_SUCCEEDED: Happening.STANDS,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: Happening.OVER,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: Happening.OVER,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: Happening.OVER,
    zmq.EVENT_CLOSED: Happening.OVER,
    zmq.EVENT_DISCONNECTED: Happening.OVER,
}
OF_LISTENERS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
OF_CALLERS = sum(HAPPENINGS)
REASONS = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "does not know this key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "broke off: it may have another key, or keys where we have none, or be busy",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "broke off: it may have another key, or keys where we have none, or be busy",
    zmq.EVENT_CLOSED: "cannot be reached",
}
"""Why a caller was not let in."""


class Taken(Struct, frozen=True):
    """A message as it came."""

    route: bytes
    """How its sender is answered; "" at a caller."""
    parts: list[zmq.Frame]
    whole: bool
    """These are all parts. Of a message that is too large few are."""

    @property
    def key(self) -> str:
        """The public key of its sender."""
        return str(self.parts[0].get("User-Id"))

    @property
    def descriptor(self) -> int:
        """Of the connection it came over."""
        return int(self.parts[0].get(zmq.SRCFD))

    @property
    def is_hello(self) -> bool:
        return len(self.parts) == 1 and not len(self.parts[0])

    def opened(self) -> tuple[bytes, list[memoryview]] | None:
        """The message and its frames; None if it is none."""
        parts = self.parts
        if not self.whole or self.is_hello:
            return None
        if len(parts[0]):
            return parts[0].bytes, [part.buffer for part in parts[1:]]
        end = 2 + int.from_bytes(parts[1].bytes[:4], "little")
        return b"".join(part.bytes for part in parts[2:end]), [part.buffer for part in parts[end:]]


HELLO: Sequence[Buffer] = (b"",)
"""The first message of a caller: a listener cannot answer whom it has not heard."""


def wrapped(message: bytes, frames: Sequence[Buffer]) -> Sequence[Buffer]:
    """The parts of a message. A header that is larger than a frame travels in pieces: nothing, how many, they."""
    if 0 < len(message) <= FRAME:
        return (message, *frames)
    pieces = [message[at : at + FRAME] for at in range(0, len(message), FRAME)]
    return (b"", len(pieces).to_bytes(4, "little"), *pieces, *frames)


class Post:
    """A listener's socket or a caller's, and something to wait for whatever happens to it."""

    def __init__(self, keys: KeyPair | None, hwm: int) -> None:
        self.keys = keys
        self.hwm = hwm
        self.context = zmq.Context(io_threads=1)  # one for each: who is let in is asked once for each context
        self.epoll = select.epoll()
        self.socket: zmq.Socket[bytes] | None = None
        self.monitor: zmq.Socket[bytes] | None = None
        self.zap: zmq.Socket[bytes] | None = None
        self.listens = False
        self.opened = 0
        """Sockets, so far."""

    def listen(self, host: str, ports: tuple[int, int]) -> int:
        """On which port."""
        if self.keys is not None:  # before there is a port to come to
            self.zap = self.context.socket(zmq.REP)
            self.zap.bind(ZAP)
            self.epoll.register(self.zap.fileno(), select.EPOLLIN)
        router = self._open(zmq.ROUTER, OF_LISTENERS)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self.keys is None:
            router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        else:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        self.listens = True
        return bind(router, host, ports)

    def call(self, address: str, name: bytes, server_key: str) -> None:
        """Once, in place of any call before: whether it stands, and when it is over, is told."""
        self.shut(0)
        dealer = self._open(zmq.DEALER, OF_CALLERS)
        dealer.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, HANDSHAKE_MS)
        if self.keys is None:
            dealer.setsockopt(zmq.ROUTING_ID, name)
        else:
            dealer.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
        dealer.connect(address)

    def _open(self, kind: int, events: int) -> zmq.Socket[bytes]:
        opened: zmq.Socket[bytes] = self.context.socket(kind)
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
        if self.keys is not None:
            opened.setsockopt(zmq.CURVE_PUBLICKEY, self.keys.public.encode())
            opened.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret.encode())
        self.opened += 1
        opened.monitor(f"inproc://monitor-{self.opened}", events)
        self.monitor = self.context.socket(zmq.PAIR)
        self.monitor.setsockopt(zmq.RCVHWM, 0)  # or ZeroMQ's thread would wait for us when much happens
        self.monitor.connect(f"inproc://monitor-{self.opened}")
        self.socket = opened
        self.epoll.register(opened.fileno(), select.EPOLLIN)
        self.epoll.register(self.monitor.fileno(), select.EPOLLIN)
        return opened

    def admit(self, is_known: Callable[[str], bool]) -> None:
        """Let in those who ask to be and whose key is known, and nobody else."""
        while self.zap is not None and has_some(self.zap):
            version, number, domain, _, _, mechanism, *credentials = self.zap.recv_multipart()
            key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" and domain == DOMAIN else ""
            verdict = (b"200", b"", key.encode()) if is_known(key) else (b"400", b"this key is not known", b"")
            self.zap.send_multipart((version, number, *verdict, b""))

    def happened(self) -> Iterator[tuple[Happening, int, str]]:
        """What has happened to connections: what, the descriptor, why."""
        while self.monitor is not None and has_some(self.monitor):
            event, value = struct.unpack("=Hi", self.monitor.recv_multipart()[0])
            if event in HAPPENINGS:
                yield HAPPENINGS[event], value, REASONS.get(event, "is gone")

    def send(self, parts: Sequence[Buffer]) -> bool:
        """False if it does not leave: nobody is at the other end of the route, or too much waits for it."""
        if self.socket is None:
            return False
        try:
            self.socket.send_multipart(parts, zmq.NOBLOCK, copy=False, track=False)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            return False
        return True

    def take(self, largest: int) -> Taken | None:
        """The next message, if there is one; of one that has more bytes, or too many frames, the beginning."""
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
        parts, size, most, whole = [part], len(part), largest // FRAME + SPARE, len(part) <= largest
        while part.more:
            part = self.socket.recv(copy=False)
            size += len(part)
            if whole and size <= largest and len(parts) < most:
                parts.append(part)
            else:
                whole = False
                del parts[1:]
        return Taken(route, parts, whole)

    def shut(self, linger_ms: int) -> None:
        """Close the socket, not the rest."""
        if self.socket is None or self.monitor is None:
            return
        self.epoll.unregister(self.socket.fileno())
        self.epoll.unregister(self.monitor.fileno())
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)
        self.socket = self.monitor = None

    def close(self, linger_ms: int) -> None:
        if self.epoll.closed:
            return
        if self.zap is not None:
            self.zap.close(0)
            self.zap = None
        self.shut(linger_ms)
        self.epoll.close()
        # ZeroMQ waits here for its threads, and has been seen to wait for good when somebody was refused just then.
        ending = threading.Thread(target=self.context.term, daemon=True)
        ending.start()
        ending.join(linger_ms / 1000 + 1.0)


def has_some(socket: zmq.Socket[bytes]) -> bool:
    """Whether there is something to receive."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & POLLIN)


def bind(router: zmq.Socket[bytes], host: str, ports: tuple[int, int]) -> int:
    """The first free port of the range."""
    first, last = ports
    try:
        interface = system.gethostbyname(host)
        for port in range(first, last + 1):
            try:
                router.bind(f"tcp://{interface}:{port or '*'}")
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
    except (OSError, zmq.ZMQError) as error:
        raise PacelineError(f"cannot listen on {host!r}, ports {first} to {last}: {error.strerror}") from None
    raise PacelineError(f"cannot listen on {host!r}: every port from {first} to {last} is taken")
