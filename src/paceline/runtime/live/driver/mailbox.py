"""What the driver hears: messages of its own host's processes, and of others through their agents."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from paceline.runtime.live.messaging.unix_sockets import Listener, Source, Waiter
from paceline.runtime.live.protocol import wire


class Mailbox:
    """Waits for messages, and has each taken by whoever is there for its kind."""

    def __init__(self, waiter: Waiter, listener: Listener, handlers: Mapping[type, Callable[[Any], object]]) -> None:
        self.waiter = waiter
        self.listener = listener
        self.handlers = dict(handlers)

    def wait(self, timeout_s: float) -> list[Source]:
        """Waits until something is there or the time is up; returns what is ready."""
        return self.waiter.wait(timeout_s)

    def hear_all(self) -> None:
        while (received := self.listener.receive()) is not None:
            self.hear(wire.decode_to_driver(received[1]))

    def hear(self, message: wire.ToDriver) -> None:
        self.handlers[type(message)](message)

    def hear_until(self, heard: Callable[[], bool], timeout_s: float) -> None:
        """Hears messages until this is true, or for so long."""
        until = time.monotonic() + timeout_s
        while not heard() and time.monotonic() < until:
            self.wait(timeout_s / 20)
            self.hear_all()
