"""A conversation that survives its connection: messages are numbered, and kept until the other side has heard them.

A TCP connection that breaks and comes back may have lost what was on its way. So each side says with every message how
far it has heard the other; what is not heard although time has passed is said again, from there on, and what comes
twice is dropped by its number. `stay` names the conversation: what belongs to an earlier one is not for this one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from paceline.runtime.live.across.dispatch import Numbered, encode

PING_S = 0.5
AGAIN_S = 2.0
"""How long the other side may not have heard anything new before all is said again."""

Frames = Sequence[bytes | memoryview]


class Steady:
    """One side. `send` puts a message on the connection there is, or nowhere."""

    def __init__(
        self, stay: str, send: Callable[[bytes, Frames], object], stands: Callable[[], bool] = lambda: True
    ) -> None:
        """`stands` tells whether there is a connection now: without one nothing is said again."""
        self.stay = stay
        self.send = send
        self.stands = stands
        self.number = 0
        self.heard = 0
        """The number of the other side's last message that was heard, all before it too."""
        self.unheard: deque[tuple[int, bytes, Frames]] = deque()
        self.moved_s = time.monotonic()
        """When the other side last heard something new."""
        self.heard_s = time.monotonic()
        """When anything was last heard of the other side."""
        self.said_s = 0.0

    def say(self, body: bytes, frames: Frames = ()) -> None:
        """Say something that must arrive. The frames must stay as they are until it has."""
        self.number += 1
        if not self.unheard:
            self.moved_s = time.monotonic()
        self.unheard.append((self.number, body, frames))
        self._send(self.number, body, frames)

    def mention(self, body: bytes) -> None:
        """Say something that may be lost."""
        self._send(0, body, ())

    def _send(self, number: int, body: bytes, frames: Frames) -> None:
        self.said_s = time.monotonic()
        self.send(encode(Numbered(self.stay, number, self.heard, body)), frames)

    def take(self, message: Numbered) -> bool:
        """Whether what has come is new, and next."""
        self.heard_s = time.monotonic()
        while self.unheard and self.unheard[0][0] <= message.heard:
            self.unheard.popleft()
            self.moved_s = self.heard_s
        if message.number == 0:
            return True
        if message.number != self.heard + 1:
            return False
        self.heard += 1
        return True

    def say_again(self) -> None:
        """Say all that is not heard once more."""
        self.moved_s = time.monotonic()
        for number, body, frames in self.unheard:
            self._send(number, body, frames)

    def tick(self, ping: bytes) -> None:
        """Say what is not heard again when that is due, and something at least twice a second."""
        now = time.monotonic()
        if self.unheard and now - self.moved_s > AGAIN_S and self.stands():
            self.say_again()
        elif now - self.said_s >= PING_S:
            self.mention(ping)

    @property
    def silent_s(self) -> float:
        """For how long nothing was heard."""
        return time.monotonic() - self.heard_s
