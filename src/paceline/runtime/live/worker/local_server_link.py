"""A worker's link to a server of its own host: messages through a Unix socket, tensors in shared memory."""

from __future__ import annotations

from typing import Protocol

from paceline.core.messages import Parameters
from paceline.runtime.live.messaging.unix_sockets import Link
from paceline.runtime.live.protocol import wire
from paceline.tensors.assignment import Ranges


class ServerLink(Protocol):
    """What a worker says to one server and hears from it, wherever the server is."""

    @property
    def gone(self) -> bool:
        """Whether nobody is at the other end."""

    def assign(self, part: Ranges) -> None:
        """The server has this part of the parameters from now on."""

    def send(self, request: wire.Exchange | wire.Fetch) -> None: ...

    def receive(self, timeout_s: float) -> Parameters | wire.Fetched | None:
        """Returns the next message, or None if there is none within the time."""

    def reconnect(self) -> bool:
        """Tries to reach the server again; whether what was said should be said again."""

    def close(self) -> None: ...


class LocalServerLink:
    """A server that reads the gradient, and writes the parameters, in shared memory."""

    def __init__(self, link: Link) -> None:
        self.link = link

    @property
    def gone(self) -> bool:
        return self.link.stream is None

    def assign(self, part: Ranges) -> None:
        """The server maps the worker's memory and cuts its part out by itself."""

    def send(self, request: wire.Exchange | wire.Fetch) -> None:
        self.link.send(wire.encode(request))

    def receive(self, timeout_s: float) -> Parameters | wire.Fetched | None:
        received = self.link.wait_for(timeout_s)
        return None if received is None else wire.decode_from_shard(received)

    def reconnect(self) -> bool:
        """Only the driver can tell when a server of this host is back."""
        return False

    def close(self) -> None:
        self.link.close()
