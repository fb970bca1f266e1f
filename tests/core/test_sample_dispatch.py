"""The sample dispatcher by hand: stripes without faults, changes of members, returns."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from paceline.core.sample_dispatch import (
    CloseEpoch,
    GrantLease,
    LeaseRequested,
    SampleDispatcher,
    SkipEpoch,
    Stride,
)
from paceline.sample_order import SampleOrder, permutation

from .dispatch_by_hand import acknowledged, ask, dispatcher_of, footprint, granted, returned, show


class TestWithoutFaults:
    def test_a_worker_owns_every_nth_position_from_its_own_on(self) -> None:
        dispatcher = dispatcher_of(10, 3)
        assert granted(dispatcher, 0, 0) == [0, 3, 6, 9]
        assert granted(dispatcher, 1, 0) == [1, 4, 7]
        assert granted(dispatcher, 2, 0) == [2, 5, 8]
        assert ask(dispatcher, 1, 1) == SkipEpoch(1, 0, 1, 0)

    def test_a_stripe_comes_in_leases_of_any_size(self) -> None:
        dispatcher = dispatcher_of(20, 2)
        assert ask(dispatcher, 0, 0, count=3) == GrantLease(0, 0, 0, 0, (Stride(0, 6, 2),))
        assert granted(dispatcher, 1, 0, count=8) == [1, 3, 5, 7, 9, 11, 13, 15]
        assert granted(dispatcher, 0, 1, count=1) == [6]
        assert granted(dispatcher, 1, 1, count=8) == [17, 19]
        assert granted(dispatcher, 0, 2, count=100) == [8, 10, 12, 14, 16, 18]

    def test_stripes_begin_anew_with_each_epoch(self) -> None:
        dispatcher = dispatcher_of(5, 2)
        for epoch in range(3):
            assert granted(dispatcher, 0, epoch, epoch) == [0, 2, 4]
            assert granted(dispatcher, 1, epoch, epoch) == [1, 3]

    @pytest.mark.parametrize(("size", "workers", "batch", "lease"), [(24, 4, 3, 3), (24, 4, 2, 5), (60, 3, 4, 11)])
    def test_the_steps_are_those_of_the_sample_order(self, size: int, workers: int, batch: int, lease: int) -> None:
        """Step by step over three epochs, in leases that fit the batch or not."""
        dispatcher, order = dispatcher_of(size, workers), SampleOrder(size, workers, batch, seed=5)
        streams = grant_all(dispatcher, workers, epochs=3, lease=lease, seed=5)
        for step in range(3 * size // (workers * batch)):
            mine = [streams[worker][step * batch : (step + 1) * batch] for worker in range(workers)]
            assert mine == [order.of_worker(worker, step).tolist() for worker in range(workers)]
            joined = [mine[k % workers][k // workers] for k in range(workers * batch)]
            assert joined == order.joined(step).tolist()

    def test_the_last_step_of_an_epoch_is_what_is_left_of_it(self) -> None:
        """Whole steps are those of the sample order; the short one is the rest of the permutation, granted in turn."""
        dispatcher, order = dispatcher_of(26, 4), SampleOrder(26, 4, batch=3, seed=0)
        streams = grant_all(dispatcher, 4, epochs=1, lease=4, seed=0)
        for step in range(2):
            assert [mine[step * 3 : (step + 1) * 3] for mine in streams] == [
                order.of_worker(worker, step).tolist() for worker in range(4)
            ]
        assert [mine[6:] for mine in streams] == [[p] for p in permutation(26, 0, 0)[24:]] + [[], []]

    def test_an_epoch_is_closed_by_its_last_acknowledgement(self) -> None:
        dispatcher = dispatcher_of(5, 2)
        granted(dispatcher, 0, 0)
        granted(dispatcher, 1, 0)
        assert acknowledged(dispatcher, 0, 0, 0, 2) == []
        assert acknowledged(dispatcher, 1, 0, 0, 2) == []
        assert acknowledged(dispatcher, 0, 0, 2, 3) == [CloseEpoch(0)]
        assert dispatcher.epochs == {}
        assert ask(dispatcher, 0, 1) == SkipEpoch(0, 0, 1, 0), "a closed epoch has nothing left"

    def test_what_is_kept_does_not_grow_with_the_size(self) -> None:
        """A trillion positions, leases of any size, workers up to an epoch apart."""
        workers, chance = 8, random.Random(1)
        dispatcher = dispatcher_of(10**12, workers)
        tickets, epochs, largest = [0] * workers, [0] * workers, 0
        for _ in range(3000):
            worker = chance.randrange(workers)
            answer = ask(dispatcher, worker, tickets[worker], epochs[worker], count=chance.randrange(1, 10**11))
            if isinstance(answer, GrantLease):
                assert len(answer.strides) == 1
                held = len(range(*answer.strides[0]))
                acknowledged(dispatcher, worker, answer.ticket, 0, held // 2)
                largest = max(largest, footprint(dispatcher))
                acknowledged(dispatcher, worker, answer.ticket, held // 2, held)
            elif epochs[worker] == min(epochs):
                epochs[worker] += 1
            tickets[worker] += 1
        assert min(epochs) > 20
        assert largest <= workers + 2 * (workers + 1) + 2


def grant_all(dispatcher: SampleDispatcher, workers: int, epochs: int, lease: int, seed: int) -> list[list[int]]:
    """The samples each worker gets, lease by lease, epoch by epoch."""
    samples: list[list[int]] = [[] for _ in range(workers)]
    tickets: Counter[int] = Counter()
    for epoch in range(epochs):
        shuffled = permutation(dispatcher.size, seed, epoch)
        for worker in range(workers):
            while leases := granted(dispatcher, worker, tickets[worker], epoch, lease):
                samples[worker] += shuffled[leases].tolist()
                tickets[worker] += 1
            tickets[worker] += 1
    return samples


class TestWhenMembersChange:
    def test_the_rest_of_a_lost_worker_is_granted_to_those_who_stay(self) -> None:
        dispatcher = dispatcher_of(12, 3)
        assert granted(dispatcher, 0, 0, count=2) == [0, 3]
        assert granted(dispatcher, 1, 0, count=2) == [1, 4]
        assert granted(dispatcher, 2, 0, count=3) == [2, 5, 8]
        acknowledged(dispatcher, 1, 0, 0, 1)
        acknowledged(dispatcher, 2, 0, 0, 1)
        assert show(dispatcher, 2, (0, 0), (2, 0)) == [], "nobody needs to be told"
        assert granted(dispatcher, 0, 1) == [9, 11], "beyond the furthest all stripes are whole"
        assert granted(dispatcher, 0, 2, count=2) == [4, 7], "then what the lost held, and what the slower left"
        assert granted(dispatcher, 2, 1) == [10]
        assert granted(dispatcher, 2, 2) == [6]

    def test_where_all_are_level_the_new_stripes_are_one_stride(self) -> None:
        dispatcher = dispatcher_of(30, 3)
        for worker in range(3):
            granted(dispatcher, worker, 0, count=4)
            acknowledged(dispatcher, worker, 0, 0, 4)
        show(dispatcher, 2, (0, 0), (1, 0))
        assert ask(dispatcher, 0, 1) == GrantLease(0, 0, 1, 0, (Stride(12, 30, 2),))
        assert ask(dispatcher, 1, 1) == GrantLease(1, 0, 1, 0, (Stride(13, 31, 2),))

    def test_who_joins_gets_a_stripe_of_the_rest(self) -> None:
        dispatcher = dispatcher_of(24, 2)
        granted(dispatcher, 0, 0, count=3)
        granted(dispatcher, 1, 0, count=3)
        show(dispatcher, 2, (0, 0), (1, 0), (2, 0))
        assert granted(dispatcher, 2, 0) == [8, 11, 14, 17, 20, 23]
        assert granted(dispatcher, 0, 1) == [6, 9, 12, 15, 18, 21]

    def test_who_joins_when_all_is_leased_skips(self) -> None:
        dispatcher = dispatcher_of(8, 2)
        granted(dispatcher, 0, 0)
        granted(dispatcher, 1, 0)
        show(dispatcher, 2, (0, 0), (1, 0), (2, 0))
        assert ask(dispatcher, 2, 0) == SkipEpoch(2, 0, 0, 0)
        assert granted(dispatcher, 2, 1, epoch=1) == [2, 5]

    def test_who_leaves_at_the_end_of_its_stripe_leaves_nothing(self) -> None:
        dispatcher = dispatcher_of(8, 2)
        granted(dispatcher, 0, 0)
        acknowledged(dispatcher, 0, 0, 0, 4)
        show(dispatcher, 2, (1, 0))
        assert granted(dispatcher, 1, 0) == [1, 3, 5, 7]
        assert acknowledged(dispatcher, 1, 0, 0, 4) == [CloseEpoch(0)]

    def test_stripes_that_their_owners_have_not_begun_are_cut_anew_too(self) -> None:
        """Worker 1 is lost in epoch 0; worker 0 is in epoch 1 already, and gets the rest of both, oldest first."""
        dispatcher = dispatcher_of(6, 2)
        granted(dispatcher, 0, 0)
        assert granted(dispatcher, 0, 1, epoch=1, count=1) == [0]
        show(dispatcher, 2, (0, 0))
        assert granted(dispatcher, 0, 2, epoch=1) == [1, 3, 5]
        assert granted(dispatcher, 0, 3, epoch=1) == [2, 3, 4, 5]
        assert granted(dispatcher, 0, 4, epoch=1) == [1]

    def test_positions_outlive_everybody(self) -> None:
        dispatcher = dispatcher_of(5, 2)
        granted(dispatcher, 0, 0)
        acknowledged(dispatcher, 0, 0, 1, 2)
        show(dispatcher, 2)
        show(dispatcher, 3, (4, 1))
        assert sorted(granted(dispatcher, 4, 0, incarnation=1)) == [0, 1, 3, 4]
        assert acknowledged(dispatcher, 4, 0, 0, 4, incarnation=1) == [CloseEpoch(0)]

    def test_a_view_with_the_same_members_moves_nothing(self) -> None:
        dispatcher, same = dispatcher_of(9, 3), dispatcher_of(9, 3)
        granted(dispatcher, 1, 0, count=2)
        granted(same, 1, 0, count=2)
        show(dispatcher, 7, (0, 0), (1, 0), (2, 0))
        assert granted(dispatcher, 0, 0) == granted(same, 0, 0) == [0, 3, 6]

    def test_an_older_view_is_ignored(self) -> None:
        dispatcher = dispatcher_of(9, 3)
        show(dispatcher, 5, (0, 0), (1, 0))
        show(dispatcher, 4, (2, 0))
        assert dispatcher.handle(LeaseRequested(0.0, 2, 0, 0, 0, 1)) == []
        assert granted(dispatcher, 1, 0) == [1, 3, 5, 7]

    def test_ranges_stay_few_over_many_changes(self) -> None:
        """One worker is replaced a hundred times; the others advance at different speeds, one not at all."""
        dispatcher, chance = dispatcher_of(10**7, 8), random.Random(3)
        tickets: Counter[int] = Counter()
        for incarnation in range(1, 101):
            for _ in range(40):
                worker = 1 + min(chance.randrange(6), chance.randrange(6))
                answer = ask(dispatcher, worker, tickets[worker], count=256)
                assert isinstance(answer, GrantLease)
                tickets[worker] += 1
                acknowledged(dispatcher, worker, answer.ticket, 0, len(list(answer.positions())))
            ask(dispatcher, 0, 0, count=256, incarnation=incarnation - 1)
            show(dispatcher, incarnation + 1, (0, incarnation), *((rank, 0) for rank in range(1, 8)))
        assert footprint(dispatcher) < 8 * 100, "at most a range for each worker at each change"


class TestReturns:
    def test_what_was_returned_goes_to_the_first_whose_stripe_ends(self) -> None:
        dispatcher = dispatcher_of(8, 2)
        granted(dispatcher, 0, 0)
        assert granted(dispatcher, 1, 0, count=2) == [1, 3]
        returned(dispatcher, 0, 0, 1, 3)
        assert granted(dispatcher, 1, 1, count=2) == [5, 7], "its own stripe first"
        assert granted(dispatcher, 1, 2) == [2, 4]
        assert ask(dispatcher, 0, 1) == SkipEpoch(0, 0, 1, 0)

    def test_it_may_come_back_to_who_returned_it(self) -> None:
        dispatcher = dispatcher_of(4, 1)
        granted(dispatcher, 0, 0)
        returned(dispatcher, 0, 0, 0, 4)
        assert granted(dispatcher, 0, 1, count=3) == [0, 1, 2]
        assert granted(dispatcher, 0, 2, count=3) == [3]

    def test_who_is_in_a_later_epoch_gets_it_too(self) -> None:
        dispatcher = dispatcher_of(4, 2)
        granted(dispatcher, 0, 0)
        granted(dispatcher, 1, 0)
        assert granted(dispatcher, 1, 1, epoch=1, count=1) == [1]
        returned(dispatcher, 0, 0, 1, 2)
        assert ask(dispatcher, 1, 2, epoch=1) == GrantLease(1, 0, 2, 0, (Stride(2, 4, 2),))

    def test_batches_returned_one_after_the_other_are_one_range(self) -> None:
        """A straggler under Backup, whose every gradient is late."""
        dispatcher = dispatcher_of(4000, 4)
        for ticket in range(100):
            granted(dispatcher, 3, ticket, count=10)
            returned(dispatcher, 3, ticket, 0, 10)
        assert footprint(dispatcher) == 4 + 4 + 1 + 1

    def test_what_was_acknowledged_cannot_be_returned_nor_the_reverse(self) -> None:
        dispatcher = dispatcher_of(6, 1)
        granted(dispatcher, 0, 0)
        acknowledged(dispatcher, 0, 0, 0, 3)
        returned(dispatcher, 0, 0, 2, 5)
        acknowledged(dispatcher, 0, 0, 2, 5)
        assert granted(dispatcher, 0, 1) == [3, 4]
