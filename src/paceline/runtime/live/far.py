"""Messages between hosts, over TCP, and the only file that knows ZeroMQ: listeners, links, keys.

A message is a header and any number of raw frames of at most `FRAME` bytes behind it, all of it or nothing. With keys
(CURVE) everything is encrypted, a listener lets in nobody whose key was not enrolled, and who speaks is what the key
was enrolled as; a name in a message is never believed. Without keys whoever reaches the port is believed.

One connection is one socket of ZeroMQ, and is never mended behind the caller's back: a link whose connection broke is
`gone` until it is reopened, for nobody can tell what of it arrived. Before it stood there is nothing to lose: a link
that finds nobody, or that is refused, tries again by itself for as long as somebody waits for it.

ZeroMQ answers heartbeats from a thread of its own, so a host that is gone is noticed within two seconds, and a program
that hangs is not noticed at all. A forked child must not touch what its parent made here, not even to close it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import socket as system
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import zmq
from msgspec import Struct
from zmq.utils import z85

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from typing_extensions import Buffer

FRAME = 1 << 20
"""Bytes of the largest frame. ZeroMQ closes the connection that sends a larger one."""
LARGEST = 1 << 32
"""Bytes of the largest message, frames and all, unless a listener is told otherwise."""
SLACK = 1 << 10
"""What encryption adds to a frame, and more."""
SPARE = 1 << 10
"""Frames of a message that need not be full."""
QUEUE = 64
"""Messages that may wait for one peer at each end, unless said otherwise."""
HEARTBEAT_MS, HEARTBEAT_LIMIT_MS = 500, 1500
HANDSHAKE_MS = 3000
LINGER_MS = 1000
"""How long what was said last may take to leave, when a connection is closed."""
BACK_OFF_S = (0.1, 1.0)
"""Between two attempts of a link to get in: the first pause and the longest."""
BETWEEN = 32
"""Messages taken before those who knock are looked after again."""
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


class Peer(Struct, frozen=True):
    """A named process, by one connection of it."""

    route: bytes
    descriptor: int
    address: object
    """Of the other end of the connection, or None: that the descriptor is still this connection's."""


class Post:
    """One socket of ZeroMQ, what happens to its connections, and something to wait for all of it."""

    def __init__(self, keys: KeyPair | None, hwm: int) -> None:
        self.keys = keys
        self.hwm = hwm
        self.context = zmq.Context(io_threads=1)
        self.epoll = select.epoll()
        self.socket: zmq.Socket[bytes] | None = None
        self.monitor: zmq.Socket[bytes] | None = None
        self.monitors = 0

    def fileno(self) -> int:
        """Readable when something may have come; before waiting for it, ask `ready`."""
        return self.epoll.fileno()

    def open(self, kind: int, events: int) -> zmq.Socket[bytes]:
        """The socket, with its options set, not yet bound or connected."""
        opened: zmq.Socket[bytes] = self.context.socket(kind)
        for option, value in (
            (zmq.LINGER, LINGER_MS),
            (zmq.SNDHWM, self.hwm),
            (zmq.RCVHWM, self.hwm),
            (zmq.SNDTIMEO, 0),
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
        self.monitors += 1
        opened.monitor(f"inproc://monitor-{self.monitors}", events)
        self.monitor = self.context.socket(zmq.PAIR)
        self.monitor.setsockopt(zmq.RCVHWM, 0)
        self.monitor.connect(f"inproc://monitor-{self.monitors}")
        self.socket = opened
        self.epoll.register(opened.fileno(), select.EPOLLIN)
        self.epoll.register(self.monitor.fileno(), select.EPOLLIN)
        return opened

    def events(self) -> Iterator[tuple[int, int]]:
        """What has happened to the connections: (event, descriptor or reason)."""
        while self.monitor is not None and has_some(self.monitor):
            yield struct.unpack("=HI", self.monitor.recv_multipart()[0])

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

    def close(self) -> None:
        if not self.epoll.closed:
            self.shut(LINGER_MS)
            self.epoll.close()
            self.context.term()


class FarListener(Post):
    """Accepts any number of named processes on one port. It hears them, and lets them in, while somebody waits for it.

    `ports` are the first and the last that may be used; (0, 0) leaves it to the system. `hwm` is how many messages may
    wait for one process, 0 for any number: one that lets them pile up is cut off.
    """

    def __init__(
        self, host: str, ports: tuple[int, int], keys: KeyPair | None, largest: int = LARGEST, hwm: int = QUEUE
    ) -> None:
        super().__init__(keys, hwm)
        self.largest = largest
        self.names: dict[str, bytes] = {}
        """By key."""
        self.enrolled: dict[bytes, str] = {}
        """The key of each name."""
        self.peers: dict[bytes, Peer] = {}
        """By name."""
        self.open_descriptors: set[int] = set()
        self.at: dict[int, bytes] = {}
        """Whose connection has this descriptor."""
        self.ending: list[bytes] = []
        """Whose connection ended; what they said before may still be to be read."""
        self.ended: list[bytes] = []
        self.inbox: deque[tuple[bytes, bytes, list[memoryview]]] = deque()
        self.news = False
        self.taken = 0
        self.warned: set[bytes] = set()
        self.zap: zmq.Socket[bytes] | None = None
        if keys is not None:  # before there is a port to come to
            self.zap = self.context.socket(zmq.REP)
            self.zap.bind(ZAP)
            self.epoll.register(self.zap.fileno(), select.EPOLLIN)
        router = self.open(zmq.ROUTER, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if keys is None:
            router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        else:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        try:
            self.port = bind(router, host, ports)
        except PacelineError:
            self.close()
            raise

    def enrol(self, public: str, name: bytes) -> None:
        """Whoever has this key is this process, and nobody else is."""
        if self.enrolled.get(name) == public:
            return
        self.expel(name)
        self.expel(self.names.get(public, b""))
        self.names[public] = name
        self.enrolled[name] = public

    def expel(self, name: bytes) -> None:
        """Forget its key and end its connection."""
        self.names.pop(self.enrolled.pop(name, ""), None)
        self._drop(name)

    def connected(self, name: bytes) -> bool:
        return name in self.peers

    def gone(self) -> list[bytes]:
        """Whose connection ended since this was last asked, all that came over it having been received.

        Some may be back by now (`connected`).
        """
        ended, self.ended = self.ended, []
        return ended

    def receive(self) -> tuple[bytes, bytes, list[memoryview]] | None:
        """The next (name, message, frames)."""
        if self.inbox:
            return self.inbox.popleft()
        self.taken += 1
        if self.taken % BETWEEN == 0:
            self._look_after()
        return self._take()

    def send(self, name: bytes, message: bytes, frames: Sequence[Buffer] = ()) -> bool:
        """False if that process is not connected. What is in `frames` must not change before it has arrived."""
        peer = self.peers.get(name)
        if peer is None or self.socket is None:
            return False
        try:
            self.socket.send_multipart([peer.route, *wrapped(message, frames)], zmq.NOBLOCK, copy=False, track=False)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            self._drop(name)
            self.ending.append(name)
            return False
        return True

    def ready(self) -> bool:
        """Take in what has come; whether there is a message, or somebody is gone who was not before."""
        if self.socket is None:
            return False
        self._look_after()
        if not self.inbox and (message := self._take()) is not None:
            self.inbox.append(message)
        news, self.news = self.news, False
        return news or bool(self.inbox)

    def rest_s(self) -> float:
        """How long this can be left alone if nothing comes."""
        return math.inf

    def close(self) -> None:
        if self.zap is not None:
            self.epoll.unregister(self.zap.fileno())
            self.zap.close(0)
            self.zap = None
        super().close()

    def _look_after(self) -> None:
        """Those who ask to be let in, and those who are gone."""
        while self.zap is not None and has_some(self.zap):
            version, number, domain, _, _, mechanism, *credentials = self.zap.recv_multipart()
            key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" and domain == DOMAIN else ""
            verdict = (b"200", b"", key.encode()) if key in self.names else (b"400", b"this key is not known", b"")
            self.zap.send_multipart((version, number, *verdict, b""))
        for event, descriptor in self.events():
            if event == zmq.EVENT_ACCEPTED:
                self.open_descriptors.add(descriptor)
            else:
                self.open_descriptors.discard(descriptor)
                self._lose(self.at.get(descriptor))

    def _take(self) -> tuple[bytes, bytes, list[memoryview]] | None:
        """The next message of somebody who has a name."""
        while self.socket is not None:
            taken = take(self.socket, self.largest)
            if taken is None:
                if self.ending:
                    self.ended += self.ending
                    self.ending.clear()
                    self.news = True
                return None
            (route, *parts), whole = taken
            name = self._name(route, parts)
            if name is None:
                continue
            peer = self.peers.get(name)
            hello = not len(parts[0]) and len(parts) == 1
            if hello or peer is None or peer.route != route.bytes:
                self._meet(name, route.bytes, parts[0].get(zmq.SRCFD))
            message = unwrapped(parts) if whole and not hello else None
            if message is not None:
                return (name, *message)
            if not hello and name not in self.warned:
                self.warned.add(name)
                print(f"paceline: {name.decode(errors='replace')} sent a message that is too large", file=sys.stderr)
        return None

    def _name(self, route: zmq.Frame, parts: list[zmq.Frame]) -> bytes | None:
        if not parts:
            return None
        if self.keys is None:
            return None if route.bytes.startswith(b"\0") else route.bytes
        return self.names.get(str(parts[0].get("User-Id")))

    def _meet(self, name: bytes, route: bytes, descriptor: int) -> None:
        """Somebody speaks for the first time on a connection."""
        self._look_after()  # so that the end of the descriptor's last connection is not taken for the end of this one
        old = self.peers.get(name)
        if old is not None and (old.route, old.descriptor) == (route, descriptor):
            return
        if old is not None:
            self._drop(name)
            self.ending.append(name)
        self._lose(self.at.get(descriptor))
        self.peers[name] = Peer(route, descriptor, other_end(descriptor))
        self.at[descriptor] = name
        if descriptor not in self.open_descriptors:
            self._lose(name)

    def _lose(self, name: bytes | None) -> None:
        """Its connection ended."""
        if name is not None:
            del self.at[self.peers.pop(name).descriptor]
            self.ending.append(name)

    def _drop(self, name: bytes) -> None:
        """End its connection, if it has one."""
        peer = self.peers.pop(name, None)
        if peer is not None:
            del self.at[peer.descriptor]
            cut(peer)


class FarLink(Post):
    """A connection to a far listener, under a name of one's own: with keys, the one its key was enrolled as."""

    def __init__(self, address: str, name: bytes, keys: KeyPair | None, server_key: str, hwm: int = QUEUE) -> None:
        super().__init__(keys, hwm)
        self.address = address
        self.name = name
        self.server_key = server_key
        self.refused = ""
        """Why the last attempt to get in came to nothing, if it did."""
        self.gone = False
        """The connection broke after it stood: what was under way may be lost. `reopen`, and say it again."""
        self.stands = False
        self.outbox: deque[Sequence[Buffer]] = deque()
        self.inbox: deque[tuple[bytes, list[memoryview]]] = deque()
        self.ending = False
        """It broke; what came over it may still be to be read."""
        self.news = False
        self.back_off_s = BACK_OFF_S[0]
        self.again_at = math.inf
        """When to try again."""
        self.reopen()

    def reopen(self) -> None:
        """Connect anew. What has not left yet never will."""
        self.outbox.clear()
        self.outbox.append((b"",))  # hello: the listener cannot send to whom it has not heard
        self.inbox.clear()
        self.back_off_s = BACK_OFF_S[0]
        self.gone = False
        self.refused = ""
        self._connect()

    def send(self, message: bytes, frames: Sequence[Buffer] = ()) -> None:
        """What is in `frames` must not change before it has arrived. What is sent while it is `gone` is lost."""
        if not self.gone:
            self.outbox.append(wrapped(message, frames))
            self._look_after()

    def receive(self) -> tuple[bytes, list[memoryview]] | None:
        """The next message, or None if there is none right now."""
        return self.inbox.popleft() if self.ready() and self.inbox else None

    def wait_for(self, timeout_s: float) -> tuple[bytes, list[memoryview]] | None:
        """The next message, or None if there is none within the time, or it is gone."""
        until = time.monotonic() + timeout_s
        while (message := self.receive()) is None and not self.gone:
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            self.epoll.poll(min(left_s, self.rest_s()))
        return message

    def ready(self) -> bool:
        """Take in what has come; whether there is a message, or it is gone and was not before."""
        if self.epoll.closed:
            return False
        self._look_after()
        if not self.inbox and self.socket is not None:
            taken = take(self.socket, sys.maxsize)
            if taken is not None and (message := unwrapped(taken[0])) is not None:
                self.inbox.append(message)
            elif self.ending:
                self.ending = False
                self.gone = self.news = True
                self.stands = False
                self.shut(0)
        news, self.news = self.news, False
        return news or bool(self.inbox)

    def rest_s(self) -> float:
        """How long this can be left alone if nothing comes."""
        return max(0.0, self.again_at - time.monotonic())

    def _connect(self) -> None:
        self.shut(0)
        dealer = self.open(zmq.DEALER, zmq.EVENT_ALL)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, HANDSHAKE_MS)
        if self.keys is None:
            dealer.setsockopt(zmq.ROUTING_ID, self.name)
        else:
            dealer.setsockopt(zmq.CURVE_SERVERKEY, self.server_key.encode())
        self.stands = self.ending = False
        self.again_at = time.monotonic() + 3 * HANDSHAKE_MS / 1000
        dealer.connect(self.address)

    def _look_after(self) -> None:
        """The connection, whether it stands or not, and what is to leave."""
        for event, value in self.events():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.stands = True
                self.refused = ""
                self.again_at = math.inf
            elif self.stands and event == zmq.EVENT_DISCONNECTED:
                self.ending = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._put_off(f"{self.address} does not know this key ({value})")
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._put_off(f"{self.address} wants keys and we have none, or the other way round")
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._put_off(f"{self.address} ended the handshake: its key may be another one")
            elif event in (zmq.EVENT_CLOSED, zmq.EVENT_DISCONNECTED) and not self.stands:
                self._put_off(f"nobody listens at {self.address}")
        if not self.stands and time.monotonic() >= self.again_at:
            self._connect()
        while self.stands and self.outbox and self.socket is not None:
            try:
                self.socket.send_multipart(self.outbox[0], zmq.NOBLOCK, copy=False, track=False)
            except zmq.Again:
                break
            self.outbox.popleft()

    def _put_off(self, reason: str) -> None:
        """Try again later. The first reason of an attempt counts: the others follow from it."""
        if self.again_at > time.monotonic() + BACK_OFF_S[1]:
            self.refused = reason
            self.again_at = time.monotonic() + self.back_off_s
            self.back_off_s = min(2 * self.back_off_s, BACK_OFF_S[1])

    def close(self) -> None:
        if self.gone or not self.stands:
            self.shut(0)
        super().close()


def bind(router: zmq.Socket[bytes], host: str, ports: tuple[int, int]) -> int:
    """The first free port of the range."""
    try:
        interface = system.gethostbyname(host)
    except OSError as error:
        raise PacelineError(f"cannot listen on {host!r}: {error.strerror}") from None
    first, last = ports
    for port in range(first, last + 1):
        try:
            router.bind(f"tcp://{interface}:{port or '*'}")
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE:
                raise PacelineError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        else:
            return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
    raise PacelineError(f"cannot listen on {host}: every port from {first} to {last} is taken")


def has_some(socket: zmq.Socket[bytes]) -> bool:
    """Whether there is something to receive."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def wrapped(message: bytes, frames: Sequence[Buffer]) -> Sequence[Buffer]:
    """The frames of a message. A header that is larger than a frame travels in pieces: nothing, how many, they."""
    if 0 < len(message) <= FRAME:
        return (message, *frames)
    pieces = [message[at : at + FRAME] for at in range(0, len(message), FRAME)]
    return (b"", len(pieces).to_bytes(4, "little"), *pieces, *frames)


def unwrapped(parts: list[zmq.Frame]) -> tuple[bytes, list[memoryview]] | None:
    """The message in these frames; None if it is none."""
    if len(parts[0]):
        return parts[0].bytes, [part.buffer for part in parts[1:]]
    if len(parts) < 2:
        return None
    end = 2 + int.from_bytes(parts[1].bytes, "little")
    return b"".join(part.bytes for part in parts[2:end]), [part.buffer for part in parts[end:]]


def take(socket: zmq.Socket[bytes], largest: int) -> tuple[list[zmq.Frame], bool] | None:
    """The frames of the next message, if there is one, and whether these are all: of one that is too large few are."""
    try:
        part = socket.recv(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    parts, size, most, whole = [part], 0, largest // FRAME + SPARE, True
    while part.more:
        part = socket.recv(copy=False)
        size += len(part)
        if whole and size <= largest and len(parts) <= most:
            parts.append(part)
        elif whole:
            whole = False
            del parts[2:]
    return parts, whole


def other_end(descriptor: int) -> object:
    """The address at the other end of a connection, None if there is none."""
    with contextlib.suppress(OSError), system.socket(fileno=os.dup(descriptor)) as connection:
        return connection.getpeername()
    return None


def cut(peer: Peer) -> None:
    """End a connection, for which ZeroMQ has no way: its thread reads that nothing more will come, and closes it.

    The descriptor may be another connection's by now; what is done is done to a duplicate that was looked at.
    """
    with contextlib.suppress(OSError), system.socket(fileno=os.dup(peer.descriptor)) as connection:
        if peer.address is not None and connection.getpeername() == peer.address:
            connection.shutdown(system.SHUT_RDWR)
