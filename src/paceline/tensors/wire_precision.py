"""How floats travel between hosts: as they are, or in a code with fewer bits, with error feedback.

A part of a flat vector travels as frames: buffers of bounded length, in the order of the vector (`frame_ranges`). As
floats are, frames are the vector's own memory, at either end. In a code (`wire_codecs`) they are shorter, and what the
code leaves out of a gradient is not lost: it is kept and added to the next one (error feedback: Seide et al. 2014;
Karimireddy et al. 2019). Of parameters the difference is sent from what the receiver has, so that what the code left
out of the last answer is in the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core import spec
from paceline.errors import ConfigError
from paceline.tensors.assignment import Ranges
from paceline.tensors.layout import Layout, Part
from paceline.tensors.shard_optimizer import PIECE
from paceline.tensors.wire_codecs import CODECS, HalfCodec, WireCodec, WrongFrames

UNCHANGED = "float32"
"""Floats as they are, of whatever length."""
AT_ONCE = 1 << 17
"""So many elements are coded together, so that they stay in a cache."""


def codec_of(wire: str) -> WireCodec | None:
    """Returns the code with this text form; None if floats travel as they are."""
    if wire == UNCHANGED:
        return None
    if wire.partition(":")[0] not in CODECS:
        raise ConfigError(f"unknown wire {wire!r} (known: {', '.join((UNCHANGED, *CODECS))})")
    return spec.parse(wire, CODECS, "wire")


def check_wire(wire: str) -> str:
    codec_of(wire)
    return wire


def bytes_per_float(wire: str) -> float:
    """Returns how long a float32 is on the wire, in the mean."""
    codec = codec_of(wire)
    return 4.0 if codec is None else codec.nbytes(AT_ONCE) / AT_ONCE


def dtype_of_peers(wire: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the type that parameters of `dtype` have between peers, which send them whole."""
    codec = codec_of(wire)
    assert codec is None or isinstance(codec, HalfCodec), "refused before the run began"
    return dtype if codec is None else codec.half


def frame_ranges(layout: Layout, part: Part, longest: int, codec: WireCodec | None = None) -> Ranges:
    """Returns which ranges of the vector are one frame each, of `longest` bytes at most if floats are as they are.

    They begin and end where the optimizer's pieces do, as far as these fit into a frame: a piece can then be stepped
    with as it came.
    """
    most = max(1, longest // layout.itemsize) if codec is None else AT_ONCE
    found: list[tuple[int, int]] = []
    for piece in layout.pieces(part, PIECE):
        start, stop = piece.start, piece.start + piece.length
        if found and found[-1][1] == start and stop - found[-1][0] <= most:
            found[-1] = (found[-1][0], stop)
        else:
            found += [(at, min(at + most, stop)) for at in range(start, stop, most)]
    return tuple(found)


def memory_of(pieces: Sequence[Tensor]) -> list[memoryview]:
    """Returns the memory of these pieces, read when it is used."""
    return [piece.view(torch.uint8).numpy().data for piece in pieces]


def check_frames(frames: Sequence[memoryview], pieces: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Refuses frames of `dtype` that do not fill these pieces exactly."""
    check_lengths(frames, [piece.numel() * dtype.itemsize for piece in pieces])


def fill(pieces: Sequence[Tensor], frames: Sequence[memoryview], dtype: torch.dtype) -> None:
    """Writes frames of `dtype` into their places. If they do not all fit, nothing is written."""
    check_frames(frames, pieces, dtype)
    for piece, frame in zip(pieces, frames, strict=True):
        piece.copy_(torch.frombuffer(frame, dtype=dtype))


def tensor_of(frame: memoryview) -> Tensor:
    """Returns these bytes as a tensor of uint8."""
    return torch.frombuffer(frame, dtype=torch.uint8) if frame.nbytes else torch.empty(0, dtype=torch.uint8)


def check_lengths(frames: Sequence[memoryview], wanted: Sequence[int]) -> None:
    """Refuses frames that do not have exactly these lengths."""
    if len(frames) != len(wanted):
        raise WrongFrames(f"{len(frames)} frames came, {len(wanted)} were to come")
    for number, (frame, nbytes) in enumerate(zip(frames, wanted, strict=True)):
        if frame.nbytes != nbytes:
            raise WrongFrames(f"frame {number} has {frame.nbytes} bytes, {nbytes} were to come")


def decode(codec: WireCodec, frames: Sequence[memoryview], places: Sequence[Tensor]) -> None:
    """Writes what these frames stand for into their places."""
    check_lengths(frames, [codec.nbytes(len(place)) for place in places])
    for frame, place in zip(frames, places, strict=True):
        codec.decode(tensor_of(frame), place)


def send_difference(codec: WireCodec, values: Tensor, held: Tensor) -> Tensor:
    """Returns, in a code, what is missing from `held` to be `values`, and has `held` be what its reader then has."""
    coded = codec.encode(values - held)
    add_difference(codec, coded, held)
    return coded


def add_difference(codec: WireCodec, coded: Tensor, held: Tensor) -> None:
    difference = torch.empty_like(held)
    codec.decode(coded, difference)
    held.add_(difference)


class ErrorFeedback:
    """Codes gradients, and adds what was left out to the next ones.

    What was left out is kept for all parameters, so that it stays where it belongs when the servers change. What
    a push that is refused, skipped or dropped had left out stays for the next; what it had sent is gone with it, as
    without a code.
    """

    def __init__(self, numel: int, dtype: torch.dtype, codec: WireCodec) -> None:
        self.residual = torch.zeros(numel, dtype=dtype)
        self.codec = codec

    def encode(self, gradient: Tensor, ranges: Ranges) -> list[Tensor]:
        """Returns these ranges of the gradient, plus what was left out before, in the code, as far as it can say it."""
        return [self._encode(gradient[start:stop], self.residual[start:stop]) for start, stop in ranges]

    def _encode(self, gradient: Tensor, residual: Tensor) -> Tensor:
        residual.add_(gradient)
        if not math.isfinite(residual.sum().item()):
            residual.nan_to_num_(0.0)  # NaN does not stay; who computes one does not push it
        sent = torch.empty_like(residual)
        coded = self.codec.encode(residual)
        self.codec.decode(coded, sent)
        residual.sub_(sent)
        return coded
