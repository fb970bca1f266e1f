"""The connections of a listener: which key belongs to which process, and which process has which connection.

A connection is known by its route, by which it is answered, and by its descriptor, by which its beginning and its end
are reported. A descriptor is used again for the next connection, so the order of these reports matters.
"""

from __future__ import annotations

import contextlib
import os
import socket

from msgspec import Struct


class NamedConnection(Struct, frozen=True):
    """The connection of a named process."""

    route: bytes
    descriptor: int
    address: object
    """The address of its other end. If the descriptor has another one, it is not this connection's any more."""


class ConnectionRegistry:
    def __init__(self) -> None:
        self.names: dict[str, bytes] = {}
        """The name of each process, by its key."""
        self.keys: dict[bytes, str] = {}
        """The key of each process, by its name."""
        self.named: dict[bytes, NamedConnection] = {}
        self.at: dict[int, bytes] = {}
        """The name of the process on each descriptor."""
        self.open: set[int] = set()
        """The descriptors of all connections, also of those whose process is not known yet."""
        self.ending: list[bytes] = []
        """Processes whose connection ended, while messages of theirs may still be unread."""

    def enrol(self, key: str, name: bytes) -> None:
        if self.keys.get(name) == key:
            return
        self.expel(name)
        if key in self.names:
            self.expel(self.names[key])
        self.names[key] = name
        self.keys[name] = key

    def expel(self, name: bytes) -> None:
        """Forgets the key of a process and ends its connection."""
        self.names.pop(self.keys.pop(name, ""), None)
        self.disconnect(name)

    def accepted(self, descriptor: int) -> None:
        self.open.add(descriptor)

    def closed(self, descriptor: int) -> None:
        self.open.discard(descriptor)
        self._remove(descriptor)

    def _remove(self, descriptor: int) -> None:
        """The process on this descriptor has no connection any more."""
        name = self.at.pop(descriptor, None)
        if name is not None:
            del self.named[name]
            self.ending.append(name)

    def is_on(self, name: bytes, route: bytes) -> bool:
        """Whether this route is the process's."""
        connection = self.named.get(name)
        return connection is not None and connection.route == route

    def identify(self, name: bytes, route: bytes, descriptor: int) -> None:
        """A process has sent its first message over a connection. All events until now must have been reported."""
        connection = NamedConnection(route, descriptor, peer_address(descriptor))
        if self.named.get(name) == connection:
            return
        if name in self.named:
            self.disconnect(name)
            self.ending.append(name)
        self._remove(descriptor)
        self.named[name] = connection
        self.at[descriptor] = name
        if descriptor not in self.open:
            self._remove(descriptor)

    def disconnect(self, name: bytes) -> bool:
        """Ends the connection of a process; false if it has none.

        After the shutdown the transport finds that nothing more will come, and closes. The descriptor may be another
        connection's by now, so a duplicate of it is checked and shut down.
        """
        connection = self.named.pop(name, None)
        if connection is None:
            return False
        del self.at[connection.descriptor]
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.descriptor)) as duplicate:
            if duplicate.getpeername() == connection.address:
                duplicate.shutdown(socket.SHUT_RDWR)
        return True


def peer_address(descriptor: int) -> object:
    """The address at the other end of a connection; None if the descriptor is none."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        return connection.getpeername()
    return None
