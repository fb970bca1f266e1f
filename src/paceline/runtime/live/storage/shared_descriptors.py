"""File descriptors that other processes of this host get by a path.

Memory of a GPU is no file, so a path in the run's folder cannot name it. Instead the process that made it listens
there: whoever connects is sent the descriptor. A thread of its own answers, since a worker computes meanwhile; it
sleeps in the kernel until somebody asks. The folder belongs to the user alone, so whoever can connect may have it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from pathlib import Path

PATIENCE_S = 10.0
"""A process that lives answers at once; a path of one that has died may still lead to a fork of it."""
BACKLOG = 1024
LARGEST = 256
"""Bytes of what is said beside a descriptor."""


class DescriptorServer:
    """The descriptors that this process hands out."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.listeners: dict[Path, socket.socket] = {}
        self.thread: threading.Thread | None = None

    def offer(self, path: Path, descriptor: int, words: str) -> None:
        """Hands out a descriptor, which belongs to this object from now on, with some words to all who connect."""
        listener = self.listeners[path] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, (descriptor, words))
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, daemon=True, name="paceline descriptors")
            self.thread.start()

    def withdraw(self, path: Path) -> None:
        """Hands this one out no more; who has it keeps it."""
        listener = self.listeners.pop(path)
        descriptor, _ = self.selector.unregister(listener).data
        listener.close()
        os.close(descriptor)
        path.unlink(missing_ok=True)

    def _run(self) -> None:
        while True:
            for key, _ in self.selector.select():
                descriptor, words = key.data
                assert isinstance(key.fileobj, socket.socket)
                with contextlib.suppress(OSError):  # it is withdrawn, or whoever asked is gone
                    connection, _ = key.fileobj.accept()
                    with connection:
                        socket.send_fds(connection, [words.encode()], [descriptor])


def fetch(path: Path) -> tuple[int, str]:
    """Returns a descriptor that another process offers at `path`, and the words with it.

    Raises `FileNotFoundError` if nobody offers it any more.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE_S)
        words, descriptors = b"", list[int]()
        with contextlib.suppress(ConnectionError, TimeoutError):
            connection.connect(str(path))
            words, descriptors, _, _ = socket.recv_fds(connection, LARGEST, 1)
    if not descriptors:
        raise FileNotFoundError(f"nobody offers {path} any more")
    return descriptors[0], words.decode()
