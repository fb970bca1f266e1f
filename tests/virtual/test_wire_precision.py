"""How floats travel: cut into frames and back, rounded to halves, and what rounding leaves out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.runtime.live.server.remote_memory import find
from paceline.tensors import shard_optimizer, wire_precision
from paceline.tensors.layout import Entry, Layout
from paceline.tensors.wire_precision import ErrorFeedback, WrongFrames


def layout(*sizes: int, borders: str = "anywhere") -> Layout:
    return Layout(tuple(Entry(f"tensor {size}", (size,), 0) for size in sizes), "float32", borders)


PART = ((0, 5), (7, 300), (301, 1000))


@pytest.mark.parametrize("wire", wire_precision.WIRES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_there_and_back(wire: str, dtype: torch.dtype) -> None:
    travels = wire_precision.dtype_on_wire(wire, dtype)
    sent = torch.arange(1000, dtype=dtype).remainder(64).to(travels)
    arrived = torch.full((1000,), -1.0, dtype=dtype)
    ranges = wire_precision.frame_ranges(layout(1000), PART, 256, travels.itemsize)
    frames = wire_precision.memory_of(wire_precision.split_frames(sent, ranges, 256, travels.itemsize))
    assert max(frame.nbytes for frame in frames) <= 256
    wire_precision.fill(
        wire_precision.split_frames(arrived, ranges, 256, travels.itemsize),
        [memoryview(bytearray(f)) for f in frames],
        travels,
    )
    for start, stop in PART:
        assert torch.equal(arrived[start:stop], sent[start:stop].to(dtype))
    assert arrived[5] == arrived[6] == arrived[300] == -1, "what is another server's is left alone"


def test_as_they_are_nothing_is_copied() -> None:
    vector = torch.zeros(100)
    (frame,) = wire_precision.memory_of(wire_precision.split_frames(vector, ((10, 20),), 1 << 20, 4))
    vector[10] = 7.0
    assert bytes(frame[:4]) == bytes(memoryview(torch.tensor([7.0]).numpy()).cast("B"))


@pytest.mark.parametrize("spoil", [lambda f: f[:-1], lambda f: [*f, f[0]], lambda f: [f[0][1:], *f[1:]], lambda f: []])
def test_wrong_frames_are_refused_and_write_nothing(spoil) -> None:
    vector, target = torch.ones(600), torch.zeros(600)
    frames = wire_precision.memory_of(wire_precision.split_frames(vector, ((0, 600),), 1024, 4))
    with pytest.raises(WrongFrames, match="were to come"):
        wire_precision.fill(wire_precision.split_frames(target, ((0, 600),), 1024, 4), spoil(frames), torch.float32)
    assert not target.any()


def test_frames_end_where_the_optimizers_pieces_do() -> None:
    entries = layout(300_000, 5, 200_000, 70_000, 60_000, 1)
    whole = ((0, entries.numel),)
    ranges = wire_precision.frame_ranges(entries, whole, 1 << 20, 4)
    assert [stop for _, stop in ranges[:-1]] == [start for start, _ in ranges[1:]]
    assert all(stop - start <= 1 << 18 for start, stop in ranges)
    starts = {start for start, _ in ranges}
    pieces = entries.pieces(whole, shard_optimizer.PIECE)
    assert starts <= {piece.start for piece in pieces}
    assert find(pieces, ranges, 4) is not None
    large = layout(300_000, 5, borders="tensors")
    small = wire_precision.frame_ranges(large, ((0, large.numel),), 1 << 20, 4)
    assert find(large.pieces(((0, large.numel),), 1), small, 4) is None


def test_an_unknown_wire_is_refused() -> None:
    with pytest.raises(ConfigError, match="float32, bfloat16, float16"):
        wire_precision.dtype_on_wire("int8", torch.float32)


@settings(deadline=None)
@given(
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=8, max_size=8), min_size=1, max_size=12),
)
def test_what_was_sent_and_what_is_left_is_what_was_given(half: torch.dtype, given_: list[list[float]]) -> None:
    feedback = ErrorFeedback(8, torch.float64, half)
    sent = torch.zeros(8, dtype=torch.float64)
    for values in given_:
        feedback.round(torch.tensor(values, dtype=torch.float64), ((0, 8),))
        assert torch.isfinite(feedback.rounded).all()
        sent += feedback.rounded
    total = torch.tensor(given_, dtype=torch.float64).sum(0)
    torch.testing.assert_close(sent + feedback.residual, total, rtol=1e-12, atol=1e-9)


@settings(deadline=None)
@given(st.sampled_from([torch.bfloat16, torch.float16]), st.lists(st.floats(-100, 100, width=32), min_size=1))
def test_rounding_itself_loses_nothing(half: torch.dtype, values: list[float]) -> None:
    feedback = ErrorFeedback(len(values), torch.float32, half)
    given_ = torch.tensor(values)
    feedback.round(given_, ((0, len(values)),))
    assert torch.equal(feedback.rounded.float() + feedback.residual, given_)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_what_a_half_cannot_say_goes_later(half: torch.dtype) -> None:
    feedback = ErrorFeedback(3, torch.float32, half)
    largest = torch.finfo(half).max
    huge = torch.finfo(torch.float32).max
    feedback.round(torch.tensor([huge, -huge, 1.0]), ((0, 3),))
    assert feedback.rounded.tolist() == [largest, -largest, 1.0]
    assert feedback.residual[0] == huge - largest
    feedback.round(torch.zeros(3), ((0, 3),))
    assert feedback.rounded[0] > 0
    assert feedback.rounded[2] == 0


def test_nan_and_inf_do_not_stay() -> None:
    feedback = ErrorFeedback(4, torch.float32, torch.float16)
    feedback.round(torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0]), ((0, 4),))
    assert torch.isfinite(feedback.residual).all()
    assert torch.isfinite(feedback.rounded).all()
    assert feedback.residual[0] == 0
    assert feedback.rounded[3] == 1


def test_only_the_part_is_touched() -> None:
    """Another server's part may be on its way."""
    feedback = ErrorFeedback(1000, torch.float32, torch.bfloat16)
    feedback.rounded.zero_()
    feedback.round(torch.full((1000,), 1.001), PART)
    untouched = torch.ones(1000, dtype=torch.bool)
    for start, stop in PART:
        untouched[start:stop] = False
    assert not feedback.rounded[untouched].any()
    assert not feedback.residual[untouched].any()
    assert feedback.residual[~untouched].all()
