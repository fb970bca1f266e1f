"""Frames of a gradient that leave for another host while backward still computes the others (`overlap=True`).

At the server they are only staged: a push exists when its exchange has come and names them (`wire.Commit`), with the
frames that had not left behind it. So what a backward that failed, was skipped or was done again has sent counts
nowhere. Each such backward is an attempt with a number of its own. The next one writes the same memory, from which a
frame of the last may still be on its way: it arrives torn, bears the last one's number, and is not kept.

Only floats on the CPU that travel as they are leave early. What is rounded is added to what was left out before, once:
that cannot be taken back.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

from paceline.runtime.live.protocol import wire
from paceline.tensors.assignment import Ranges
from paceline.tensors.layout import Layout

Frame = TypeVar("Frame")


class EarlyFrameSender:
    """Which frames of one shard's part of the gradient have left ahead of their push."""

    def __init__(self, layout: Layout, ranges: Ranges, numbers: Iterator[int]) -> None:
        self.numbers = numbers
        """Of attempts, each larger than all before."""
        self.frames_of: list[list[int]] = [[] for _ in layout.entries]
        """By tensor: the frames that hold some of it."""
        self.tensors_in = [0] * len(ranges)
        begins = list(accumulate((entry.numel for entry in layout.entries), initial=0))
        for number, (start, stop) in enumerate(ranges):
            for index in range(bisect_right(begins, start) - 1, bisect_left(begins, stop)):
                if layout.entries[index].numel:
                    self.frames_of[index].append(number)
                    self.tensors_in[number] += 1
        self.begin()

    def begin(self) -> None:
        """Another attempt."""
        self.attempt = next(self.numbers)
        self.missing = list(self.tensors_in)
        """By frame: how many tensors are not staged yet."""
        self.sent: set[int] = set()
        self.ended = False

    def end(self, changed: Iterable[int]) -> None:
        """The attempt is to be pushed, and nothing more is staged in it. Frames with these tensors go once more."""
        self.ended = True
        for index in changed:
            self.sent.difference_update(self.frames_of[index])

    def stage(self, index: int) -> list[int]:
        """A tensor is staged: the frames that are whole by now, to be sent."""
        if self.ended:
            self.begin()
        for number in self.frames_of[index]:
            self.missing[number] -= 1
        whole = [number for number in self.frames_of[index] if not self.missing[number]]
        self.sent.update(whole)
        return whole

    def complete(self, exchange: wire.Exchange, frames: Sequence[Frame]) -> tuple[wire.Commit, list[Frame]] | None:
        """What is left to send with this push; None if it is everything. Should it be sent again, everything is."""
        attempt, sent = self.attempt, self.sent
        self.begin()
        if not sent or not frames:
            return None
        rest = [frame for number, frame in enumerate(frames) if number not in sent]
        return wire.Commit(exchange, attempt, tuple(sorted(sent))), rest
