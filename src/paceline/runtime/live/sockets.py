"""ZeroMQ, and the only file that knows it: listeners, links, and waiting for them and for processes."""

from __future__ import annotations

from pathlib import Path

import zmq

LINGER_MS = 1000
LARGEST = 1 << 26
"""Bytes of one control message. Layouts of large models are the largest; tensors never go through here."""


class Context:
    """This process's ZeroMQ context. A forked process makes its own."""

    def __init__(self) -> None:
        self.zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def close(self) -> None:
        self.zmq.destroy(linger=LINGER_MS)


class Listener:
    """Accepts any number of named peers on one address."""

    def __init__(self, context: Context, path: Path) -> None:
        self.socket = context.zmq.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self.socket.setsockopt(zmq.MAXMSGSIZE, LARGEST)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.SNDTIMEO, LINGER_MS)
        self.socket.bind(f"ipc://{path}")

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next (peer, message), or None if there is none right now."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return (frames[0], frames[1]) if len(frames) == 2 else None

    def send(self, peer: bytes, message: bytes) -> bool:
        """False if the peer is not there (any more)."""
        try:
            self.socket.send_multipart([peer, message])
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True


class Link:
    """A connection to a listener, under a name of one's own."""

    def __init__(self, context: Context, path: Path, name: bytes) -> None:
        self.socket = context.zmq.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self.socket.setsockopt(zmq.MAXMSGSIZE, LARGEST)
        self.socket.setsockopt(zmq.IDENTITY, name)
        self.socket.connect(f"ipc://{path}")
        self.patience_s = -1.0

    def receive(self) -> bytes | None:
        """The next message, or None if there is none right now."""
        try:
            return self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def wait_for(self, timeout_s: float) -> bytes | None:
        """The next message, or None if there is none within the time."""
        if timeout_s != self.patience_s:
            self.patience_s = timeout_s
            self.socket.setsockopt(zmq.RCVTIMEO, int(timeout_s * 1000))
        try:
            return self.socket.recv()
        except zmq.Again:
            return None

    def send(self, message: bytes) -> None:
        self.socket.send(message)


class Waiter:
    """Waits until any of several listeners, links or file descriptors has something."""

    def __init__(self) -> None:
        self.poller = zmq.Poller()
        self.sources: dict[object, Listener | Link | int] = {}

    def watch(self, source: Listener | Link | int) -> None:
        polled = source if isinstance(source, int) else source.socket
        self.sources[polled] = source
        self.poller.register(polled, zmq.POLLIN)

    def forget(self, source: int) -> None:
        del self.sources[source]
        self.poller.unregister(source)

    def wait(self, timeout_s: float) -> list[Listener | Link | int]:
        """Block until something is there or the time is up; what is ready."""
        return [self.sources[polled] for polled, _ in self.poller.poll(int(timeout_s * 1000))]
