"""The frames in which a worker's gradient leaves for a server on another host: where they lie, and how they get there.

Each is the memory that is sent, without a copy. Which of them it is depends on how floats travel and on where the
gradient is (`RemotePayload`), and is chosen once for each link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, count
from typing import Protocol

from torch import Tensor

from paceline.core.messages import Handle
from paceline.runtime.live.messaging.remote_links import FRAME
from paceline.runtime.live.system.malloc_tuning import keep_freed
from paceline.runtime.live.worker.gathered_gradient import GatheredGradient
from paceline.tensors import wire_precision
from paceline.tensors.assignment import Ranges
from paceline.tensors.layout import Layout
from paceline.tensors.wire_codecs import WireCodec

Frame = memoryview | tuple[memoryview, ...]


class OutgoingFrames(Protocol):
    """The frames of one server's part of the gradient."""

    frames: Sequence[Frame]

    def of(self, handle: Handle) -> Sequence[Frame]:
        """Returns the frames of this push."""


class SegmentFrames:
    """The frames of one server's part of a vector."""

    frames: Sequence[Frame]

    def __init__(self, vector: Tensor, part: Ranges, ranges: Ranges) -> None:
        self.frames = wire_precision.memory_of([vector[start:stop] for start, stop in ranges])

    def of(self, handle: Handle) -> Sequence[Frame]:
        return self.frames


class GatheredFrames(SegmentFrames):
    """Frames that are made of pieces of the gradient's own tensors while these are held."""

    def __init__(self, gathered: GatheredGradient, vector: Tensor, part: Ranges, ranges: Ranges) -> None:
        super().__init__(vector, part, ranges)
        self.gathered = gathered
        layout, itemsize = gathered.layout, vector.dtype.itemsize
        begins = list(accumulate((entry.numel for entry in layout.entries), initial=0))
        self.pieces = [
            [
                (piece.entry, itemsize * (piece.start - begins[piece.entry]), itemsize * piece.length)
                for piece in layout.pieces((each,), layout.numel)
            ]
            for each in ranges
        ]
        """For each frame, its parts of tensors: which tensor, from which byte of it on, and how many bytes."""

    def of(self, handle: Handle) -> Sequence[Frame]:
        if not self.gathered.tensors:
            return self.frames
        memory = wire_precision.memory_of([each.detach().view(-1) for each in self.gathered.tensors])
        return [tuple(memory[tensor][at : at + size] for tensor, at, size in frame) for frame in self.pieces]


class CodedGradient:
    """A worker's gradients in a code, with error feedback."""

    def __init__(self, gradient: Tensor, codec: WireCodec) -> None:
        self.gradient = gradient
        self.feedback = wire_precision.ErrorFeedback(len(gradient), gradient.dtype, codec)
        self.coded: dict[Ranges, tuple[Handle, Sequence[Frame]]] = {}
        """For each part, the push that was coded last: one that is sent again must not be coded again."""

    def frames(self, handle: Handle, part: Ranges, ranges: Ranges) -> Sequence[Frame]:
        """Returns the frames of this push to the server that has this part."""
        last = self.coded.get(part)
        if last is not None and last[0] == handle:
            return last[1]
        if last is None:
            self.coded = {each: frames for each, frames in self.coded.items() if not overlap(each, part)}
        frames = wire_precision.memory_of(self.feedback.encode(self.gradient, ranges))
        self.coded[part] = handle, frames
        return frames


class CodedFrames:
    """Frames of a gradient in a code, made when it is first sent, to whichever incarnation of the server."""

    frames: Sequence[Frame] = ()

    def __init__(self, coded: CodedGradient, part: Ranges, ranges: Ranges) -> None:
        self.coded = coded
        self.part = part
        self.ranges = ranges

    def of(self, handle: Handle) -> Sequence[Frame]:
        return self.coded.frames(handle, self.part, self.ranges)


def overlap(one: Ranges, other: Ranges) -> bool:
    return any(start < end and begin < stop for start, stop in one for begin, end in other)


class RemotePayload:
    """What travels between a worker and servers on other hosts: its gradient and their parameters."""

    def __init__(
        self,
        layout: Layout,
        parameters: Tensor,
        gradient: Tensor,
        gathered: GatheredGradient | None,
        codec: WireCodec | None,
    ) -> None:
        """Without a codec floats travel as they are. A gradient that can be `gathered` need not be in its segment."""
        self.layout = layout
        self.parameters = parameters
        self.codec = codec
        self.is_exact = codec is None
        self.leaves_early = self.is_exact and gradient is not parameters
        """Whether frames of the gradient can leave while backward runs."""
        self.gathers = self.is_exact and gathered is not None
        self.attempts = count()
        """Numbers for the attempts at gradients that leave early."""
        self.outgoing: Callable[[Ranges, Ranges], OutgoingFrames]
        """Makes the frames for the server that has some part, given their ranges."""
        if codec is not None:
            self.outgoing = partial(CodedFrames, CodedGradient(gradient, codec))
        elif gathered is not None:
            self.outgoing = partial(GatheredFrames, gathered, gradient)
        else:
            self.outgoing = partial(SegmentFrames, gradient)
        keep_freed(4 * layout.numel * layout.itemsize)

    def nbytes(self, part: Ranges) -> int:
        """Returns how many bytes a gradient has on its way to the server that has this part."""
        if self.codec is None:
            return sum(stop - start for start, stop in part) * self.layout.itemsize
        return sum(self.codec.nbytes(stop - start) for start, stop in self.frame_ranges(part))

    def frame_ranges(self, part: Ranges) -> Ranges:
        """Returns which ranges of the vector are one frame each."""
        return wire_precision.frame_ranges(self.layout, part, FRAME, self.codec)
