"""How floats travel between hosts: as they are, or as halves with error feedback.

A part of a flat vector travels as frames: buffers of bounded length, in the order of the vector (`frame_ranges`). As
floats are, frames are the vector's own memory, at either end. As "bfloat16" or "float16" they are half as long (a
quarter, if the model is in float64), and what rounding leaves out of a gradient is not lost: it is kept and added to
the next one (error feedback: Seide et al. 2014; Karimireddy et al. 2019). Parameters are rounded without it: each
time they come from the whole ones, which the servers keep.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.tensors.assignment import Ranges
from paceline.tensors.layout import Layout, Part
from paceline.tensors.shard_optimizer import PIECE

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
UNCHANGED = "float32"
WIRES = (UNCHANGED, *HALVES)
AT_ONCE = 1 << 17
"""So many elements are rounded together, so that they stay in a cache."""


class WrongFrames(ValueError):
    """Frames do not fit the part that they are said to be."""


def check_wire(wire: str) -> str:
    if wire not in WIRES:
        raise ConfigError(f"unknown wire {wire!r} (known: {', '.join(WIRES)})")
    return wire


def dtype_on_wire(wire: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the type that floats of `dtype` have on the wire."""
    return HALVES.get(check_wire(wire), dtype)


def frame_ranges(layout: Layout, part: Part, longest: int, itemsize: int) -> Ranges:
    """Returns which ranges of the vector are one frame each, `longest` bytes at most and `itemsize` for an element.

    They begin and end where the optimizer's pieces do, as far as these fit into a frame: a piece can then be stepped
    with as it came.
    """
    most = max(1, longest // itemsize)
    found: list[tuple[int, int]] = []
    for piece in layout.pieces(part, PIECE):
        start, stop = piece.start, piece.start + piece.length
        if found and found[-1][1] == start and stop - found[-1][0] <= most:
            found[-1] = (found[-1][0], stop)
        else:
            found += [(at, min(at + most, stop)) for at in range(start, stop, most)]
    return tuple(found)


def split_frames(vector: Tensor, ranges: Ranges, longest: int, itemsize: int) -> list[Tensor]:
    """Returns these ranges of a vector as views that are one frame each, or several where one would be too long."""
    count = max(1, longest // itemsize)
    return [piece for start, stop in ranges for piece in vector[start:stop].split(count)]


def memory_of(pieces: Sequence[Tensor]) -> list[memoryview]:
    """Returns the memory of these pieces, read when it is used."""
    return [piece.view(torch.uint8).numpy().data for piece in pieces]


def check_frames(frames: Sequence[memoryview], pieces: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Refuses frames that do not fill these pieces exactly."""
    if len(frames) != len(pieces):
        raise WrongFrames(f"{len(frames)} frames came, {len(pieces)} were to come")
    for number, (frame, piece) in enumerate(zip(frames, pieces, strict=True)):
        nbytes, wanted = frame.nbytes, piece.numel() * dtype.itemsize
        if nbytes != wanted:
            raise WrongFrames(f"frame {number} has {nbytes} bytes, {wanted} were to come")


def fill(pieces: Sequence[Tensor], frames: Sequence[memoryview], dtype: torch.dtype) -> None:
    """Writes frames of `dtype` into their places. If they do not all fit, nothing is written."""
    check_frames(frames, pieces, dtype)
    for piece, frame in zip(pieces, frames, strict=True):
        piece.copy_(torch.frombuffer(frame, dtype=dtype))


class ErrorFeedback:
    """Rounds gradients to 16 bits, and adds what was left out to the next ones.

    Both vectors are over all parameters, so that what was left out stays where it belongs when the servers change. What
    a push that is refused, skipped or dropped had left out stays for the next; what it had sent is gone with it, as
    without rounding.
    """

    def __init__(self, numel: int, dtype: torch.dtype, half: torch.dtype) -> None:
        self.rounded = torch.empty(numel, dtype=half)
        self.residual = torch.zeros(numel, dtype=dtype)
        self.largest = torch.finfo(half).max

    def round(self, gradient: Tensor, part: Ranges) -> None:
        """Sets `rounded` to this part of the gradient plus what was left out before, as far as 16 bits can hold it."""
        for start, stop in part:
            for first in range(start, stop, AT_ONCE):
                here = slice(first, min(first + AT_ONCE, stop))
                self._round(gradient[here], self.rounded[here], self.residual[here])

    def _round(self, gradient: Tensor, rounded: Tensor, residual: Tensor) -> None:
        residual.add_(gradient)
        rounded.copy_(residual)
        if not math.isfinite(rounded.sum().item()):
            # Beyond what a half can say: the largest goes, the rest stays. NaN does not stay; who computes one does
            # not push it.
            residual.nan_to_num_(0.0)
            rounded.copy_(residual.clamp(-self.largest, self.largest))
        residual.sub_(rounded)
