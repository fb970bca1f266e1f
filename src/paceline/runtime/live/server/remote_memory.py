"""A server's memory for a worker on another host, in place of the segment that it would have on this one.

The same rule of ownership holds: from push to answer it is the server's, then it is on its way, and the next push comes
only after it has arrived. So nothing is copied for sending.

    floats as they are   a gradient stays in the frames it came in (only if frames end within the optimizer's pieces,
                         these being whole large tensors, gradients are joined in a vector), and parameters leave from
                         where they are stepped: an answer that is sent a second time holds what they are by then
    in a code            gradients are decoded into a vector, and answers are differences from what the worker has
                         (`server/coded_answers.py`)
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.core.messages import Parameters
from paceline.runtime.live.messaging.remote_links import FRAME
from paceline.runtime.live.protocol.coded_messages import CodedParameters
from paceline.runtime.live.server.coded_answers import CodedAnswers
from paceline.runtime.live.server.early_frames import EarlyFrameBuffer
from paceline.runtime.live.server.shard_state import ShardState
from paceline.runtime.live.server.worker_buffer import (
    Reply,
    SharedParameters,
    SpareBuffer,
    WorkerBuffer,
    ranges_of,
)
from paceline.runtime.live.system.malloc_tuning import keep_freed
from paceline.tensors import wire_precision
from paceline.tensors.assignment import Ranges
from paceline.tensors.layout import Layout, Piece


class FrameBuffer(WorkerBuffer):
    """A gradient in the frames in which it came."""

    def __init__(
        self, within: list[tuple[int, int, int]], dtype: torch.dtype, parameters: SharedParameters, reply: Reply
    ) -> None:
        super().__init__(parameters, reply)
        self.within = within
        """For each piece, the frame it comes in, from which byte of it on, and how many elements it has."""
        self.dtype = dtype
        self.release()

    def take(self, frames: Sequence[memoryview]) -> None:
        """Has the gradient be what is in these frames."""
        self.gradient = [
            torch.frombuffer(frames[frame], dtype=self.dtype, offset=offset, count=count)
            for frame, offset, count in self.within
        ]
        self.gradient_bytes = list(frames)

    def keep(self) -> Sequence[Tensor]:
        return self.gradient

    def release(self) -> None:
        self.gradient, self.gradient_bytes = [], []


class RemoteMemory:
    """Where the frames of one worker's gradients go, and those of its parameters come from."""

    def __init__(self, state: ShardState, wire: str, reply: Reply) -> None:
        layout, part, optimizer = state.layout, state.part, state.optimizer
        codec = wire_precision.codec_of(wire)
        keep_freed(4 * layout.numel * layout.itemsize)
        ranges = wire_precision.frame_ranges(layout, part, FRAME, codec)
        arriving = anonymous(layout)
        self.places = ranges_of(arriving, ranges)
        """What each frame of a gradient has to fill."""
        self.lengths = [
            layout.itemsize * len(place) if codec is None else codec.nbytes(len(place)) for place in self.places
        ]
        """How many bytes each has."""
        self.early = EarlyFrameBuffer(self.lengths)
        """What has come of a gradient that is still being computed."""
        self.buffer: WorkerBuffer = SpareBuffer(arriving, part, optimizer, SharedParameters(), reply)
        self.take: Callable[[Sequence[memoryview]], None]
        """Has the buffer's gradient be what came in these frames, which fit."""
        self.answer: Callable[[Parameters, int], tuple[Parameters | CodedParameters, Sequence[memoryview]]]
        """Returns the answer to a worker that holds the parameters of this number, and the frames behind it."""
        stepped = list(optimizer.values.split([stop - start for start, stop in ranges]))
        self.passing = codec is None
        """Whether the parameters leave from where they are stepped."""
        if codec is not None:
            self.take = partial(wire_precision.decode, codec, places=self.places)
            self.answer = CodedAnswers(codec, stepped).answer
            return
        self.take = partial(wire_precision.fill, self.places, dtype=layout.torch_dtype)
        leaving = wire_precision.memory_of(stepped)
        self.answer = lambda parameters, _: (parameters, leaving)
        within = find(optimizer.pieces, ranges, layout.itemsize)
        if within is not None:
            self.buffer = in_frames = FrameBuffer(within, layout.torch_dtype, SharedParameters(), reply)
            self.take = in_frames.take


def find(pieces: Sequence[Piece], ranges: Ranges, itemsize: int) -> list[tuple[int, int, int]] | None:
    """Returns in which range each piece lies, from which byte of it on, and its length; None if one lies in several."""
    within, frame = [], 0
    for piece in pieces:
        while ranges[frame][1] <= piece.start:
            frame += 1
        start, stop = ranges[frame]
        if piece.start + piece.length > stop:
            return None
        within.append((frame, itemsize * (piece.start - start), piece.length))
    return within


def anonymous(layout: Layout) -> Tensor:
    """Returns a vector over all parameters of which only what is written to takes memory."""
    nbytes = max(layout.numel * layout.itemsize, 1)
    buffer = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(buffer, dtype=layout.torch_dtype, count=layout.numel)
