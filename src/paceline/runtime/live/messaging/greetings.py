"""What both ends of a connection say before the first message: who the caller is, and how messages are protected.

    without keys   the caller sends `OPEN`, the length of its name, its name and a checksum; the listener sends `OPEN`
    with keys      the caller sends `KEYED` and its part of the handshake (`handshake.py`); the listener answers with
                   `KEYED` and its own part, which says whether it knows this key

Anything else ends the connection. Of a caller that is not known, no more bytes are looked at than these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from paceline.runtime.live.messaging import keys
from paceline.runtime.live.messaging.checksum import crc32
from paceline.runtime.live.messaging.handshake import KEY, TAG, CallerHandshake, HandshakeFailed, ListenerHandshake
from paceline.runtime.live.messaging.keys import KeyPair
from paceline.runtime.live.messaging.seals import CRC, Checksums, Encryption, Seals
from paceline.runtime.live.messaging.transport import UNKNOWN_KEY, ConnectionClosed

OPEN = b"paceline tcp 3\n"
KEYED = b"paceline key 3\n"
CALL = len(KEYED) + 2 * KEY + 2 * TAG
"""Bytes that a caller with keys says."""
ANSWER = len(KEYED) + KEY + 1 + TAG
ADMITTED, REFUSED = b"\1", b"\0"


class Greeted(Struct, frozen=True):
    """A greeting that was read."""

    size: int
    """Bytes that it had."""
    incoming: Seals
    outgoing: Seals
    name: bytes = b""
    """Of the caller, at the listener's end: with keys the text of its public key."""
    answer: bytes = b""
    """What is to be sent now."""
    is_proved: bool = True
    """False if the other end may be a recording of whom it says it is, until something can be opened."""
    refused: str = ""
    """Why the connection ends after the answer, if it does."""


class Greeting(Protocol):
    """The beginning of a connection, at one end."""

    first: bytes
    """What is sent first."""

    def read(self, data: bytes) -> Greeted | None:
        """Reads what the other end has said so far; None if it is not all. Raises `ConnectionClosed` if it is wrong."""


class OpenCall:
    """A caller without keys."""

    def __init__(self, name: bytes) -> None:
        self.first = open_call(name)

    def read(self, data: bytes) -> Greeted | None:
        expect(OPEN, data)
        return Greeted(len(OPEN), Checksums(), Checksums()) if len(data) >= len(OPEN) else None


class OpenAnswer:
    """A listener without keys."""

    first = OPEN

    def read(self, data: bytes) -> Greeted | None:
        expect(OPEN, data)
        size = len(OPEN)
        if len(data) <= size or len(data) <= size + data[size] + CRC.size:
            return None
        name = data[size + 1 : size + 1 + data[size]]
        greeting = open_call(name)
        if not name or not data.startswith(greeting):
            raise ConnectionClosed
        return Greeted(len(greeting), Checksums(), Checksums(), name)


class KeyedCall:
    """A caller that knows the listener's public key."""

    def __init__(self, pair: KeyPair, listener: str) -> None:
        """Raises `HandshakeFailed` if the listener's key is none."""
        self.handshake = CallerHandshake(pair, listener, KEYED)
        self.first = KEYED + self.handshake.call()

    def read(self, data: bytes) -> Greeted | None:
        expect(KEYED, data)
        if len(data) < ANSWER:
            return None
        try:
            verdict = self.handshake.read_answer(data[len(KEYED) : ANSWER])
        except HandshakeFailed:
            raise ConnectionClosed from None
        if verdict != ADMITTED:
            raise ConnectionClosed(UNKNOWN_KEY)
        agreed = self.handshake.transcript.keys()
        return Greeted(ANSWER, Encryption(agreed.from_listener), Encryption(agreed.from_caller))


class KeyedAnswer:
    """A listener that admits whose keys it knows."""

    first = b""

    def __init__(self, pair: KeyPair, is_known: Callable[[str], bool]) -> None:
        self.pair = pair
        self.is_known = is_known

    def read(self, data: bytes) -> Greeted | None:
        expect(KEYED, data)
        if len(data) < CALL:
            return None
        handshake = ListenerHandshake(self.pair, KEYED)
        try:
            handshake.read_call(data[len(KEYED) : CALL])
            key = keys.encode(handshake.caller)
            admitted = self.is_known(key)
            answer = KEYED + handshake.answer(ADMITTED if admitted else REFUSED)
        except HandshakeFailed:
            raise ConnectionClosed from None
        agreed = handshake.transcript.keys()
        incoming, outgoing = Encryption(agreed.from_caller), Encryption(agreed.from_listener)
        return Greeted(CALL, incoming, outgoing, key.encode(), answer, False, "" if admitted else UNKNOWN_KEY)


def open_call(name: bytes) -> bytes:
    """Returns what the caller of this name sends first, without keys."""
    said = OPEN + bytes([len(name)]) + name
    return said + CRC.pack(crc32(said))


def expect(begin: bytes, data: bytes) -> None:
    """Raises `ConnectionClosed` if the data does not begin so."""
    if data[: len(begin)] != begin[: len(data)]:
        raise ConnectionClosed
