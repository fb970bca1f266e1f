"""Frames of a gradient that arrive while its worker still computes the others, kept until the push names them.

The worker's side is `worker/early_frames.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.messages import Push
from paceline.runtime.live.protocol import wire
from paceline.tensors import wire_precision
from paceline.tensors.wire_codecs import WrongFrames


class EarlyFrameBuffer:
    """The frames one worker has staged at a server: of its newest attempt, each once at most."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        """The bytes of each."""
        self.clear()

    def clear(self) -> None:
        self.attempt = (-1, -1)
        """The iteration, and the number of the attempt at it."""
        self.frames: dict[int, memoryview] = {}

    def take(self, staged: wire.Staged, frames: Sequence[memoryview]) -> None:
        """Keep the frame, unless it is of an attempt that is over. It fits, or is refused."""
        if not 0 <= staged.frame < len(self.lengths):
            raise WrongFrames(f"there is no frame {staged.frame}: there are {len(self.lengths)}")
        wire_precision.check_lengths(frames, [self.lengths[staged.frame]])
        attempt = (staged.iteration, staged.attempt)
        if attempt > self.attempt:
            self.attempt, self.frames = attempt, {}
        if attempt == self.attempt:
            self.frames[staged.frame] = frames[0]

    def join(self, push: Push, commit: wire.Commit, rest: Sequence[memoryview]) -> list[memoryview]:
        """All frames of this push."""
        named = set(commit.staged)
        if self.attempt != (push.handle.iteration, commit.attempt) or not named <= self.frames.keys():
            raise WrongFrames("it counts on frames that have not come")
        if len(named) + len(rest) != len(self.lengths):
            raise WrongFrames(f"{len(named)} and {len(rest)} frames came, {len(self.lengths)} were to come")
        others = iter(rest)
        return [self.frames[number] if number in named else next(others) for number in range(len(self.lengths))]
