"""Passes over memory: compiled or by torch, the numbers are the same to the last bit, and nothing else is touched."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.tensors import fused_kernels
from paceline.tensors.fused_kernels import AT_ONCE, PART
from paceline.tensors.layout import Entry, Layout
from paceline.tensors.optimizers import parse
from paceline.tensors.shard_optimizer import PIECE, PieceRun, ShardOptimizer, SlicedGradient, runs_of

LENGTHS = [0, 1, 3, 16, 17, 31, 64, 1000, 1023, 1024, 1025, 3 * 1024 + 7]
"""Around what is done at once: a line of the cache, a block."""


@pytest.fixture(params=["compiled", "torch"])
def way(request, monkeypatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(fused_kernels, "_passes", None)
    elif not fused_kernels.are_compiled():
        pytest.skip("there was no C compiler")
    return request.param


def vector(length: int, seed: int, shift: int = 0) -> Tensor:
    """Random numbers of all sizes, that begin anywhere in a line of the cache."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(length + shift, generator=generator) * 10 ** torch.randn(length + shift, generator=generator)
    return whole[shift:]


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_copy_is_whole_and_touches_nothing_else(length: int, around: bool, way: str) -> None:
    for shift in range(18):
        source, whole = vector(length, 1, shift % 5), torch.full((length + 40,), 7.0)
        assert fused_kernels.copy_and_check_finite(source, whole[shift : shift + length], around)
        assert torch.equal(whole[shift : shift + length], source)
        assert (whole[:shift] == 7).all()
        assert (whole[shift + length :] == 7).all()


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_whatever_is_not_finite_is_seen_wherever_it_is(bad: float, around: bool, way: str) -> None:
    for place in range(90):
        source, target = torch.ones(93)[3:], torch.zeros(91)[1:]
        source[place] = bad
        assert not fused_kernels.copy_and_check_finite(source, target, around)
        assert torch.equal(target.view(torch.int32), source.view(torch.int32))


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("number", [3.4028234e38, -3.4028234e38, 1e-45, -0.0])
def test_large_and_small_numbers_are_finite(number: float, around: bool, way: str) -> None:
    source, target = torch.full((100,), number), torch.zeros(100)
    assert fused_kernels.copy_and_check_finite(source, target, around)
    assert torch.equal(target.view(torch.int32), source.view(torch.int32))


@pytest.mark.parametrize("place", [0, AT_ONCE, 2 * AT_ONCE + 4])
def test_each_part_of_a_large_gradient_is_looked_at(place: int, way: str) -> None:
    source, target = torch.zeros(2 * AT_ONCE + 5), torch.zeros(2 * AT_ONCE + 5)
    assert fused_kernels.is_finite(source)
    source[place] = math.nan
    assert not fused_kernels.copy_and_check_finite(source, target)
    assert not fused_kernels.is_finite(source)
    assert math.isnan(target[place])


def test_vectors_of_other_lengths_are_refused(way: str) -> None:
    """In C they would be read beyond their end."""
    for source, target in [((3,), (1000,)), ((1000,), (3,)), ((2, 3), (3, 2)), ((6,), (2, 3))]:
        with pytest.raises(RuntimeError, match="size"):
            fused_kernels.copy_and_check_finite(torch.ones(source), torch.zeros(target))
    for gradients, targets in [
        ([torch.ones(3)], []),
        ([torch.ones(10), torch.ones(9)], []),
        ([torch.ones(10)], [torch.ones(9)]),
    ]:
        with pytest.raises(RuntimeError, match="size"):
            fused_kernels.step(torch.zeros(10), gradients, targets, 1.0, slice(0, 10), torch.empty(10))
    with pytest.raises(RuntimeError, match="size"):
        fused_kernels.step_on_each(torch.zeros(10), [torch.ones(10), torch.ones(9)], [1.0, 1.0], slice(0, 10))


def test_a_rate_that_is_no_float_is_refused(way: str) -> None:
    for rates in ([1e39], [0.1, -1e39]):
        with pytest.raises((OverflowError, RuntimeError)):
            fused_kernels.step(torch.zeros(5), [torch.ones(5)], [], rates[-1], slice(0, 5), torch.empty(5))
        with pytest.raises((OverflowError, RuntimeError)):
            fused_kernels.step_on_each(torch.zeros(5), [torch.ones(5) for _ in rates], rates, slice(0, 5))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("written", ["nobody", "gradients", "others"])
def test_a_step_is_torchs(length: int, count: int, written: str, way: str) -> None:
    values = vector(length, 0, 3)
    gradients = [vector(length, 1 + each, each) for each in range(count)]
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    expected = values.add(total, alpha=-0.3 / count)
    others = [torch.zeros(length), torch.zeros(length)]
    targets = {"nobody": [], "gradients": gradients, "others": others}[written]
    before = [gradient.clone() for gradient in gradients]
    fused_kernels.step(values, gradients, targets, -0.3 / count, slice(0, length), torch.empty(length + 1))
    assert all(torch.equal(each, expected) for each in (values, *targets))
    if written != "gradients":
        assert all(torch.equal(*pair) for pair in zip(gradients, before, strict=True)), "there was memory for the sum"


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("length", LENGTHS)
def test_steps_on_each_are_torchs_one_after_the_other(length: int, count: int, way: str) -> None:
    values = vector(length, 0, 1)
    gradients = [vector(length, 1 + each, each) for each in range(count)]
    rates = [-0.3 / (1 + each) for each in range(count)]
    latest, expected = values, []
    for gradient, rate in zip(gradients, rates, strict=True):
        expected.append(latest := latest.add(gradient, alpha=rate))
    fused_kernels.step_on_each(values, gradients, rates, slice(0, length))
    assert torch.equal(values, latest)
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("where", [slice(0, 0), slice(3, 40), slice(3, 2 * PART + 17), slice(PART, 3 * PART)])
@pytest.mark.parametrize("spoil", [False, True])
def test_a_part_is_stepped_and_the_rest_left_alone(where: slice, spoil: bool, way: str) -> None:
    values, gradients, target = vector(3 * PART, 0), [vector(3 * PART, 1), vector(3 * PART, 2)], vector(3 * PART, 3)
    expected, shown = values.clone(), target.clone()
    expected[where] = shown[where] = values[where].add(gradients[0][where] + gradients[1][where], alpha=-0.1)
    others = [gradient.clone() for gradient in gradients]
    fused_kernels.step(values, gradients, [target], -0.1, where, gradients[0] if spoil else torch.empty(PART))
    assert torch.equal(values, expected)
    assert torch.equal(target, shown)
    gradients = [each.clone() for each in others]
    expected = values.clone()
    for gradient, other, rate in zip(gradients, others, (0.5, -0.25), strict=True):
        expected[where] = other[where] = expected[where].add(gradient[where], alpha=rate)
    fused_kernels.step_on_each(values, gradients, (0.5, -0.25), where)
    assert torch.equal(values, expected)
    assert all(torch.equal(*pair) for pair in zip(gradients, others, strict=True))


class Odd(Tensor):
    """What its bytes are, its own functions know."""


ODD = {
    "with gaps": lambda: torch.randn(80)[::2],
    "one for all": lambda: torch.tensor(2.0).expand(40),
    "sign to be changed": lambda: torch._neg_view(torch.randn(40)),
    "zeros that are nowhere": lambda: torch._efficientzerotensor((40,)),
    "of its own kind": lambda: torch.randn(40).as_subclass(Odd),
    "long floats": lambda: torch.randn(40, dtype=torch.float64),
    "short floats": lambda: torch.randn(40, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("how", ODD)
def test_what_lies_otherwise_in_memory_is_left_to_torch(how: str, monkeypatch) -> None:
    nobody = SimpleNamespace()  # has no function to call
    monkeypatch.setattr(fused_kernels, "_passes", nobody)
    odd, plain = ODD[how](), torch.ones(40)
    target = torch.zeros(40)
    assert fused_kernels.copy_and_check_finite(odd, target)
    assert torch.equal(target, odd.to(target.dtype))
    fused_kernels.step(target, [plain, odd], [], 0.5, slice(0, 40), torch.zeros(40))
    assert torch.allclose(target, odd.float() + 0.5 * (1 + odd.float()), atol=1e-2)
    if how in ("long floats", "short floats"):
        fused_kernels.step(target, [plain], [odd], 1.0, slice(0, 40), torch.zeros(40))
        assert torch.equal(odd, target.to(odd.dtype)), "parameters that travel as halves are rounded"
    with pytest.raises(AttributeError):
        fused_kernels.copy_and_check_finite(plain, target)
    assert not fused_kernels.is_plain_float32(torch.empty(40, device="meta"))


@pytest.mark.skipif(not fused_kernels.are_compiled(), reason="there was no C compiler")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("copy_and_look", (0, 0, 0)),
        ("copy_and_look", (0, 0, "many", False)),
        ("step", (0, [], (), 0.1, 0)),
        ("step", (0, (), ("here",), 0.1, 0)),
        ("step", (0, (), (), None, 0)),
        ("step_on_each", (0, (0, 0), (0.1,), 0)),
        ("step_on_each", (0, (0,), (0.1, 0.1), 0)),
        ("step_on_each", (0, (), [], 0)),
        ("copy_and_look", (1, 0, 0, False)),
        ("step", (0, (2,), (), 0.1, 0)),
        ("step_on_each", (0, (0,), ("fast",), 0)),
        ("step_on_each", (0, (0,), [0.1], 0)),
        ("step_on_each", ()),
    ],
)
def test_wrong_arguments_are_refused(name: str, arguments: tuple[object, ...]) -> None:
    with pytest.raises((TypeError, ValueError)):
        getattr(fused_kernels._passes, name)(*arguments)


def test_runs_join_what_lies_one_after_the_other() -> None:
    entries = (Entry("a", (3,), 0), Entry("b", (4,), 0), Entry("c", (5,), 1), Entry("d", (PIECE,), 1))
    layout = Layout(entries, "float32")
    assert runs_of(layout.pieces(slice(0, 12), PIECE)) == [PieceRun(0, 0, 0, 7), PieceRun(2, 7, 7, 5)], (
        "c is of another group"
    )
    assert runs_of(layout.pieces(((1, 4), (5, 7)), PIECE)) == [PieceRun(0, 0, 1, 3), PieceRun(2, 3, 5, 2)], (
        "4 is another shard's"
    )
    assert runs_of(layout.pieces(slice(7, 12 + PIECE), PIECE)) == [PieceRun(0, 0, 7, 5 + PIECE)], "whatever its length"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_runs_are_stepped_as_pieces_are(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), min_size=1, max_size=6))
    layout = Layout(tuple(Entry(str(number), (size,), group) for number, (size, group) in enumerate(sizes)), "float32")
    cuts = sorted(data.draw(st.lists(st.integers(0, layout.numel), max_size=6)))
    part = tuple((a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False) if a < b)
    spec = parse("sgd:lr=0.1")
    described = type(spec)(spec.name, (spec.groups[0], {**spec.groups[0], "lr": 0.7}))
    length = sum(stop - start for start, stop in part)
    whole, count = vector(layout.numel, 5), data.draw(st.integers(1, 3))
    mine = torch.cat([torch.zeros(0), *(whole[start:stop] for start, stop in part)])
    results = []
    for by_run in (True, False):
        optimizer = ShardOptimizer(layout, part, mine.clone(), described)
        gradients = [optimizer.cut_from(vector(layout.numel, each)) for each in range(count)]
        target = optimizer.cut(torch.zeros(length))
        given = gradients if by_run else [list(gradient) for gradient in gradients]
        optimizer.apply(given, 0.5, targets=[target])
        assert torch.equal(torch.cat([torch.zeros(0), *target]), optimizer.values)
        results.append(optimizer.values)
    assert torch.equal(*results)
    assert isinstance(target, SlicedGradient)
