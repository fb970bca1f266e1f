"""The messages of a TCP connection, as bytes. No socket is known here.

After the greetings (`greetings.py`) come messages, each of three sections (`seals.py`): how many parts it has and the
length of the first; the lengths of the others and the first; the others, if there are any. What has a wrong seal ends
the connection: TCP's own checksum lets one damaged packet in some ten thousand pass. No length is believed before its
seal was checked, or a flipped bit would have the reader wait for ever.

The other parts are read straight to their place, which the reader may choose (`FramePlacement`), and decrypted there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from paceline.runtime.live.messaging.greetings import Greeting
from paceline.runtime.live.messaging.seals import IncomingSection, Seals
from paceline.runtime.live.messaging.transport import FRAME, SPARE, ConnectionClosed

if TYPE_CHECKING:
    from paceline.runtime.live.messaging.transport import Part

SCRATCH = 1 << 14
"""Bytes read when it is not known yet what comes. They are copied once more."""
HEAD = struct.Struct("<2I")
"""The number of parts, and the length of the first."""

FramePlacement = Callable[[bytes, Sequence[int]], Sequence[memoryview] | None]
"""Returns where the frames behind this message, of these lengths, are to be read to; None if that does not matter."""


class ConnectionLimits(Struct, frozen=True):
    """What a connection accepts."""

    largest: int
    """Bytes of a message."""
    place_frames: FramePlacement | None = None

    @property
    def most(self) -> int:
        """Parts of a message."""
        return self.largest // FRAME + SPARE


class OutgoingMessage:
    """A message that is being sent, and sealed step by step.

    Its memory must not change before it is sent; `keep` copies what is not.
    """

    def __init__(self, parts: Sequence[Part], seals: Seals) -> None:
        pieces = [
            [memoryview(each).cast("B") for each in (part if isinstance(part, tuple) else (part,))] for part in parts
        ]
        lengths = [sum(map(len, views)) for views in pieces]
        head = seals.seal(HEAD.pack(len(lengths), lengths[0]))
        introduction = struct.pack(f"<{len(lengths) - 1}I", *lengths[1:]) + b"".join(pieces[0])
        self.ready = [memoryview(head + seals.seal(introduction))]
        """What is sealed and not sent."""
        self.rest = [view for views in reversed(pieces[1:]) for view in reversed(views) if view.nbytes]
        """What comes after it, the last first."""
        self.section = seals.begin_outgoing(sum(lengths[1:])) if len(lengths) > 1 else None
        """The last section; None if its seal is among what is ready, or sent."""
        self.is_first = True
        """Whether nothing of it was sealed yet."""

    def refill(self) -> None:
        """Makes the next step ready if the one before has left, or there was none: the message has its turn."""
        if self.section is None or (self.ready and not self.is_first):
            return
        self.is_first = False
        step, room = [], self.section.step
        while self.rest and room:
            view = self.rest.pop()
            if view.nbytes > room:
                self.rest.append(view[room:])
                view = view[:room]
            step.append(view)
            room -= view.nbytes
        self.ready += self.section.seal(step)
        if not self.rest:
            self.ready.append(memoryview(self.section.end()))
            self.section = None

    def keep(self) -> None:
        """Copies what is not sent yet: the message's memory may change from now on."""
        self.ready = [memoryview(bytes(view)) for view in self.ready]
        self.rest = [memoryview(bytes(view)) for view in self.rest]


class MessageReader:
    """Makes messages of the bytes that arrive over one connection."""

    def __init__(self, limits: ConnectionLimits, greeting: Greeting) -> None:
        self.limits = limits
        self.greeting: Greeting | None = greeting
        """None once the other end has greeted."""
        self.name = b""
        """The caller's name, at a listener, once it has greeted."""
        self.is_established = False
        """Whether it is certain who is at the other end."""
        self.answer = b""
        """What is to be sent because of what was read."""
        self.incoming: Seals
        self.outgoing: Seals
        self.incomplete = b""
        """The beginning of a greeting or of a head that has not arrived whole."""
        self.count = 0
        """The parts of the message that is arriving."""
        self.introduction: bytearray | None = None
        """Its second section, while this is arriving."""
        self.parts: list[memoryview] = []
        """Its parts, in their places, while the third section is arriving."""
        self.section: IncomingSection
        """The third section."""
        self.unread: list[memoryview] = []
        """The memory of the second or the third section that is not read yet, with that of the seal."""
        self.unopened = 0
        """Bytes of `unread` that are to be opened as they come."""
        self.seal: memoryview
        """The place of the third section's seal."""
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
        opened = min(count, self.unopened)
        self.unopened -= opened
        for view in first(self.unread, opened):
            self.section.open(view)
        advance(self.unread, count)
        if self.unread:
            return
        if self.introduction is not None:
            self._introduce(bytes(self.introduction))
        else:
            self.section.check(bytes(self.seal))
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
                used = self._begin(data, at) if self.greeting is None else self._greet(self.greeting, data)
                if not used:
                    break
            at += used
        self.incomplete = data[at:]

    def _greet(self, greeting: Greeting, data: bytes) -> int:
        """Reads the greeting; its length, or 0 if it is not all there."""
        greeted = greeting.read(data)
        if greeted is None:
            return 0
        self.greeting, self.answer = None, greeted.answer
        if greeted.refused:
            raise ConnectionClosed(greeted.refused)
        self.name, self.is_established = greeted.name, greeted.is_proved
        self.incoming, self.outgoing = greeted.incoming, greeted.outgoing
        self.seal = memoryview(bytearray(self.incoming.size))
        return greeted.size

    def _begin(self, data: bytes, at: int) -> int:
        """Reads the first section of a message; its length, or 0 if it is not all there."""
        end = at + HEAD.size + self.incoming.size
        if len(data) < end:
            return 0
        first_length: int
        self.count, first_length = HEAD.unpack(self.incoming.open(data[at:end]))
        self.is_established = True
        if not 0 < self.count <= 2 * self.limits.most or first_length > FRAME:
            raise ConnectionClosed
        self.introduction = bytearray(4 * (self.count - 1) + first_length + self.incoming.size)
        self.unread = [memoryview(self.introduction)]
        return end - at

    def _introduce(self, sealed: bytes) -> None:
        """Reads the second section of a message."""
        self.introduction = None
        section, limits, others = self.incoming.open(sealed), self.limits, self.count - 1
        lengths, message = struct.unpack_from(f"<{others}I", section), section[4 * others :]
        if max(lengths, default=0) > FRAME:
            raise ConnectionClosed
        size = sum(lengths)
        if others:
            self.section = self.incoming.begin_incoming(size)
        if size + len(message) > limits.largest or self.count > limits.most:
            self.skipped = size + self.incoming.size if others else 0
            self.messages.append(None)
            return
        places = limits.place_frames(message, lengths) if limits.place_frames is not None else None
        self.parts = [memoryview(message)]
        self.parts += places if places is not None else (np.empty(length, np.uint8).data for length in lengths)
        if others:
            self.unopened = size
            self.unread = [*(part for part in self.parts[1:] if part.nbytes), self.seal]
        else:
            self.messages.append(self.parts)
            self.parts = []


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
