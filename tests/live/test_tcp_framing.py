"""Messages of TCP connections without keys are the same however their bytes are cut on the way."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.runtime.live.messaging.tcp_framing import (
    SCRATCH,
    ConnectionClosed,
    ConnectionLimits,
    MessageReader,
    OutgoingMessage,
    greeting,
)
from paceline.runtime.live.messaging.transport import FRAME

LIMITS = ConnectionLimits(True, 4 * FRAME)


def encoded(parts: list[bytes]) -> bytes:
    message, sent = OutgoingMessage(parts), b""
    while message.ready or not message.complete:
        sent += b"".join(message.ready)
        message.ready.clear()
        message.sum_up()
    return sent


def feed(reader: MessageReader, data: bytes, cuts: random.Random) -> None:
    """Has the reader take the data as if the socket returned a random number of bytes each time."""
    scratch = memoryview(bytearray(SCRATCH))
    while data:
        count = cuts.randint(1, 40) if cuts.random() < 0.5 else len(data)
        at = 0
        for view in reader.unread or [scratch]:
            size = min(len(view), count - at, len(data) - at)
            view[:size] = data[at : at + size]
            at += size
        data = data[at:]
        reader.take(at, scratch)


PARTS = st.lists(st.binary(max_size=100) | st.just(bytes(range(256)) * 200), min_size=1, max_size=5)


@given(st.lists(PARTS, max_size=5), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_messages_are_the_same_however_they_are_cut(messages: list[list[bytes]], seed: int) -> None:
    reader = MessageReader(LIMITS)
    feed(reader, greeting(b"3:1") + b"".join(map(encoded, messages)), random.Random(seed))
    assert (reader.name, reader.is_established) == (b"3:1", True)
    assert [[bytes(part) for part in parts or ()] for parts in reader.messages] == messages


@given(PARTS, st.integers(0, 2**32), st.data())
@settings(max_examples=200, deadline=None)
def test_no_flipped_bit_is_read(parts: list[bytes], seed: int, data: st.DataObject) -> None:
    sent = bytearray(encoded(parts))
    bit = data.draw(st.integers(0, 8 * len(sent) - 1))
    sent[bit // 8] ^= 1 << bit % 8
    reader = MessageReader(LIMITS)
    feed(reader, greeting(b"3:1"), random.Random(seed))
    with pytest.raises(ConnectionClosed):
        feed(reader, bytes(sent), random.Random(seed))
    assert reader.messages == []
