"""The bytes of a TCP connection without keys: greetings, message heads, checksums. No socket is known here.

A client sends `GREETING`, the length of its name, its name, and a CRC of these; a listener sends `GREETING`. Then come
messages: how many parts, a CRC of that, the length of each, a CRC, the parts, and a CRC of all of it. Anything else
ends the connection, also what was damaged on the way: TCP's own checksum lets one damaged packet in some ten thousand
pass. No length is believed before its CRC is right, or a flipped bit would have the reader wait for ever.

Large parts are read straight to their place, which the reader may choose (`FramePlacement`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from paceline.runtime.live.messaging.checksum import crc32
from paceline.runtime.live.messaging.transport import DAMAGED, FRAME, SLACK, SPARE

if TYPE_CHECKING:
    from paceline.runtime.live.messaging.transport import Part

GREETING = b"paceline tcp 2\n"
SCRATCH = 1 << 14
"""Bytes read when it is not known yet what comes. They are copied once more."""
STEP = 1 << 22
"""Bytes that are summed up before they leave: the kernel takes few large pieces sooner than many small ones."""
COUNT = struct.Struct("<2I")
"""The number of parts, and the CRC of that."""
CRC = struct.Struct("<I")

FramePlacement = Callable[[bytes, Sequence[int]], Sequence[memoryview] | None]
"""Returns where the frames behind this message, of these lengths, are to be read to; None if that does not matter."""


class ConnectionClosed(Exception):
    """The connection has ended, or nothing that comes over it is to be believed any more. It may say why."""


class ConnectionLimits(Struct, frozen=True):
    """What a connection accepts."""

    listens: bool
    """This is the listener's end."""
    largest: int
    """Bytes of a message."""
    place_frames: FramePlacement | None = None

    @property
    def most(self) -> int:
        """Parts of a message."""
        return self.largest // FRAME + SPARE


class OutgoingMessage:
    """A message that is being sent, and summed up step by step.

    Its memory must not change before it is sent; `keep` copies what is not.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        pieces = [
            [memoryview(each).cast("B") for each in (part if isinstance(part, tuple) else (part,))] for part in parts
        ]
        head, self.crc = head_of([sum(map(len, views)) for views in pieces])
        self.ready = [memoryview(head)]
        """What is summed up and not sent."""
        self.rest = [view for views in reversed(pieces) for view in reversed(views) if view.nbytes]
        """What comes after it, the last first."""
        self.complete = False
        """Whether the CRC of the whole message is among what is ready, or sent."""
        self.sum_up()

    def sum_up(self) -> None:
        """Makes the next step ready."""
        room = STEP
        while self.rest and room:
            view = self.rest.pop()
            if view.nbytes > room:
                self.rest.append(view[room:])
                view = view[:room]
            self.crc = crc32(view, self.crc)
            self.ready.append(view)
            room -= view.nbytes
        if not self.rest and not self.complete:
            self.ready.append(memoryview(CRC.pack(self.crc)))
            self.complete = True

    def keep(self) -> None:
        """Copies what is not sent yet: the message's memory may change from now on."""
        self.ready = [memoryview(bytes(view)) for view in self.ready]
        self.rest = [memoryview(bytes(view)) for view in self.rest]


class MessageReader:
    """Makes messages of the bytes that arrive over one connection."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.name = b""
        """The client's name, at a listener, once it has greeted."""
        self.is_established = False
        """Whether the other end has greeted."""
        self.incomplete = b""
        """The beginning of a greeting or of a head that has not arrived whole."""
        self.parts: list[memoryview] = []
        """The parts of the message that is arriving, in their places."""
        self.unread: list[memoryview] = []
        """What of these, and of the CRC behind them, is not read yet."""
        self.unsummed = 0
        """Bytes of `unread` that are no CRC."""
        self.crc = 0
        self.crc_read = memoryview(bytearray(CRC.size))
        self.skipped = 0
        """Bytes that are still to arrive of a message that is too large."""
        self.messages: list[list[memoryview] | None] = []
        """The parts of each message that has arrived; None for one that is too large."""

    def take(self, count: int, scratch: memoryview) -> None:
        """So many bytes were read: into `unread` if there is any, else into `scratch`."""
        if self.unread:
            self._advance(count)
        else:
            self._parse(self.incomplete + bytes(scratch[:count]))

    def _advance(self, count: int) -> None:
        summed = min(count, self.unsummed)
        self.unsummed -= summed
        for view in first(self.unread, summed):
            self.crc = crc32(view, self.crc)
        advance(self.unread, count)
        if not self.unread:
            if CRC.unpack(self.crc_read)[0] != self.crc:
                raise ConnectionClosed(DAMAGED)
            self.messages.append(self.parts)
            self.parts = []

    def _parse(self, data: bytes) -> None:
        """Reads what did not go straight to its place."""
        at = 0
        while at < len(data):
            if self.skipped:
                used = min(self.skipped, len(data) - at)
                self.skipped -= used
            elif self.unread:
                used = min(self.unread[0].nbytes, len(data) - at)
                self.unread[0][:used] = data[at : at + used]
                self._advance(used)
            else:
                used = self._begin(data, at) if self.is_established else self._greet(data)
                if not used:
                    break
            at += used
        self.incomplete = data[at:]

    def _greet(self, data: bytes) -> int:
        """Reads the greeting; its length, or 0 if it is not all there."""
        size = len(GREETING)
        if data[:size] != GREETING[: len(data)]:
            raise ConnectionClosed
        if self.limits.listens:
            if len(data) <= size or len(data) <= size + data[size] + CRC.size:
                return 0
            name = data[size + 1 : size + 1 + data[size]]
            if not name or not data.startswith(greeting(name)):
                raise ConnectionClosed
            self.name = name
            size = len(greeting(name))
        elif len(data) < size:
            return 0
        self.is_established = True
        return size

    def _begin(self, data: bytes, at: int) -> int:
        """Reads the head of a message; its length, or 0 if it is not all there.

        Where frames have a place, the first part is read with the head, unless it is too long to be an answer.
        """
        if len(data) < at + COUNT.size:
            return 0
        count: int
        count, crc = COUNT.unpack_from(data, at)
        limits = self.limits
        if crc32(data[at : at + 4]) != crc:
            raise ConnectionClosed(DAMAGED)
        if not 0 < count <= 2 * limits.most:
            raise ConnectionClosed
        head = COUNT.size + 4 * count + CRC.size
        if len(data) < at + head:
            return 0
        lengths: tuple[int, ...] = struct.unpack_from(f"<{count}I", data, at + COUNT.size)
        expected, self.crc = head_of(lengths)
        if data[at : at + head] != expected:
            raise ConnectionClosed(DAMAGED)
        if max(lengths) > FRAME + SLACK:
            raise ConnectionClosed
        if sum(lengths) > limits.largest or count > limits.most:
            self.skipped = sum(lengths) + CRC.size
            self.messages.append(None)
            return head
        places = None
        if limits.place_frames is not None and lengths[0] <= SCRATCH:
            message = data[at + head : at + head + lengths[0]]
            if len(message) < lengths[0]:
                return 0
            places = limits.place_frames(message, lengths[1:])
        self.parts = [np.empty(lengths[0], np.uint8).data]
        self.parts += places if places is not None else (np.empty(size, np.uint8).data for size in lengths[1:])
        self.unsummed = sum(lengths)
        self.unread = [*(part for part in self.parts if part.nbytes), self.crc_read]
        return head


def greeting(name: bytes) -> bytes:
    """What the client of this name sends first."""
    sent = GREETING + bytes([len(name)]) + name
    return sent + CRC.pack(crc32(sent))


def head_of(lengths: Sequence[int]) -> tuple[bytes, int]:
    """What comes before parts of these lengths, and the CRC so far."""
    count = struct.pack("<I", len(lengths))
    begin = COUNT.pack(len(lengths), crc32(count)) + struct.pack(f"<{len(lengths)}I", *lengths)
    crc = crc32(begin)
    return begin + CRC.pack(crc), crc


def first(views: Sequence[memoryview], size: int) -> list[memoryview]:
    """The first `size` bytes of these views."""
    found = []
    for view in views:
        if not size:
            break
        found.append(view[:size])
        size -= found[-1].nbytes
    return found


def advance(views: list[memoryview], count: int) -> None:
    """Removes the first `count` bytes from these views."""
    done = 0
    while done < len(views) and count >= views[done].nbytes:
        count -= views[done].nbytes
        done += 1
    del views[:done]
    if count:
        views[0] = views[0][count:]
