"""The sample dispatcher by hand: copies, ghosts, the lead, and what it refuses."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from paceline.core.machine import IllegalEvent, InvariantViolated
from paceline.core.sample_dispatch import (
    CloseEpoch,
    DispatchAction,
    DispatchEvent,
    Epoch,
    GrantLease,
    Lease,
    LeaseAcknowledged,
    LeaseHolder,
    LeaseRequested,
    LeaseReturned,
    SampleDispatcher,
    SkipEpoch,
    Stride,
)
from paceline.errors import ConfigError

from .dispatch_by_hand import acknowledged, ask, dispatcher_of, granted, show


class TestCopiesAndGhosts:
    def test_the_same_ticket_gets_the_same_answer(self) -> None:
        dispatcher = dispatcher_of(8, 2)
        first = ask(dispatcher, 0, 5, count=2)
        assert ask(dispatcher, 0, 5, count=2) == first
        assert granted(dispatcher, 0, 6) == [4, 6]
        assert dispatcher.handle(LeaseRequested(0.0, 0, 0, 5, 0, 2)) == [], "an older one gets none"
        passed = ask(dispatcher, 0, 7)
        assert isinstance(passed, SkipEpoch)
        assert ask(dispatcher, 0, 7) == passed

    def test_settling_twice_is_settling_once(self) -> None:
        dispatcher = dispatcher_of(4, 1)
        granted(dispatcher, 0, 0)
        acknowledged(dispatcher, 0, 0, 0, 2)
        acknowledged(dispatcher, 0, 0, 0, 2)
        acknowledged(dispatcher, 0, 0, 1, 3)
        assert dispatcher.epochs[0].consumed == 3
        assert acknowledged(dispatcher, 0, 0, 0, 4) == [CloseEpoch(0)]
        assert acknowledged(dispatcher, 0, 0, 0, 4) == []

    def test_a_life_that_is_over_settles_nothing_and_gets_nothing(self) -> None:
        dispatcher = dispatcher_of(4, 1)
        granted(dispatcher, 0, 0)
        show(dispatcher, 2, (0, 1))
        acknowledged(dispatcher, 0, 0, 0, 4, incarnation=0)
        assert dispatcher.handle(LeaseRequested(0.0, 0, 0, 1, 0, 4)) == []
        assert granted(dispatcher, 0, 0, incarnation=1) == [0, 1, 2, 3]
        acknowledged(dispatcher, 0, 0, 0, 4, incarnation=0)
        assert 0 in dispatcher.epochs

    def test_who_asks_before_it_is_named_is_answered_when_it_is(self) -> None:
        dispatcher = dispatcher_of(6, 1)
        assert dispatcher.handle(LeaseRequested(0.0, 0, 1, 0, 0, 2)) == []
        assert dispatcher.handle(LeaseRequested(0.0, 3, 0, 0, 0, 2)) == []
        assert show(dispatcher, 2, (0, 1), (3, 0)) == [
            GrantLease(0, 1, 0, 0, (Stride(0, 4, 2),)),
            GrantLease(3, 0, 0, 0, (Stride(1, 5, 2),)),
        ]
        assert dispatcher.early == {}

    def test_a_ghost_does_not_displace_who_is_to_be_named(self) -> None:
        dispatcher = dispatcher_of(6, 0)
        dispatcher.handle(LeaseRequested(0.0, 0, 2, 0, 0, 2))
        dispatcher.handle(LeaseRequested(0.0, 0, 1, 9, 0, 2))
        assert show(dispatcher, 2, (0, 2)) == [GrantLease(0, 2, 0, 0, (Stride(0, 2, 1),))]


class TestLead:
    def test_the_fast_are_one_epoch_ahead_and_then_help(self) -> None:
        dispatcher = dispatcher_of(6, 2)
        assert granted(dispatcher, 1, 0, count=1) == [1]
        assert granted(dispatcher, 0, 0) == [0, 2, 4]
        assert ask(dispatcher, 0, 1, epoch=0) == SkipEpoch(0, 0, 1, 0), "the slow worker's stripe is its own"
        assert granted(dispatcher, 0, 2, epoch=1) == [0, 2, 4]
        assert ask(dispatcher, 0, 3, epoch=2, count=1) == GrantLease(0, 0, 3, 0, (Stride(3, 5, 2),)), "not any more"
        assert ask(dispatcher, 1, 1, epoch=0) == GrantLease(1, 0, 1, 0, (Stride(5, 7, 2),)), "first come, first served"
        assert ask(dispatcher, 0, 4, epoch=2, count=9) == GrantLease(0, 0, 4, 2, (Stride(0, 6, 2),))
        assert granted(dispatcher, 1, 2, epoch=1) == [1, 3, 5], "the stripes of epoch 1 are as they were"

    def test_nobody_waits_for_what_is_in_a_lease(self) -> None:
        dispatcher = dispatcher_of(4, 2)
        granted(dispatcher, 1, 0)
        for epoch in range(10):
            ticket = 10 * epoch
            while isinstance(answer := ask(dispatcher, 0, ticket, epoch), GrantLease):
                ticket += 1
                acknowledged(dispatcher, 0, answer.ticket, 0, len(list(answer.positions())))
        assert list(dispatcher.epochs) == [0, 8, 9], "the slow lease's, and within the lead"

    def test_slow_workers_get_less_and_every_epoch_is_finished(self) -> None:
        """One worker six times slower than three others: its share falls to a nineteenth."""
        dispatcher, share = dispatcher_of(400, 4), Counter[int]()
        tickets, epochs, closed = Counter[int](), Counter[int](), 0
        for tick in range(6 * 1000):
            for worker in range(4):
                if worker == 3 and tick % 6:
                    continue
                answer = ask(dispatcher, worker, tickets[worker], epochs[worker], count=5)
                tickets[worker] += 1
                if isinstance(answer, SkipEpoch):
                    epochs[worker] += 1
                    continue
                got = len(list(answer.positions()))
                share[worker] += got
                closed += len(acknowledged(dispatcher, worker, answer.ticket, 0, got))
        assert 0.8 / 19 < share[3] / share.total() < 1.2 / 19
        assert closed >= share.total() / 400 - 3


class TestRefusals:
    @pytest.mark.parametrize(
        "event",
        [
            LeaseRequested(0.0, 0, 0, 1, 2, 4),
            LeaseRequested(0.0, 0, 0, 1, -1, 4),
            LeaseRequested(0.0, 0, 0, 1, 0, 0),
            LeaseRequested(0.0, 9, 9, 1, 0, -3),
            LeaseAcknowledged(0.0, 0, 0, 0, -1, 1),
            LeaseAcknowledged(0.0, 0, 0, 0, 2, 1),
            LeaseReturned(0.0, 0, 0, 0, 0, 5),
        ],
    )
    def test_an_illegal_event_changes_nothing(self, event: DispatchEvent) -> None:
        dispatcher, twin = dispatcher_of(8, 2), dispatcher_of(8, 2)
        for each in (dispatcher, twin):
            assert granted(each, 0, 0) == [0, 2, 4, 6]
        with pytest.raises(IllegalEvent, match=r"worker \d (asked|settled)"):
            dispatcher.handle(event)
        assert picture(dispatcher) == picture(twin)

    @pytest.mark.parametrize(("size", "lead", "first"), [(0, 1, 0), (5, -1, 0), (5, 1, -1)])
    def test_an_impossible_dispatcher_is_refused(self, size: int, lead: int, first: int) -> None:
        with pytest.raises(ConfigError, match=f"got {size}, {lead} and {first}"):
            SampleDispatcher(size, lead, first)

    def test_a_dispatcher_may_begin_with_a_later_epoch(self) -> None:
        dispatcher = SampleDispatcher(4, first=7)
        show(dispatcher, 1, (0, 0))
        assert ask(dispatcher, 0, 0, epoch=3) == SkipEpoch(0, 0, 0, 3)
        assert ask(dispatcher, 0, 1, epoch=7) == GrantLease(0, 0, 1, 7, (Stride(0, 4, 1),))

    def test_check_sees_a_lost_position(self) -> None:
        dispatcher = dispatcher_of(8, 2)
        granted(dispatcher, 0, 0, count=2)
        dispatcher.epochs[0].offsets[1] += 1
        with pytest.raises(InvariantViolated, match="epoch 0 of 8: 5 unassigned, 2 in leases, 0 consumed"):
            dispatcher.check()


def picture(dispatcher: SampleDispatcher) -> object:
    """The whole state, comparable."""

    def of(thing: object) -> object:
        if isinstance(thing, Epoch | Lease | LeaseHolder):
            return {name: of(value) for name, value in vars(thing).items()}
        return {key: of(value) for key, value in thing.items()} if isinstance(thing, dict) else thing

    return {name: of(value) for name, value in vars(dispatcher).items() if name != "actions"}


def test_events_and_actions_travel() -> None:
    things: list[DispatchEvent | DispatchAction] = [
        LeaseRequested(0.5, 1, 0, 3, 2, 640),
        LeaseAcknowledged(0.5, 1, 0, 3, 0, 32),
        LeaseReturned(0.5, 1, 0, 3, 32, 64),
        GrantLease(1, 0, 3, 2, (Stride(1, 9, 4), Stride(20, 30, 1))),
        SkipEpoch(1, 0, 3, 2),
        CloseEpoch(2),
    ]
    decode = msgspec.msgpack.Decoder(list[DispatchEvent | DispatchAction]).decode
    assert decode(msgspec.msgpack.encode(things)) == things
    assert len(msgspec.msgpack.encode(things[3])) < 32
