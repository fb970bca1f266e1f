"""A conversation over a connection that loses, repeats and reorders: everything arrives, once, in order."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.runtime.live.messaging import reliable_channel
from paceline.runtime.live.messaging.reliable_channel import ReliableChannel
from paceline.runtime.live.protocol.agent_messages import decode_numbered


class Line:
    """Two sides, and what is on its way from each to the other."""

    def __init__(self, seed: int, chances: tuple[float, float, float]) -> None:
        self.dice = random.Random(seed)
        self.lose, self.repeat, self.swap = chances
        self.flight: dict[str, list[bytes]] = {"a": [], "b": []}
        self.sides = {
            name: ReliableChannel("session", lambda message, frames, to=name: self.put(to, message)) for name in "ab"
        }
        self.heard: dict[str, list[bytes]] = {"a": [], "b": []}

    def put(self, sender: str, message: bytes) -> None:
        flight = self.flight[sender]
        for _ in range((self.dice.random() >= self.lose) + (self.dice.random() < self.repeat)):
            flight.append(message)
        if len(flight) > 1 and self.dice.random() < self.swap:
            flight[-1], flight[-2] = flight[-2], flight[-1]

    def deliver(self) -> None:
        for sender, receiver in (("a", "b"), ("b", "a")):
            flight, self.flight[sender] = self.flight[sender], []
            for message in flight:
                numbered = decode_numbered(message)
                if self.sides[receiver].accept(numbered) and numbered.number:
                    self.heard[receiver].append(numbered.body)


@given(
    st.integers(0, 2**32),
    st.lists(st.tuples(st.sampled_from("ab"), st.binary(max_size=4)), max_size=40),
    st.tuples(st.floats(0, 0.6), st.floats(0, 0.5), st.floats(0, 0.5)),
)
@settings(max_examples=60, deadline=None)
def test_everything_arrives_once_and_in_order(
    seed: int, said: list[tuple[str, bytes]], chances: tuple[float, float, float]
) -> None:
    line = Line(seed, chances)
    for sender, body in said:
        line.sides[sender].send(body)
        if line.dice.random() < 0.3:
            line.deliver()
    for _ in range(2000):
        line.deliver()
        if not any(side.unacknowledged for side in line.sides.values()):
            break
        for side in line.sides.values():
            side.progress_s = side.sent_s = -reliable_channel.RETRANSMIT_S  # time passes
            side.tick(b"")
    for sender, receiver in (("a", "b"), ("b", "a")):
        assert line.heard[receiver] == [body for name, body in said if name == sender]
        assert not line.sides[sender].unacknowledged


def test_what_is_heard_is_forgotten_and_silence_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(0, (0.0, 0.0, 0.0))
    line.sides["a"].send(b"x")
    assert line.sides["a"].unacknowledged
    line.deliver()
    line.sides["b"].send_unreliable(b"")
    line.deliver()
    assert not line.sides["a"].unacknowledged
    later = time.monotonic() + 7.0
    monkeypatch.setattr(reliable_channel.time, "monotonic", lambda: later)
    assert 6.0 < line.sides["a"].silent_s < 8.0
