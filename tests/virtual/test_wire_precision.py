"""How floats travel: cut into frames and back, in codes, and what these leave out."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import peer_checks, policies
from paceline.core.messages import Parameters
from paceline.errors import ConfigError
from paceline.runtime.live.protocol.coded_messages import NOTHING_HELD
from paceline.runtime.live.server.coded_answers import CodedAnswer, CodedAnswers
from paceline.runtime.live.server.remote_memory import find
from paceline.runtime.live.worker.coded_parameters import KnownParameters
from paceline.tensors import shard_optimizer, wire_precision
from paceline.tensors.layout import Entry, Layout
from paceline.tensors.wire_codecs import (
    BFloat16,
    Float16,
    HalfCodec,
    Int4,
    Int8,
    StepCodec,
    TopK,
    WireCodec,
    WrongFrames,
)
from paceline.tensors.wire_precision import ErrorFeedback


def layout(*sizes: int, borders: str = "anywhere") -> Layout:
    return Layout(tuple(Entry(f"tensor {size}", (size,), 0) for size in sizes), "float32", borders)


PART = ((0, 5), (7, 300), (301, 1000))


def test_there_and_back_as_they_are() -> None:
    sent, arrived = torch.arange(1000.0), torch.full((1000,), -1.0)
    ranges = wire_precision.frame_ranges(layout(1000), PART, 256)
    frames = wire_precision.memory_of([sent[start:stop] for start, stop in ranges])
    assert max(frame.nbytes for frame in frames) <= 256
    places = [arrived[start:stop] for start, stop in ranges]
    wire_precision.fill(places, [memoryview(bytearray(f)) for f in frames], torch.float32)
    for start, stop in PART:
        assert torch.equal(arrived[start:stop], sent[start:stop])
    assert arrived[5] == arrived[6] == arrived[300] == -1, "what is another server's is left alone"


def test_as_they_are_nothing_is_copied() -> None:
    vector = torch.zeros(100)
    (frame,) = wire_precision.memory_of([vector[10:20]])
    vector[10] = 7.0
    assert bytes(frame[:4]) == bytes(memoryview(torch.tensor([7.0]).numpy()).cast("B"))


@pytest.mark.parametrize("spoil", [lambda f: f[:-1], lambda f: [*f, f[0]], lambda f: [f[0][1:], *f[1:]], lambda f: []])
def test_wrong_frames_are_refused_and_write_nothing(spoil) -> None:
    vector, target = torch.ones(600), torch.zeros(600)
    frames = wire_precision.memory_of(list(vector.split(256)))
    with pytest.raises(WrongFrames, match="were to come"):
        wire_precision.fill(list(target.split(256)), spoil(frames), torch.float32)
    assert not target.any()
    codec = Int8()
    with pytest.raises(WrongFrames, match="were to come"):
        wire_precision.decode(codec, spoil(coded(codec, vector.split(256))), list(target.split(256)))
    assert not target.any()


def test_frames_end_where_the_optimizers_pieces_do() -> None:
    entries = layout(300_000, 5, 200_000, 70_000, 60_000, 1)
    whole = ((0, entries.numel),)
    ranges = wire_precision.frame_ranges(entries, whole, 1 << 20)
    assert [stop for _, stop in ranges[:-1]] == [start for start, _ in ranges[1:]]
    assert all(stop - start <= 1 << 18 for start, stop in ranges)
    starts = {start for start, _ in ranges}
    pieces = entries.pieces(whole, shard_optimizer.PIECE)
    assert starts <= {piece.start for piece in pieces}
    assert find(pieces, ranges, 4) is not None
    large = layout(300_000, 5, borders="tensors")
    small = wire_precision.frame_ranges(large, ((0, large.numel),), 1 << 20)
    assert find(large.pieces(((0, large.numel),), 1), small, 4) is None


@pytest.mark.parametrize(
    ("wire", "why"),
    [
        ("int3", "known: float32, bfloat16, float16, int8, int4, topk"),
        ("float32:share=1", "unknown wire"),
        ("int8:share=1", "int8 has no parameter 'share'"),
        ("topk:share=2", "share"),
        ("topk:share=0", "share"),
    ],
)
def test_an_unknown_wire_is_refused(wire: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        wire_precision.check_wire(wire)


def test_peers_send_nothing_coarser_than_halves() -> None:
    assert wire_precision.dtype_of_peers("float32", torch.float64) is torch.float64
    assert wire_precision.dtype_of_peers("bfloat16", torch.float32) is torch.bfloat16
    hop = policies.parse("hop:graph=ring")
    for wire_text in ("float32", "bfloat16", "float16"):
        peer_checks.check_wire(hop, wire_text)
    with pytest.raises(ConfigError, match="use bfloat16 or float16"):
        peer_checks.check_wire(hop, "int8")


CODECS = [BFloat16(), Float16(), Int8(), Int4(), TopK(), TopK(share=0.5)]
DTYPES = [torch.float32, torch.float64]


def coded(codec: WireCodec, pieces: Sequence[torch.Tensor]) -> list[memoryview]:
    return wire_precision.memory_of([codec.encode(piece) for piece in pieces])


def decoded(codec: WireCodec, values: torch.Tensor) -> torch.Tensor:
    sent = codec.encode(values)
    assert sent.dtype == torch.uint8
    assert len(sent) == codec.nbytes(len(values))
    found = torch.full_like(values, float("nan"))
    codec.decode(sent, found)
    return found


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097, 10_001])
def test_a_code_says_what_it_can(codec: WireCodec, dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(numel))
    found = decoded(codec, values)
    for start in range(0, numel, max(codec.block, 1 if codec.block > 1 else numel)):
        block, there = values[start : start + codec.block], found[start : start + codec.block]
        if isinstance(codec, HalfCodec):
            block, there = values, found
            torch.testing.assert_close(there, block, rtol=2**-8, atol=1e-7)
        elif isinstance(codec, StepCodec):
            half_a_step = block.abs().max() / codec.steps / 2
            assert (there - block).abs().max() <= half_a_step * (1 + 1e-5)
            assert torch.isclose(there.abs().max(), block.abs().max(), rtol=1e-6)
        elif isinstance(codec, TopK):
            kept = there != 0
            assert kept.sum() == codec.kept(len(block))
            assert block[kept].abs().min() >= block[~kept].abs().max() if (~kept).any() else True
            torch.testing.assert_close(there[kept], block[kept], rtol=2**-8, atol=0)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_zeros_stay_and_huge_values_are_finite(codec: WireCodec) -> None:
    assert not decoded(codec, torch.zeros(5000)).any()
    huge = torch.finfo(torch.float32).max
    values = torch.tensor([huge, -huge, 1.0, 1e-45] * 100)
    assert torch.isfinite(decoded(codec, values)).all()
    assert torch.isfinite(decoded(codec, values.double() * 1e100)).all()


def test_the_bytes_of_each_code() -> None:
    found = {wire: wire_precision.bytes_per_float(wire) for wire in ("float32", "bfloat16", "int8", "int4", "topk")}
    assert found == pytest.approx({"float32": 4, "bfloat16": 2, "int8": 1.016, "int4": 0.5625, "topk": 0.04}, rel=1e-2)


def test_places_that_are_not_there_are_refused() -> None:
    codec = TopK()
    for numel, place in ((4096, 4096), (4096, -1), (100, 100)):
        sent = codec.encode(torch.randn(numel))
        sent[:2] = torch.tensor([place], dtype=torch.int16).view(torch.uint8)
        with pytest.raises(WrongFrames, match="not there"):
            codec.decode(sent, torch.zeros(numel))


@settings(deadline=None)
@given(st.sampled_from(CODECS), st.binary(min_size=1, max_size=600))
def test_any_bytes_are_read_or_refused(codec: WireCodec, text: bytes) -> None:
    for numel in range(1, 600):
        if codec.nbytes(numel) == len(text):
            with contextlib.suppress(WrongFrames):
                codec.decode(torch.frombuffer(bytearray(text), dtype=torch.uint8), torch.zeros(numel))


@settings(deadline=None)
@given(
    st.sampled_from(CODECS),
    st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=8, max_size=8), min_size=1, max_size=12),
)
def test_what_was_sent_and_what_is_left_is_what_was_given(codec: WireCodec, given_: list[list[float]]) -> None:
    feedback = ErrorFeedback(8, torch.float64, codec)
    sent, found = torch.zeros(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    for values in given_:
        (frame,) = feedback.encode(torch.tensor(values, dtype=torch.float64), ((0, 8),))
        codec.decode(frame, found)
        sent += found
    total = torch.tensor(given_, dtype=torch.float64).sum(0)
    torch.testing.assert_close(sent + feedback.residual, total, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_is_left_does_not_grow(codec: WireCodec) -> None:
    torch.manual_seed(0)
    feedback = ErrorFeedback(8192, torch.float32, codec)
    sizes = []
    for _ in range(400):
        feedback.encode(torch.randn(8192), ((0, 8192),))
        sizes.append(feedback.residual.norm().item())
    assert max(sizes[200:]) <= 1.5 * max(sizes[:200])


@pytest.mark.parametrize("codec", [BFloat16(), Float16()], ids=str)
def test_what_a_half_cannot_say_goes_later(codec: HalfCodec) -> None:
    feedback = ErrorFeedback(3, torch.float32, codec)
    largest, huge = torch.finfo(codec.half).max, torch.finfo(torch.float32).max
    (frame,) = feedback.encode(torch.tensor([huge, -huge, 1.0]), ((0, 3),))
    assert frame.view(codec.half).tolist() == [largest, -largest, 1.0]
    assert feedback.residual[0] == huge - largest
    (frame,) = feedback.encode(torch.zeros(3), ((0, 3),))
    assert frame.view(codec.half)[0] > 0
    assert frame.view(codec.half)[2] == 0


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_nan_and_inf_do_not_stay(codec: WireCodec) -> None:
    feedback = ErrorFeedback(4, torch.float32, codec)
    (frame,) = feedback.encode(torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0]), ((0, 4),))
    found = torch.zeros(4)
    codec.decode(frame, found)
    assert torch.isfinite(feedback.residual).all()
    assert torch.isfinite(found).all()


def test_only_the_part_is_touched() -> None:
    """Another server's part may be on its way."""
    feedback = ErrorFeedback(1000, torch.float32, BFloat16())
    feedback.encode(torch.full((1000,), 1.001), PART)
    untouched = torch.ones(1000, dtype=torch.bool)
    for start, stop in PART:
        untouched[start:stop] = False
    assert not feedback.residual[untouched].any()
    assert feedback.residual[~untouched].all()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_differences_end_at_the_values(codec: WireCodec) -> None:
    """What a code leaves out of one difference is in the next; sender and receiver have the same all the time."""
    torch.manual_seed(0)
    values, held, known = torch.randn(5000), torch.zeros(5000), torch.zeros(5000)
    for _ in range(400):
        wire_precision.add_difference(codec, wire_precision.send_difference(codec, values, held), known)
        assert torch.equal(held, known)
    torch.testing.assert_close(known, values, rtol=1e-5, atol=1e-5)


def parameters(iteration: int) -> Parameters:
    return Parameters(0, 0, 0, iteration, iteration, False)


def test_answers_in_a_code_follow_what_the_worker_has() -> None:
    torch.manual_seed(0)
    codec, values, places = Int4(), torch.randn(1000), list(torch.zeros(1000).split(300))
    server, worker = CodedAnswers(codec, list(values.split(300))), KnownParameters(codec, places)

    def arrive(answer: CodedAnswer) -> float:
        worker.take(answer[0], [memoryview(bytearray(frame)) for frame in answer[1]])
        return (torch.cat(places) - values).abs().max().item()

    assert arrive(server.answer(parameters(0), worker.number)) == 0, "the first comes as it is"
    values.add_(torch.randn(1000))
    assert 0 < arrive(server.answer(parameters(1), worker.number)) < 0.5
    values.add_(torch.randn(1000))
    lost = server.answer(parameters(2), worker.number)
    assert server.answer(parameters(2), worker.number) is lost, "said again as it was"
    assert arrive(lost) < 0.5
    server.answer(parameters(3), worker.number)
    assert arrive(server.answer(parameters(4), worker.number)) == 0, "another question: everything"
    with pytest.raises(WrongFrames, match="does not have"):
        arrive((msgspec.structs.replace(lost[0], base=7), lost[1]))
    assert worker.number == NOTHING_HELD
    assert arrive(server.answer(parameters(5), worker.number)) == 0
    with pytest.raises(WrongFrames, match="were to come"):
        arrive((server.answer(parameters(6), worker.number)[0], lost[1][:1]))
    assert arrive(server.answer(parameters(6), worker.number)) == 0, "what did not fit is sent whole"
    assert arrive(CodedAnswers(codec, list(values.split(300))).answer(parameters(7), worker.number)) == 0, (
        "another incarnation of the server knows nothing of it"
    )
