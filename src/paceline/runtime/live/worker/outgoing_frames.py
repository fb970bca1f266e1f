"""The frames in which a worker's gradient leaves for a server on another host: where they lie, and how they get there.

Each is the memory that is sent, without a copy. Which of them it is depends on how floats travel and on where the
gradient is (`RemotePayload`), and is chosen once for each link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, count

import torch
from torch import Tensor

from paceline.core.messages import Handle
from paceline.runtime.live.system.malloc_tuning import keep_freed
from paceline.runtime.live.worker.gathered_gradient import GatheredGradient
from paceline.tensors import wire_precision
from paceline.tensors.assignment import Ranges
from paceline.tensors.layout import Layout

Frame = memoryview | tuple[memoryview, ...]


class SegmentFrames:
    """The frames of one server's part of a vector."""

    def __init__(self, vector: Tensor, part: Ranges, ranges: Ranges) -> None:
        self.frames = wire_precision.memory_of([vector[start:stop] for start, stop in ranges])

    def of(self, handle: Handle) -> Sequence[Frame]:
        """Returns the frames of this push."""
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


class RoundedFrames(SegmentFrames):
    """Frames of a gradient that is rounded when it is first sent."""

    def __init__(self, rounding: RoundedGradient, part: Ranges, ranges: Ranges) -> None:
        super().__init__(rounding.feedback.rounded, part, ranges)
        self.rounding = rounding
        self.part = part

    def of(self, handle: Handle) -> Sequence[Frame]:
        self.rounding.round(self.part, handle)
        return self.frames


class RoundedGradient:
    """A worker's gradients as halves, with error feedback."""

    def __init__(self, gradient: Tensor, dtype: torch.dtype) -> None:
        self.gradient = gradient
        self.feedback = wire_precision.ErrorFeedback(len(gradient), gradient.dtype, dtype)
        self.rounded: dict[Ranges, Handle] = {}
        """The push whose gradient is there, for each part: one that is sent again must not be rounded again."""

    def round(self, part: Ranges, handle: Handle) -> None:
        if self.rounded.get(part) != handle:
            self.feedback.round(self.gradient, part)
            self.rounded[part] = handle


class RemotePayload:
    """What travels between a worker and servers on other hosts: its gradient and their parameters."""

    def __init__(
        self,
        layout: Layout,
        parameters: Tensor,
        gradient: Tensor,
        gathered: GatheredGradient | None,
        dtype: torch.dtype,
    ) -> None:
        """Floats have this `dtype` on the wire. If the gradient can be `gathered` it need not be in its segment."""
        self.layout = layout
        self.parameters = parameters
        self.dtype = dtype
        self.is_exact = dtype == layout.torch_dtype
        """Whether floats travel as they are: else as halves."""
        self.leaves_early = self.is_exact and gradient is not parameters
        """Whether frames of the gradient can leave while backward runs."""
        self.gathers = self.is_exact and gathered is not None
        self.attempts = count()
        """Numbers for the attempts at gradients that leave early."""
        self.outgoing: Callable[[Ranges, Ranges], SegmentFrames]
        """Makes the frames for the server that has some part, given their ranges."""
        if not self.is_exact:
            self.outgoing = partial(RoundedFrames, RoundedGradient(gradient, dtype))
        elif gathered is not None:
            self.outgoing = partial(GatheredFrames, gathered, gradient)
        else:
            self.outgoing = partial(SegmentFrames, gradient)
        keep_freed(4 * layout.numel * layout.itemsize)
