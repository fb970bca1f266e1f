"""The messages of TCP connections, with keys and without, are the same however their bytes are cut on the way."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.runtime.live.messaging import seals, tcp_framing
from paceline.runtime.live.messaging.greetings import KeyedAnswer, KeyedCall, OpenAnswer, OpenCall
from paceline.runtime.live.messaging.keys import make_keys
from paceline.runtime.live.messaging.seals import Checksums, Encryption, Seals
from paceline.runtime.live.messaging.tcp_framing import SCRATCH, ConnectionLimits, MessageReader, OutgoingMessage
from paceline.runtime.live.messaging.transport import DAMAGED, FRAME, ConnectionClosed

LIMITS = ConnectionLimits(4 * FRAME)
LISTENER, CALLER = make_keys(), make_keys()


class Line:
    """Both ends of a connection whose bytes are carried by hand."""

    def __init__(self, secure: bool, cuts: random.Random | None = None) -> None:
        call = KeyedCall(CALLER, LISTENER.public) if secure else OpenCall(b"3:1")
        answer = KeyedAnswer(LISTENER, {CALLER.public}.__contains__) if secure else OpenAnswer()
        self.cuts = cuts or random.Random(0)
        self.caller, self.listener = MessageReader(LIMITS, call), MessageReader(LIMITS, answer)
        feed(self.listener, call.first, self.cuts)
        feed(self.caller, answer.first + self.listener.answer, self.cuts)


def encoded(parts: Sequence[bytes], outgoing: Seals) -> bytes:
    return b"".join(steps(OutgoingMessage(parts, outgoing)))


def steps(message: OutgoingMessage) -> Iterator[bytes]:
    while message.ready or message.section is not None:
        message.refill()
        yield b"".join(message.ready)
        message.ready.clear()


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
both = pytest.mark.parametrize("secure", [True, False], ids=["keys", "plain"])


@both
@given(st.lists(PARTS, max_size=5), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_messages_are_the_same_however_they_are_cut(secure: bool, messages: list[list[bytes]], seed: int) -> None:
    line = Line(secure, random.Random(seed))
    assert line.listener.name == (CALLER.public.encode() if secure else b"3:1")
    assert line.caller.is_established
    for one, other in ((line.caller, line.listener), (line.listener, line.caller)):
        feed(other, b"".join(encoded(parts, one.outgoing) for parts in messages), line.cuts)
        assert [[bytes(part) for part in parts or ()] for parts in other.messages] == messages


@both
@given(PARTS, st.integers(0, 2**32), st.data())
@settings(max_examples=200, deadline=None)
def test_no_flipped_bit_is_read(secure: bool, parts: list[bytes], seed: int, data: st.DataObject) -> None:
    line = Line(secure, random.Random(seed))
    sent = bytearray(encoded(parts, line.caller.outgoing))
    bit = data.draw(st.integers(0, 8 * len(sent) - 1))
    sent[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ConnectionClosed, match=DAMAGED):
        feed(line.listener, bytes(sent), line.cuts)
    assert line.listener.messages == []


@both
def test_what_is_left_out_repeated_or_in_another_order_is_not_read(secure: bool) -> None:
    said = [[b"one", b"frame"], [b"two"], [b"one", b"frame"]]
    for order in ([1], [2], [0, 0], [0, 2], [0, 1, 1], [0, 1, 0], [2, 1, 0]):
        line = Line(secure)
        sent = [encoded(parts, line.caller.outgoing) for parts in said]
        with pytest.raises(ConnectionClosed, match=DAMAGED):
            feed(line.listener, b"".join(sent[number] for number in order), line.cuts)


@given(st.lists(PARTS, min_size=1, max_size=4), st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_whatever_is_done_to_the_bytes_only_what_was_said_is_read(messages: list[list[bytes]], seed: int) -> None:
    """Bits are flipped; pieces are cut out, cut off, doubled, exchanged, put in, or sent back to who said them."""
    chance = random.Random(seed)
    line = Line(True, chance)
    sent = bytearray(b"".join(encoded(parts, line.caller.outgoing) for parts in messages))
    for _ in range(chance.randrange(3)):
        begin = chance.randrange(len(sent) + 1)
        end = min(len(sent), begin + chance.choice((1, 7, 24, 1000)))
        to = chance.randrange(len(sent) + 1)
        change = chance.randrange(5)
        if change == 0 and begin < end:
            sent[begin] ^= 1 << chance.randrange(8)
        elif change == 1:
            del sent[begin:end]
        elif change == 2:
            sent[to:to] = sent[begin:end]
        elif change == 3:
            sent[begin:end] = chance.randbytes(end - begin)
        else:
            del sent[begin:]
    reader = line.caller if chance.random() < 0.1 else line.listener
    with contextlib.suppress(ConnectionClosed):
        feed(reader, bytes(sent), chance)
    heard = [[bytes(part) for part in parts or ()] for parts in reader.messages]
    assert heard == messages[: len(heard)]
    assert reader is line.listener or not heard


def test_what_was_said_cannot_be_sent_back_or_over_another_connection() -> None:
    line, other = Line(True), Line(True)
    sent = encoded([b"a push", b"frame"], line.caller.outgoing)
    for reader in (line.caller, other.listener, other.caller):
        with pytest.raises(ConnectionClosed, match=DAMAGED):
            feed(reader, sent, line.cuts)


@pytest.mark.parametrize("cut", [1, 24, 40, 70])
def test_nothing_of_a_message_that_is_cut_off_is_read(cut: int) -> None:
    line = Line(True)
    sent = encoded([b"a push", bytes(100)], line.caller.outgoing)
    feed(line.listener, sent + encoded([b"a push", bytes(100)], line.caller.outgoing)[:-cut], line.cuts)
    assert len(line.listener.messages) == 1


@both
def test_messages_may_be_made_before_others_have_left(secure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those that wait behind a long one are: each is sealed when its turn comes, or when its memory may change."""
    monkeypatch.setattr(seals.EncryptedSection, "step", 1000)
    monkeypatch.setattr(seals.SummedSection, "step", 1000)
    line, noise = Line(secure), random.Random(0)
    said = [[b"%d" % number, *(noise.randbytes(noise.randrange(3000)) for _ in range(4))] for number in range(5)]
    memory = [[bytearray(part) for part in parts] for parts in said]
    waiting = [OutgoingMessage(parts, line.caller.outgoing) for parts in memory]
    for number in (3, 1):
        waiting[number].keep()
        for part in memory[number]:
            part[:] = bytes(len(part))
    for message in waiting:
        for step in steps(message):
            feed(line.listener, step, line.cuts)
    assert [[bytes(part) for part in parts or ()] for parts in line.listener.messages] == said


@both
def test_what_is_too_large_is_skipped_and_what_comes_behind_it_read(secure: bool) -> None:
    line = Line(secure)
    sent = [
        encoded(parts, line.caller.outgoing) for parts in ([b"small"], [b"large", *5 * [bytes(FRAME)]], [b"x", b"y"])
    ]
    feed(line.listener, b"".join(sent), line.cuts)
    assert [parts if parts is None else list(map(bytes, parts)) for parts in line.listener.messages] == [
        [b"small"],
        None,
        [b"x", b"y"],
    ]


def test_frames_have_a_place_only_behind_a_message_that_was_authenticated() -> None:
    """Else whoever can change what travels could choose where it goes."""
    asked: list[bytes] = []
    line = Line(True)
    line.listener.limits = ConnectionLimits(FRAME, lambda message, lengths: asked.append(message))
    sent = bytearray(encoded([b"parameters", bytes(100)], line.caller.outgoing))
    sent[tcp_framing.HEAD.size + seals.TAG + 4] ^= 1
    with pytest.raises(ConnectionClosed, match=DAMAGED):
        feed(line.listener, bytes(sent), line.cuts)
    assert asked == []


def test_nothing_that_travels_with_keys_can_be_read_or_is_twice_the_same() -> None:
    line, text = Line(True), b"the same again and again" * 10
    sent = [encoded([text, text], line.caller.outgoing) for _ in range(3)]
    assert all(text[:8] not in each for each in sent)
    pieces = [each[at : at + 16] for each in sent for at in range(0, len(each) - 15, 16)]
    assert len(set(pieces)) == len(pieces)


def test_both_ends_change_to_the_same_new_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seals, "REKEY", 1000)
    line, used = Line(True), set()
    for number in range(50):
        feed(line.listener, encoded([b"%d" % number, bytes(10 * number)], line.caller.outgoing), line.cuts)
        assert isinstance(line.caller.outgoing, Encryption)
        used.add(line.caller.outgoing.key)
    assert [bytes((parts or ())[0]) for parts in line.listener.messages] == [b"%d" % number for number in range(50)]
    assert 12 < len(used) < 50


def test_a_checksum_begins_with_the_number_of_its_section() -> None:
    sums = Checksums()
    assert len({sums.seal(b"the same") for _ in range(5)}) == 5
