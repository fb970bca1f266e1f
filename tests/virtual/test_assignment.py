"""Which server holds what when their number changes: everything once, balanced, and nothing moves that need not."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.tensors import state
from paceline.tensors.assignment import Assignment, initial, locate, moved, overlap, reassign, size
from paceline.tensors.layout import Entry, Layout
from paceline.tensors.optimizers import parse
from paceline.tensors.shard_optimizer import ShardOptimizer

LINE = 16
"""Elements of a cache line in float32."""


def layout_of(*numels: int, borders: str = "anywhere", slicing: str = "eps") -> Layout:
    return Layout(tuple(Entry(f"t{i}", (n,), 0) for i, n in enumerate(numels)), "float32", borders, slicing)


def owners(assignment: Assignment, numel: int) -> list[int]:
    """Element by element; fails if one has two or none."""
    owner = [-1] * numel
    for shard, part in enumerate(assignment):
        for start, stop in part:
            for element in range(start, stop):
                assert owner[element] == -1
                owner[element] = shard
    assert -1 not in owner
    return owner


def least_movement(loads: list[int], lines: int, servers: int) -> int:
    """In lines, by trying every way to say who has one more than the others: nothing of the code under test."""
    low, more = divmod(lines, servers)
    staying = min(len(loads), servers)
    best = lines
    for larger in combinations(range(servers), more):
        kept = sum(min(loads[shard], low + (shard in larger)) for shard in range(staying))
        best = min(best, lines - kept)
    return best


@given(st.integers(1, 700), st.integers(1, 6), st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_everything_is_held_once_balanced_and_the_least_moves(numel: int, first: int, then: list[int]) -> None:
    layout = layout_of(numel)
    lines = -(-numel // LINE)
    before = initial(layout, first)
    for servers in then:
        after = reassign(layout, before, servers)
        was, now = owners(before, numel), owners(after, numel)
        assert moved(before, after) == sum(a != b for a, b in zip(was, now, strict=True))
        loads = [sum(-(-(stop - start) // LINE) for start, stop in part) for part in after]
        assert len(after) == servers
        assert max(loads) - min(loads) <= 1
        old = [sum(-(-(stop - start) // LINE) for start, stop in part) for part in before]
        moved_lines = len({at // LINE for at, (a, b) in enumerate(zip(was, now, strict=True)) if a != b})
        assert moved_lines == least_movement(old, lines, servers)
        before = after


def test_in_large() -> None:
    """2 -> 3 moves a third, 3 -> 2 what the third had, 1 -> 4 three quarters, and back where it was."""
    layout = layout_of(1_000_000)
    two = initial(layout, 2)
    three = reassign(layout, two, 3)
    assert moved(two, three) / 1e6 == pytest.approx(1 / 3, abs=1e-4)
    again = reassign(layout, three, 2)
    assert moved(three, again) == size(three[2])
    one = initial(layout, 1)
    four = reassign(layout, one, 4)
    assert moved(one, four) / 1e6 == pytest.approx(3 / 4, abs=1e-4)
    assert [len(part) for part in four] == [1, 1, 1, 1]
    assert reassign(layout, four, 1) == one
    assert reassign(layout, four, 4) == four


@given(st.lists(st.integers(1, 40), min_size=4, max_size=12), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_whole_tensors_move_and_nobody_is_left_without(numels: list[int], then: list[int]) -> None:
    layout = layout_of(*numels, borders="tensors")
    before = initial(layout, 2)
    for servers in then:
        after = reassign(layout, before, servers)
        now = owners(after, layout.numel)
        assert all(after)
        start = 0
        for numel in numels:
            assert len(set(now[start : start + numel])) == 1
            start += numel
        staying = min(len(before), servers)
        for shard in range(staying):  # who stays only gets what removed ones had, or only gives to new ones
            gave, got = (
                size(before[shard]) - size(overlap(before[shard], after[shard])),
                size(after[shard]) - size(overlap(before[shard], after[shard])),
            )
            assert not (gave and got)
            assert not (gave and servers <= len(before))
            assert not (got and servers >= len(before))
        if servers > len(before):
            assert max(map(size, after)) <= max(map(size, before))
        before = after


def test_a_large_tensor_stays_where_it_is() -> None:
    layout = layout_of(4096, 64, 640, 10, borders="tensors")
    before = initial(layout, 1)
    assert moved(before, reassign(layout, before, 4)) == 714


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="servers=0 is out of range: 1 to 64"):
        reassign(layout_of(100), initial(layout_of(100), 2), 0)
    with pytest.raises(ConfigError, match="servers=65 is out of range: 1 to 64"):
        reassign(layout_of(100), initial(layout_of(100), 2), 65)
    whole = layout_of(5, 6, borders="tensors")
    with pytest.raises(ConfigError, match="servers=3 is out of range: 1 to 2, since slices end on the borders"):
        reassign(whole, initial(whole, 2), 3)
    keys = layout_of(5, 6, slicing="key-range")
    with pytest.raises(ConfigError, match="the number of servers cannot change with slicing=key-range"):
        reassign(keys, initial(keys, 2), 1)


def test_where_ranges_lie() -> None:
    assert overlap(((0, 10), (20, 30)), ((5, 25),)) == ((5, 10), (20, 25))
    assert locate(((5, 10), (20, 25)), ((0, 10), (20, 30))) == [slice(5, 10), slice(10, 15)]


@pytest.mark.parametrize(
    "text", ["sgd:lr=0.1,momentum=0.9,ema=0.9", "adam:lr=0.01,schedule=cosine(samples=500),batch=8"]
)
@pytest.mark.parametrize("servers", [1, 3, 4])
def test_an_optimizer_goes_on_as_if_nothing_had_moved(text: str, servers: int) -> None:
    layout, spec = layout_of(70, 5, 300, 40), parse(text)
    start = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    gradients = torch.randn(8, layout.numel, generator=torch.Generator().manual_seed(1))

    def make(part, values):
        return ShardOptimizer(layout, part, values, spec)

    def apply(optimizer, gradient):
        optimizer.apply([optimizer.cut_from(gradient)], 1.0)

    alone = make(((0, layout.numel),), start.clone())
    before = initial(layout, 2)
    held = [make(part, torch.cat([start[a:b] for a, b in part])) for part in before]
    for gradient in gradients[:4]:
        for optimizer in (alone, *held):
            apply(optimizer, gradient)
    after = reassign(layout, before, servers)
    parts = [
        (part, {"values": each.values, **state.by_tensor(each.state(), layout, part)})
        for part, each in zip(before, held, strict=True)
    ]
    held = []
    for part in after:
        gathered = state.gather(parts, layout, part)
        held.append(make(part, gathered.pop("values")))
        held[-1].load_state(state.by_piece(gathered, layout, part))
    for gradient in gradients[4:]:
        for optimizer in (alone, *held):
            apply(optimizer, gradient)
    for part, optimizer in zip(after, held, strict=True):
        torch.testing.assert_close(optimizer.values, torch.cat([alone.values[a:b] for a, b in part]), atol=0, rtol=0)
        if alone.average is not None:
            torch.testing.assert_close(optimizer.average, torch.cat([alone.average[a:b] for a, b in part]))
