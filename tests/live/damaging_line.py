"""A line that damages what passes, where TCP's checksum is right: each chunk with a chance, one bit of it."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading


class Damaging:
    """Passes connections from a port of `here` on to the same or another port of 127.0.0.1, in a thread."""

    def __init__(self, port: int, chance: float, seed: int = 0, here: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.target = ("127.0.0.1", port)
        self.chance = chance
        self.random = random.Random(seed)
        self.passed = self.damaged = 0
        """Chunks."""
        self.acceptor = socket.create_server(here)
        self.others: dict[socket.socket, socket.socket] = {}
        """The other end of each connection."""
        self.ending, self.end = socket.socketpair()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    @property
    def address(self) -> str:
        host, port = self.acceptor.getsockname()
        return f"tcp://{host}:{port}"

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([self.acceptor, self.ending, *self.others], [], [])
            if self.ending in ready:
                break
            for source in ready:
                if source is self.acceptor:
                    self.accept()
                elif source in self.others:
                    self.carry(source)
        for connection in [self.acceptor, self.ending, *self.others]:
            connection.close()

    def accept(self) -> None:
        near, _ = self.acceptor.accept()
        try:
            far = socket.create_connection(self.target)
        except OSError:
            near.close()
            return
        for connection in (near, far):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.others |= {near: far, far: near}

    def carry(self, source: socket.socket) -> None:
        target, chunk = self.others[source], bytearray()
        with contextlib.suppress(OSError):
            chunk += source.recv(1 << 14)
            self.passed += 1
            if chunk and self.random.random() < self.chance:
                self.damaged += 1
                chunk[self.random.randrange(len(chunk))] ^= 1 << self.random.randrange(8)
            target.sendall(chunk)
        if not chunk:
            for connection in (source, target):
                del self.others[connection]
                connection.close()

    def close(self) -> None:
        self.end.close()
        self.thread.join()
