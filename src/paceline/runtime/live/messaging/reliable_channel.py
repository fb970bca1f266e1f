"""A channel that survives its connection: messages are numbered, and kept until the other side acknowledges them.

A TCP connection that breaks may lose what was on its way. So each message carries the number of the last one that its
sender has received. Unacknowledged messages are retransmitted in order after a reconnect or a timeout, and the receiver
drops duplicates by their numbers. A session id keeps messages of an earlier channel between the same two processes out.
Which traffic needs such a channel, and which does not, is explained in `messaging/__init__.py`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from paceline.runtime.live.protocol.agent_messages import Numbered, encode

KEEPALIVE_S = 0.5
RETRANSMIT_S = 2.0
"""Everything unacknowledged is retransmitted when the other side has acknowledged nothing new for so long, unless it is
still on its way: on a thin line it would come twice, and what is behind it later."""

Frames = Sequence[bytes | memoryview]


class ReliableChannel:
    """One side of a channel. `transmit` hands an encoded message to the present connection, or drops it."""

    def __init__(
        self, session: str, transmit: Callable[[bytes, Frames], object], is_idle: Callable[[], bool] = lambda: True
    ) -> None:
        """While `is_idle` is false nothing is retransmitted: there is no connection, or what was sent is on its way."""
        self.session = session
        self.transmit = transmit
        self.is_idle = is_idle
        self.number = 0
        """The number of the last message that was sent."""
        self.received = 0
        """The number of the other side's last message that was received; all before it were received too."""
        self.unacknowledged: deque[tuple[int, bytes, Frames]] = deque()
        self.progress_s = time.monotonic()
        """When the other side last acknowledged something new."""
        self.received_s = time.monotonic()
        """When anything was last received."""
        self.sent_s = 0.0

    def send(self, body: bytes, frames: Frames = ()) -> None:
        """Sends a message that must arrive. The frames must not change until it is acknowledged."""
        self.number += 1
        if not self.unacknowledged:
            self.progress_s = time.monotonic()
        self.unacknowledged.append((self.number, body, frames))
        self._transmit(self.number, body, frames)

    def send_unreliable(self, body: bytes) -> None:
        """Sends a message that may be lost. It has no number, and acknowledges what was received."""
        self._transmit(0, body, ())

    def _transmit(self, number: int, body: bytes, frames: Frames) -> None:
        self.sent_s = time.monotonic()
        self.transmit(encode(Numbered(self.session, number, self.received, body)), frames)

    def accept(self, message: Numbered) -> bool:
        """Takes note of a message; false if it is a duplicate, or one before it is missing."""
        self.received_s = time.monotonic()
        while self.unacknowledged and self.unacknowledged[0][0] <= message.acknowledged:
            self.unacknowledged.popleft()
            self.progress_s = self.received_s
        if message.number == 0:
            return True
        if message.number != self.received + 1:
            return False
        self.received += 1
        return True

    def retransmit(self) -> None:
        """Sends everything unacknowledged again, in order."""
        self.progress_s = time.monotonic()
        for number, body, frames in self.unacknowledged:
            self._transmit(number, body, frames)

    def tick(self, keepalive: bytes) -> None:
        """Retransmits when that is due, and otherwise sends `keepalive` if nothing was sent lately."""
        now = time.monotonic()
        if self.unacknowledged and now - self.progress_s > RETRANSMIT_S and self.is_idle():
            self.retransmit()
        elif now - self.sent_s >= KEEPALIVE_S:
            self.send_unreliable(keepalive)

    @property
    def silent_s(self) -> float:
        """For how long nothing was received."""
        return time.monotonic() - self.received_s
