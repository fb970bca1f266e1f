"""Balanced batches: how a joined batch is shared by speed, and the machine that fixes the sizes of rounds."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.control import batch_balance
from paceline.core.control.batch_balance import (
    ROUND_STEPS,
    BatchBalance,
    BatchRequested,
    SetBatch,
    StepTime,
    Wish,
    apportion,
)
from paceline.core.events import ViewChanged
from paceline.core.messages import View

BATCH = 60


@st.composite
def wishes(draw: st.DrawFn) -> list[Wish]:
    speeds = draw(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=8))
    made = []
    for speed in speeds:
        least = draw(st.integers(1, 50))
        most = draw(st.none() | st.integers(least, 400))
        made.append(Wish(speed, least, most))
    return made


class TestApportion:
    @given(st.integers(1, 2000), wishes())
    def test_limits_hold_and_the_joined_batch_is_whole_if_they_allow_it(self, joined: int, each: list[Wish]) -> None:
        sizes = apportion(joined, each)
        assert all(wish.least <= size for wish, size in zip(each, sizes, strict=True))
        assert all(wish.most is None or size <= wish.most for wish, size in zip(each, sizes, strict=True))
        least = sum(wish.least for wish in each)
        most = sum(joined if wish.most is None else wish.most for wish in each)
        assert sum(sizes) == min(max(joined, least), max(most, least))

    @given(st.integers(100, 2000), st.lists(st.floats(0.5, 2.0), min_size=2, max_size=8))
    def test_sizes_are_in_proportion_to_speeds(self, joined: int, speeds: list[float]) -> None:
        sizes = apportion(joined, [Wish(speed, 1, None) for speed in speeds])
        for speed, size in zip(speeds, sizes, strict=True):
            assert abs(size - joined * speed / sum(speeds)) < 1

    def test_by_hand(self) -> None:
        assert apportion(240, [Wish(speed, 1, None) for speed in (8, 4, 2, 1)]) == [128, 64, 32, 16]
        assert apportion(240, [Wish(speed, 1, None) for speed in (1, 1, 1, 1)]) == [60, 60, 60, 60]
        assert apportion(240, [Wish(8, 1, 100), Wish(4, 1, None), Wish(2, 1, None), Wish(1, 30, None)]) == [
            100, 73, 37, 30,
        ]  # fmt: skip


class Bench:
    """Workers in lockstep, each of which takes a fixed time and a time for each sample."""

    def __init__(self, seconds: list[Callable[[int, int], float]], seed: int = 0) -> None:
        """`seconds` maps (step, samples) to the time of a step, for each worker."""
        self.machine = BatchBalance(BATCH)
        self.machine.checks = True
        self.seconds = seconds
        self.random = random.Random(seed)
        self.views = 0
        self.view(dict.fromkeys(range(len(seconds)), 0))
        self.tickets = dict.fromkeys(range(len(seconds)), 0)
        self.reports: dict[int, list[StepTime]] = {rank: [] for rank in self.tickets}
        self.sizes: list[dict[int, int]] = []
        """What each worker took, in each step."""
        self.times: list[dict[int, float]] = []

    def view(self, members: dict[int, int]) -> None:
        self.views += 1
        self.machine.handle(ViewChanged(0.0, View(self.views, tuple(sorted(members.items())))))

    def ask(self, rank: int, incarnation: int = 0, most: int | None = None) -> SetBatch:
        self.tickets[rank] += 1
        steps = tuple(self.reports[rank])
        self.reports[rank].clear()
        asked = BatchRequested(0.0, rank, incarnation, self.tickets[rank], BATCH, 1, most, steps)
        (answer,) = self.machine.handle(asked)
        return answer

    def run(self, steps: int) -> None:
        coming: dict[int, list[int]] = {rank: [] for rank in self.tickets}
        reserve = {rank: self.ask(rank) for rank in self.tickets}
        for step in range(steps):
            ranks = list(self.tickets)
            self.random.shuffle(ranks)
            sizes, times = {}, {}
            for rank in ranks:
                if not coming[rank]:
                    coming[rank] = [reserve[rank].samples] * reserve[rank].steps
                    reserve[rank] = self.ask(rank)
                sizes[rank] = coming[rank].pop()
                times[rank] = self.seconds[rank](step, sizes[rank])
                self.reports[rank].append((sizes[rank], times[rank]))
            self.sizes.append(sizes)
            self.times.append(times)

    def efficiency(self, step: int) -> float:
        """What the workers do together in this step, of what they could if none waited."""
        times = self.times[step]
        return sum(times.values()) / len(times) / max(times.values())


def proportional(speed: float) -> Callable[[int, int], float]:
    return lambda step, samples: samples / speed


@pytest.mark.parametrize("seed", range(5))
def test_all_take_parts_of_one_joined_batch_and_end_together(seed: int) -> None:
    bench = Bench([proportional(speed) for speed in (8, 4, 2, 1)], seed)
    bench.run(20)
    assert all(sum(sizes.values()) == 4 * BATCH for sizes in bench.sizes)
    assert bench.sizes[0] == dict.fromkeys(range(4), BATCH)
    assert bench.sizes[-1] == {0: 128, 1: 64, 2: 32, 3: 16}
    assert min(bench.efficiency(step) for step in range(6, 20)) > 0.93


@pytest.mark.parametrize("seed", range(10))
def test_sizes_follow_within_fifteen_steps_when_a_worker_becomes_three_times_slower(seed: int) -> None:
    for change in range(30, 36):  # wherever in a round it is

        def turns_slow(step: int, samples: int, change: int = change) -> float:
            return samples / 4 * (3 if step >= change else 1)

        bench = Bench([proportional(8), turns_slow, proportional(2), proportional(1)], seed)
        bench.run(60)
        assert bench.efficiency(change) < 0.6
        assert min(bench.efficiency(step) for step in range(change + 15, 60)) > 0.93


def test_a_fixed_part_of_a_step_is_allowed_for_in_the_end() -> None:
    bench = Bench([lambda step, samples, speed=speed: 5 + samples / speed for speed in (8.0, 4.0, 2.0, 1.0)])
    bench.run(60)
    assert min(bench.efficiency(step) for step in range(40, 60)) > 0.97


def test_one_slow_step_changes_nothing() -> None:
    bench = Bench([lambda step, samples: samples / 4 * (6 if step == 20 else 1), *[proportional(4)] * 3])
    bench.run(40)
    assert all(sizes == dict.fromkeys(range(4), BATCH) for sizes in bench.sizes)


def test_steps_that_vary_hardly_move_the_sizes() -> None:
    draw = random.Random(1)
    bench = Bench([lambda step, samples: samples / 4 * draw.lognormvariate(0, 0.1)] * 4)
    bench.run(300)
    assert all(0.75 * BATCH < size < 1.35 * BATCH for sizes in bench.sizes for size in sizes.values())


def test_limits_of_a_worker_hold_from_its_first_answer_on() -> None:
    bench = Bench([proportional(8), proportional(1)])
    bench.ask(1)  # it fixes the round before anybody knows the limit of the other
    assert bench.ask(0, most=50).samples == 50
    bench.reports = {0: [(50, 1.0)], 1: [(60, 60.0)]}
    assert bench.ask(0, most=50).samples == 50
    bench.ask(1)
    bench.ask(0, most=50)
    assert bench.ask(1).samples == 70


def test_a_copy_gets_the_same_answer_and_an_older_ticket_none() -> None:
    bench = Bench([proportional(1), proportional(2)])
    first = bench.ask(0)
    again = BatchRequested(0.0, 0, 0, 1, BATCH, 1, None, ((60, 1.0),))
    assert bench.machine.handle(again) == [first]
    bench.ask(0)
    assert bench.machine.handle(again) == []


def test_who_is_lost_leaves_the_joined_batch_and_who_joins_counts_like_the_mean() -> None:
    bench = Bench([proportional(speed) for speed in (3, 2, 1)])
    bench.run(12)
    assert bench.sizes[-1] == {0: 90, 1: 60, 2: 30}
    bench.view({0: 0, 1: 0})
    for rank in (0, 1) * 3:
        bench.ask(rank)
    assert [bench.ask(rank).samples for rank in (0, 1)] == [72, 48]
    bench.tickets[2], bench.reports[2] = 0, []
    assert bench.ask(2, incarnation=1).samples == BATCH, "no view names it yet"
    bench.view({0: 0, 1: 0, 2: 1})
    assert bench.ask(2, incarnation=1).samples == pytest.approx(60, abs=1)
    assert bench.machine.handle(BatchRequested(0.0, 2, 0, 9, BATCH, 1, None, ()))[0].samples == BATCH, "it is gone"


def test_the_end_of_an_epoch_is_shared_like_everything_before() -> None:
    machine = BatchBalance(BATCH)
    machine.handle(ViewChanged(0.0, View(1, ((0, 0), (1, 0)))))

    def ask(rank: int, ticket: int, left: int, epoch: int = 0) -> tuple[int, int]:
        steps = ((60, 1.0 if rank else 3.0),)
        (answer,) = machine.handle(BatchRequested(0.0, rank, 0, ticket, BATCH, 1, None, steps, epoch, left))
        return answer.samples, answer.steps

    ask(0, 1, 1000)
    ask(1, 1, 1000)
    assert (ask(0, 2, 1000), ask(1, 2, 1000)) == ((30, ROUND_STEPS), (90, ROUND_STEPS))
    assert (ask(0, 3, 280), ask(1, 3, 220)) == ((30, 2), (90, 2)), "two steps are left"
    assert (ask(0, 4, 40), ask(1, 4, 30)) == ((10, 1), (30, 1)), "less than a joined batch is left"
    assert (ask(0, 5, 1000, epoch=1), ask(1, 5, 30)) == ((30, ROUND_STEPS), (22, 1)), "an epoch has rounds of its own"


@pytest.mark.parametrize(
    "field",
    [{"batch": 0}, {"least": 0}, {"most": 0}, *({"steps": steps} for steps in (((1, -1),), ((0, 1),), ((1, 1),) * 65))],
    ids=str,
)
def test_numbers_that_cannot_be_are_refused_where_they_come_in(field: dict[str, object]) -> None:
    good = BatchRequested(0.0, 0, 0, 1, BATCH, 1, None, ((32.0, 0.5),))
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(BatchRequested).decode
    assert decode(encode(good)) == good
    with pytest.raises(msgspec.ValidationError):
        decode(encode(msgspec.structs.replace(good, **field)))


def test_these_tests_bite(monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate that remembers a hundred steps does not follow in time."""
    monkeypatch.setattr(batch_balance, "WINDOW", 101)
    with pytest.raises(AssertionError):
        test_sizes_follow_within_fifteen_steps_when_a_worker_becomes_three_times_slower(0)
