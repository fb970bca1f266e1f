"""Who has called a far listener: whose key is whose, who is on which connection, and whose connection ended.

A connection is known by its route, which is how it is answered, and by its descriptor, which is how its beginning and
its end are told. A descriptor is used again for the next connection, so the order in which things are told matters.
"""

from __future__ import annotations

import contextlib
import os
import socket

from msgspec import Struct


class Caller(Struct, frozen=True):
    """A named process, by one connection of it."""

    route: bytes
    descriptor: int
    address: object
    """Of the other end of the connection: that the descriptor is still this connection's."""


class Callers:
    def __init__(self) -> None:
        self.names: dict[str, bytes] = {}
        """By key."""
        self.keys: dict[bytes, str] = {}
        """By name."""
        self.named: dict[bytes, Caller] = {}
        self.at: dict[int, bytes] = {}
        """Whose connection has this descriptor."""
        self.open: set[int] = set()
        """The descriptors of all connections, those of nobody yet among them."""
        self.ending: list[bytes] = []
        """Whose connection ended; what they said before may still be to be read."""

    def enrol(self, key: str, name: bytes) -> None:
        if self.keys.get(name) == key:
            return
        self.expel(name)
        if key in self.names:
            self.expel(self.names[key])
        self.names[key] = name
        self.keys[name] = key

    def expel(self, name: bytes) -> None:
        """Forget its key and end its connection."""
        self.names.pop(self.keys.pop(name, ""), None)
        self.hang_up(name)

    def begun(self, descriptor: int) -> None:
        self.open.add(descriptor)

    def over(self, descriptor: int) -> None:
        self.open.discard(descriptor)
        self._lose(descriptor)

    def _lose(self, descriptor: int) -> None:
        """Who was on it is not any more."""
        name = self.at.pop(descriptor, None)
        if name is not None:
            del self.named[name]
            self.ending.append(name)

    def is_on(self, name: bytes, route: bytes) -> bool:
        """Whether this is how it is answered."""
        caller = self.named.get(name)
        return caller is not None and caller.route == route

    def meet(self, name: bytes, route: bytes, descriptor: int) -> None:
        """It speaks for the first time on a connection, everything being told that happened to descriptors so far."""
        caller = Caller(route, descriptor, other_end(descriptor))
        if self.named.get(name) == caller:
            return
        if name in self.named:
            self.hang_up(name)
            self.ending.append(name)
        self._lose(descriptor)
        self.named[name] = caller
        self.at[descriptor] = name
        if descriptor not in self.open:
            self._lose(descriptor)

    def hang_up(self, name: bytes) -> bool:
        """End its connection; False if it has none.

        ZeroMQ has no way to do it: whoever reads the connection finds that nothing more will come, and closes it. The
        descriptor may be another one's by now; what is done is done to a duplicate that was looked at.
        """
        caller = self.named.pop(name, None)
        if caller is None:
            return False
        del self.at[caller.descriptor]
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(caller.descriptor)) as connection:
            if connection.getpeername() == caller.address:
                connection.shutdown(socket.SHUT_RDWR)
        return True


def other_end(descriptor: int) -> object:
    """The address at the other end of a connection; None if it is none."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        return connection.getpeername()
    return None
