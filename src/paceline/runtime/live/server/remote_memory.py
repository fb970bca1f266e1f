"""A server's memory for a worker on another host, in place of the segment that it would have on this one.

The same rule of ownership holds: from push to answer it is the server's, then it is on its way, and the next push comes
only after it has arrived. So nothing is copied for sending.

    floats as they are   a gradient stays in the frames it came in, and what leaves is a vector of parameters (only if
                         frames end within the optimizer's pieces, these being whole large tensors, gradients are joined
                         in that vector); where the kernel takes what is sent at once (`messaging/tcp_transport.py`) no
                         such vector is needed, and parameters leave from where they are stepped: an answer that is sent
                         a second time then holds what they are by then
    halves               parameters are rounded by writing them into a vector of halves, and gradients are widened into
                         another
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.runtime.live.messaging.remote_links import FRAME
from paceline.runtime.live.server.early_frames import EarlyFrameBuffer
from paceline.runtime.live.server.shard_state import ShardState
from paceline.runtime.live.server.worker_buffer import (
    ParameterCopy,
    Reply,
    SegmentBuffer,
    SeparateBuffer,
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

    def __init__(self, state: ShardState, wire: str, at_once: bool, reply: Reply) -> None:
        """`at_once`: the kernel takes what is sent at once."""
        layout, part, optimizer = state.layout, state.part, state.optimizer
        keep_freed(4 * layout.numel * layout.itemsize)
        self.dtype = wire_precision.dtype_on_wire(wire, layout.torch_dtype)
        """The type of floats on the wire."""
        ranges = wire_precision.frame_ranges(layout, part, FRAME, self.dtype.itemsize)
        is_exact = self.dtype == layout.torch_dtype
        leaving = anonymous(layout, self.dtype)
        arriving = leaving if is_exact else anonymous(layout, layout.torch_dtype)
        outgoing = ranges_of(leaving, ranges)
        parameters: SharedParameters = ParameterCopy(leaving, part, optimizer)
        self.passing = is_exact and at_once
        """Whether the parameters leave from where they are stepped."""
        if self.passing:
            outgoing = list(optimizer.values.split([stop - start for start, stop in ranges]))
            parameters = SharedParameters()
        self.frames = wire_precision.memory_of(outgoing)
        """The parameters, as they leave."""
        self.places = ranges_of(arriving, ranges)
        """What each frame of a gradient has to fill."""
        self.early = EarlyFrameBuffer(self.places, self.dtype)
        """What has come of a gradient that is still being computed."""
        self.take: Callable[[Sequence[memoryview]], None] = partial(wire_precision.fill, self.places, dtype=self.dtype)
        """Has the buffer's gradient be what came in these frames, which fit."""
        within = find(optimizer.pieces, ranges, self.dtype.itemsize) if is_exact else None
        self.buffer: WorkerBuffer
        if within is not None:
            self.buffer = in_frames = FrameBuffer(within, self.dtype, parameters, reply)
            self.take = in_frames.take
        elif not is_exact:
            self.buffer = SeparateBuffer(arriving, part, optimizer, parameters, reply)
        elif self.passing:
            self.buffer = SpareBuffer(arriving, part, optimizer, parameters, reply)
        else:
            self.buffer = SegmentBuffer(arriving, part, optimizer, reply)


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


def anonymous(layout: Layout, dtype: torch.dtype) -> Tensor:
    """Returns a vector over all parameters of which only what is written to takes memory."""
    nbytes = max(layout.numel * dtype.itemsize, 1)
    buffer = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(buffer, dtype=dtype, count=layout.numel)
