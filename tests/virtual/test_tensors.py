"""Layouts, slices and the optimizers on them."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.tensors import shard_optimizer
from paceline.tensors.layout import Entry, Layout, flatten, imbalance, layout_of
from paceline.tensors.optimizers import describe, hyper_of, parse
from paceline.tensors.shard_optimizer import ShardOptimizer, ThreadCounts

shapes = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=8)


@given(shapes, st.integers(1, 9), st.sampled_from(["float32", "float64"]), st.sampled_from([1, 7, 1 << 16]))
def test_slices_cover_the_vector_and_are_equal_to_within_a_cache_line(shapes, shards, dtype, longest) -> None:
    layout = Layout(tuple(Entry(f"p{i}", shape, 0) for i, shape in enumerate(shapes)), dtype)
    slices = layout.slices(shards)
    assert [part.start for part in slices] == [0, *[part.stop for part in slices[:-1]]]
    assert slices[-1].stop == layout.numel
    sizes = layout.slice_bytes(shards)
    assert max(sizes) - min(sizes) <= 2 * 64
    pieces = [piece for part in slices for piece in layout.pieces(part, longest)]
    assert sum(piece.length for piece in pieces) == layout.numel
    for part in slices:
        lengths = [(piece.offset, piece.length) for piece in layout.pieces(part, longest)]
        assert all(offset + length <= part.stop - part.start for offset, length in lengths)
        assert all(length <= longest for _, length in lengths)


@given(shapes, st.integers(1, 9), st.sampled_from(["anywhere", "tensors"]))
def test_key_ranges_cover_the_vector_with_equal_numbers_of_whole_tensors(shapes, shards, borders) -> None:
    entries = tuple(Entry(f"p{i}", shape, 0) for i, shape in enumerate(shapes))
    layout = Layout(entries, "float32", borders, "key-range")
    if shards > len(shapes):
        with pytest.raises(ConfigError, match=f"servers={shards} is out of range: 1 to {len(shapes)}"):
            layout.slices(shards)
        return
    slices = layout.slices(shards)
    assert [part.start for part in slices] == [0, *[part.stop for part in slices[:-1]]]
    assert slices[-1].stop == layout.numel
    held = [{piece.entry for piece in layout.pieces(part, 1 << 16)} for part in slices]
    assert sorted(key for keys in held for key in keys) == list(range(len(shapes)))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    assert imbalance(layout.slice_bytes(shards)) >= imbalance(Layout(entries, "float32", "tensors").slice_bytes(shards))


def test_how_the_vector_is_cut_is_part_of_the_layout() -> None:
    """So that no process can cut differently, and an old checkpoint, which does not say, is read as it was cut."""
    entries = (Entry("a", (2, 3), 0), Entry("b", (100,), 0))
    eps, keys = Layout(entries, "float32"), Layout(entries, "float32", slicing="key-range")
    assert eps.digest() != keys.digest()
    assert msgspec.json.decode(msgspec.json.encode(keys), type=Layout) == keys
    assert msgspec.json.decode(b'[[["a",[2,3],0],["b",[100],0]],"float32","anywhere"]', type=Layout) == eps
    assert keys.slices(2) == [slice(0, 6), slice(6, 106)]
    assert imbalance(keys.slice_bytes(2)) == pytest.approx(100 / 53)


def test_imbalance_is_1_for_equal_slices_and_the_number_of_servers_at_worst() -> None:
    assert imbalance((4, 4, 4)) == 1
    assert imbalance((12, 0, 0)) == 3
    assert imbalance((0, 0)) == 1


def test_flatten_and_views_are_inverse() -> None:
    tensors = [torch.randn(3, 4), torch.randn(5), torch.randn(())]
    layout = layout_of((f"p{i}", tensor, 0) for i, tensor in enumerate(tensors))
    flat = torch.empty(layout.numel)
    flatten(tensors, layout.views(flat))
    for tensor, view in zip(tensors, layout.views(flat), strict=True):
        assert torch.equal(tensor, view)


def test_mixed_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match="must all be float32 or all float64"):
        layout_of([("a", torch.zeros(1), 0), ("b", torch.zeros(1, dtype=torch.float64), 0)])


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(
        ["sgd:lr=0.1", "sgd:lr=0.1,momentum=0.9,nesterov=true,weight_decay=0.01", "adam:lr=0.01", "adamw:lr=0.01"]
    ),
    st.integers(1, 4),
    st.integers(0, 1000),
)
def test_stepping_slices_equals_stepping_the_model(text: str, shards: int, seed: int) -> None:
    torch.manual_seed(seed)
    tensors = [torch.randn(7, 5, dtype=torch.float64), torch.randn(11, dtype=torch.float64)]
    layout = layout_of((f"p{i}", tensor, 0) for i, tensor in enumerate(tensors))
    flat = torch.empty(layout.numel, dtype=torch.float64)
    flatten(tensors, layout.views(flat))
    spec = parse(text)
    parts = layout.slices(shards)
    optimizers = [ShardOptimizer(layout, part, flat[part], spec) for part in parts]
    whole = spec.build([tensors])
    for _ in range(5):
        gradient = torch.randn(layout.numel, dtype=torch.float64)
        for tensor, view in zip(tensors, layout.views(gradient), strict=True):
            tensor.grad = view.clone()
        whole.step()
        for part, optimizer in zip(parts, optimizers, strict=True):
            optimizer.apply([optimizer.cut(gradient[part])], 1.0)
    for tensor, view in zip(tensors, layout.views(flat), strict=True):
        assert torch.allclose(tensor, view, atol=1e-12)


def test_weight_scales_the_step_not_the_gradient() -> None:
    """Under Adam scaling the gradient would do nothing."""
    layout = Layout((Entry("p", (4,), 0),), "float64")
    steps = {}
    for weight in (1.0, 0.25):
        values = torch.zeros(4, dtype=torch.float64)
        ShardOptimizer(layout, slice(0, 4), values, parse("adam:lr=0.1")).apply([[torch.ones(4).double()]], weight)
        steps[weight] = values
    assert torch.allclose(steps[0.25], steps[1.0] / 4)


@pytest.mark.parametrize(
    "text",
    ["sgd:lr=0.1", "sgd:lr=0.1,momentum=0.9,dampening=0.3", "sgd:lr=0.1,momentum=0.9,nesterov=true,weight_decay=0.1",
     "sgd:lr=0.1,weight_decay=0.1,maximize=true"],
)  # fmt: skip
def test_sgd_is_torchs_to_the_last_bit(text: str) -> None:
    torch.manual_seed(0)
    values, spec = torch.randn(100), parse(text)
    theirs = values.clone()
    ours = ShardOptimizer(Layout((Entry("p", (100,), 0),), "float32"), slice(0, 100), values, spec)
    optimizer = spec.build([[theirs]])
    for _ in range(4):
        theirs.grad = torch.randn(100)
        ours.apply([[theirs.grad.clone()]], 1.0)
        optimizer.step()
    assert torch.equal(values, theirs)


def test_the_mean_of_several_gradients() -> None:
    layout = Layout((Entry("a", (3,), 0), Entry("b", (70000,), 0)), "float32")
    values = torch.zeros(layout.numel)
    optimizer = ShardOptimizer(layout, slice(0, layout.numel), values, parse("sgd:lr=1"))
    gradients = [torch.full((layout.numel,), float(value)) for value in (1, 2, 6)]
    optimizer.apply([optimizer.cut(gradient) for gradient in gradients], 1.0)
    assert torch.equal(values, torch.full((layout.numel,), -3.0))
    assert [gradient[0].item() for gradient in gradients] == [1, 2, 6], "they are not written to"


def test_an_absent_gradient_is_not_a_zero_gradient() -> None:
    """With momentum a zero gradient still moves the parameter; a missing one does not."""
    layout = Layout((Entry("a", (2,), 0), Entry("b", (2,), 0)), "float32")
    values = torch.ones(4)
    optimizer = ShardOptimizer(layout, slice(0, 4), values, parse("sgd:lr=0.1,momentum=0.9,weight_decay=0.1"))
    gradient = optimizer.cut(torch.ones(4))
    optimizer.apply([gradient], 1.0, [frozenset()])
    before = values.clone()
    optimizer.apply([gradient], 1.0, [frozenset({1})])
    assert torch.equal(values[2:], before[2:])
    assert not torch.equal(values[:2], before[:2])
    optimizer.apply([gradient, gradient], 1.0, [frozenset({1}), frozenset()])
    assert not torch.equal(values[2:], before[2:]), "one of two has it: it counts"


def test_hyper_parameters_travel() -> None:
    layout = Layout((Entry("p", (1,), 0),), "float32")
    values = torch.zeros(1)
    optimizer = ShardOptimizer(layout, slice(0, 1), values, parse("sgd:lr=1"))
    optimizer.set_hyper([{**parse("sgd:lr=1").groups[0], "lr": 0.5}])
    optimizer.apply([[torch.ones(1)]], 0.5)
    assert values.item() == pytest.approx(-0.25)


def test_only_known_optimizers() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError, match=r"torch.optim.*LBFGS cannot run on the servers: it needs several gradients"):
        describe(torch.optim.LBFGS([parameter]))

    class SGD(torch.optim.SGD):
        pass

    with pytest.raises(ConfigError, match="cannot run on the servers"):
        describe(SGD([parameter], lr=0.1))


def test_describe_reads_every_group() -> None:
    a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    spec = describe(torch.optim.AdamW([{"params": [a], "lr": 0.5}, {"params": [b]}], lr=torch.tensor(0.25)))
    assert [group["lr"] for group in spec.groups] == [0.5, 0.25]
    assert spec.groups[0]["betas"] == (0.9, 0.999)
    assert "params" not in hyper_of({"params": [a], "lr": 1})


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("text", ["sgd:lr=0.1", "sgd:lr=0.1,momentum=0.9"])
def test_threads_change_nothing(text: str, threads: int, count: int) -> None:
    torch.manual_seed(0)
    shapes = [(4 * shard_optimizer.PIECE + 5,), (7,), (shard_optimizer.PIECE,)]
    layout = Layout(tuple(Entry(f"p{index}", shape, 0) for index, shape in enumerate(shapes)), "float32")
    start, gradients = torch.randn(layout.numel), [torch.randn(layout.numel) for _ in range(count)]
    results = []
    for wanted in (1, threads):
        part = slice(0, layout.numel)
        ours = ShardOptimizer(layout, part, start.clone(), parse(text), ThreadCounts(wanted, wanted))
        copies = [gradient.clone() for gradient in gradients]
        for _ in range(2):
            pieces = [ours.cut(copy) for copy in copies]
            absent = [] if text == "sgd:lr=0.1" else [frozenset({1})] * count
            ours.apply(pieces, 1.0, absent, targets=pieces)
        results.append([ours.values, *copies])
        assert ours.threads == ThreadCounts(min(wanted, 5), min(wanted, 5))
        ours.close()
    for alone, together in zip(*results, strict=True):
        assert torch.equal(alone, together)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("extras", ["", ",schedule=cosine(samples=40),batch=4"])
def test_steps_taken_together_are_those_taken_one_by_one(threads: int, extras: str) -> None:
    torch.manual_seed(0)
    layout = Layout((Entry("a", (3 * shard_optimizer.PIECE + 5,), 0), Entry("b", (7,), 1)), "float32")
    start, gradients = torch.randn(layout.numel), [torch.randn(layout.numel) for _ in range(3)]
    weights = [0.25, 0.125, 1.0]
    results = []
    for together in (False, True):
        spec = parse("sgd:lr=0.1" + extras)
        spec = msgspec.structs.replace(spec, groups=(*spec.groups, {**spec.groups[0], "lr": 0.7}))
        ours = ShardOptimizer(layout, slice(0, layout.numel), start.clone(), spec, ThreadCounts(threads, threads))
        assert ours.is_plain
        copies = [gradient.clone() for gradient in gradients]
        pieces = [ours.cut(copy) for copy in copies]
        if together:
            ours.apply_each(pieces, weights)
        else:
            for each, weight in zip(pieces, weights, strict=True):
                ours.apply([each], weight, targets=[each])
        results.append([ours.values, *copies, torch.tensor(ours.step_schedule.samples)])
        assert not together or copies[0][-1] == results[0][1][-1] != start[-1], "the last is of the other group"
        ours.close()
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_gradients_that_were_kept_count_beside_those_that_lie_where_they_came() -> None:
    layout = Layout((Entry("a", (5,), 0), Entry("b", (7,), 0)), "float32")
    start, gradients = torch.randn(12), [torch.randn(12) for _ in range(3)]
    results = []
    for kept in ((), (1,), (0, 2)):
        ours = ShardOptimizer(layout, slice(0, 12), start.clone(), parse("sgd:lr=0.1"))
        cuts = [ours.cut(gradient) for gradient in gradients]
        given = [[piece.clone() for piece in cut] if index in kept else cut for index, cut in enumerate(cuts)]
        ours.apply(given, 1.0)
        results.append(ours.values)
    assert torch.allclose(results[0], start - 0.1 * sum(gradients) / 3)
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("text", ["adam:lr=0.1", "sgd:lr=0.1,momentum=0.9", "sgd:lr=0.1,ema=0.9"])
def test_only_plain_steps_are_taken_together(text: str) -> None:
    layout = layout_of([("p", torch.zeros(5), 0)])
    assert not ShardOptimizer(layout, slice(0, 5), torch.zeros(5), parse(text)).is_plain
    plain = ShardOptimizer(layout, slice(0, 5), torch.zeros(5), parse("sgd:lr=0.1"))
    assert plain.is_plain
    plain.set_hyper([{"momentum": 0.9}])
    assert not plain.is_plain, "a script may change that, too"


def test_a_slice_on_the_cpu_never_asks_cuda(monkeypatch) -> None:
    """A server may be a fork of a process that has used CUDA: asking would fail there."""

    def asked(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: initialization error")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", asked)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", asked)
    layout = layout_of([("p", torch.zeros(5), 0)])
    values = torch.zeros(5)
    optimizer = ShardOptimizer(layout, slice(0, 5), values, parse("adam:lr=0.1"))
    optimizer.apply([optimizer.cut(torch.ones(5))], 1.0)
    assert values.ne(0).all()
