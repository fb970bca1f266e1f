"""The deck by hand, and under a judge that keeps a list of where every position is.

The judge (`Table`) is the specification: a position is in the deck, in one hand, or played. It knows nothing of lanes
and strips, watches every action, and plays on at the end until everything must have been played.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.deck import (
    CloseEpoch,
    Deal,
    Deck,
    DeckAction,
    DeckEvent,
    Epoch,
    Hand,
    HandAcknowledged,
    HandRequested,
    HandReturned,
    Pass,
    Player,
    Strip,
    cut,
    tidy,
)
from paceline.core.events import ViewChanged
from paceline.core.machine import IllegalEvent, InvariantViolated
from paceline.core.messages import View
from paceline.dealing import Dealer, permutation
from paceline.errors import ConfigError

ALL = 1 << 40
Life = tuple[int, int]


def deck_of(size: int, workers: int, lead: int = 1) -> Deck:
    deck = Deck(size, lead)
    deck.checks = True
    show(deck, 1, *((rank, 0) for rank in range(workers)))
    return deck


def show(deck: Deck, number: int, *members: Life) -> list[DeckAction]:
    return deck.handle(ViewChanged(0.0, View(number, members)))


def ask(deck: Deck, worker: int, ticket: int, epoch: int = 0, count: int = ALL, life: int = 0) -> Deal | Pass:
    (answer,) = deck.handle(HandRequested(0.0, worker, life, ticket, epoch, count))
    assert isinstance(answer, Deal | Pass)
    assert (answer.worker, answer.incarnation, answer.ticket) == (worker, life, ticket)
    return answer


def dealt(deck: Deck, worker: int, ticket: int, epoch: int = 0, count: int = ALL, life: int = 0) -> list[int]:
    answer = ask(deck, worker, ticket, epoch, count, life)
    return list(answer.positions()) if isinstance(answer, Deal) else []


def played(deck: Deck, worker: int, ticket: int, start: int, stop: int, life: int = 0) -> list[DeckAction]:
    return deck.handle(HandAcknowledged(0.0, worker, life, ticket, start, stop))


def returned(deck: Deck, worker: int, ticket: int, start: int, stop: int, life: int = 0) -> list[DeckAction]:
    return deck.handle(HandReturned(0.0, worker, life, ticket, start, stop))


def footprint(deck: Deck) -> int:
    """How many numbers, strips and parts the deck keeps."""
    total = len(deck.players) + len(deck.early)
    for epoch in deck.epochs.values():
        total += 1 + len(epoch.marks) + len(epoch.loose)
    for player in deck.players.values():
        total += sum(len(hand.strips) + len(hand.unsettled) for hand in player.hands.values())
    return total


class TestWithoutFaults:
    def test_a_worker_owns_every_nth_position_from_its_own_on(self) -> None:
        deck = deck_of(10, 3)
        assert dealt(deck, 0, 0) == [0, 3, 6, 9]
        assert dealt(deck, 1, 0) == [1, 4, 7]
        assert dealt(deck, 2, 0) == [2, 5, 8]
        assert ask(deck, 1, 1) == Pass(1, 0, 1, 0)

    def test_a_lane_comes_in_hands_of_any_size(self) -> None:
        deck = deck_of(20, 2)
        assert ask(deck, 0, 0, count=3) == Deal(0, 0, 0, 0, (Strip(0, 6, 2),))
        assert dealt(deck, 1, 0, count=8) == [1, 3, 5, 7, 9, 11, 13, 15]
        assert dealt(deck, 0, 1, count=1) == [6]
        assert dealt(deck, 1, 1, count=8) == [17, 19]
        assert dealt(deck, 0, 2, count=100) == [8, 10, 12, 14, 16, 18]

    def test_lanes_begin_anew_with_each_epoch(self) -> None:
        deck = deck_of(5, 2)
        for epoch in range(3):
            assert dealt(deck, 0, epoch, epoch) == [0, 2, 4]
            assert dealt(deck, 1, epoch, epoch) == [1, 3]

    @pytest.mark.parametrize(("size", "workers", "batch", "hand"), [(24, 4, 3, 3), (24, 4, 2, 5), (60, 3, 4, 11)])
    def test_the_steps_are_those_of_the_dealer(self, size: int, workers: int, batch: int, hand: int) -> None:
        """Step by step over three epochs, in hands that fit the batch or not."""
        deck, dealer = deck_of(size, workers), Dealer(size, workers, batch, seed=5)
        streams = deal_all(deck, workers, epochs=3, hand=hand, seed=5)
        for step in range(3 * size // (workers * batch)):
            mine = [streams[worker][step * batch : (step + 1) * batch] for worker in range(workers)]
            assert mine == [dealer.deal(worker, step).tolist() for worker in range(workers)]
            joined = [mine[k % workers][k // workers] for k in range(workers * batch)]
            assert joined == dealer.joined(step).tolist()

    def test_the_last_step_of_an_epoch_is_what_is_left_of_it(self) -> None:
        """Whole steps are the dealer's; the short one is the rest of the permutation, dealt in turn."""
        deck, dealer = deck_of(26, 4), Dealer(26, 4, batch=3, seed=0)
        streams = deal_all(deck, 4, epochs=1, hand=4, seed=0)
        for step in range(2):
            assert [mine[step * 3 : (step + 1) * 3] for mine in streams] == [
                dealer.deal(worker, step).tolist() for worker in range(4)
            ]
        assert [mine[6:] for mine in streams] == [[p] for p in permutation(26, 0, 0)[24:]] + [[], []]

    def test_an_epoch_is_closed_by_its_last_acknowledgement(self) -> None:
        deck = deck_of(5, 2)
        dealt(deck, 0, 0)
        dealt(deck, 1, 0)
        assert played(deck, 0, 0, 0, 2) == []
        assert played(deck, 1, 0, 0, 2) == []
        assert played(deck, 0, 0, 2, 3) == [CloseEpoch(0)]
        assert deck.epochs == {}
        assert ask(deck, 0, 1) == Pass(0, 0, 1, 0), "a closed epoch has nothing left"

    def test_what_is_kept_does_not_grow_with_the_size(self) -> None:
        """A trillion positions, hands of any size, workers up to an epoch apart."""
        workers, chance = 8, random.Random(1)
        deck = deck_of(10**12, workers)
        tickets, epochs, largest = [0] * workers, [0] * workers, 0
        for _ in range(3000):
            worker = chance.randrange(workers)
            answer = ask(deck, worker, tickets[worker], epochs[worker], count=chance.randrange(1, 10**11))
            if isinstance(answer, Deal):
                assert len(answer.strips) == 1
                held = len(range(*answer.strips[0]))
                played(deck, worker, answer.ticket, 0, held // 2)
                largest = max(largest, footprint(deck))
                played(deck, worker, answer.ticket, held // 2, held)
            elif epochs[worker] == min(epochs):
                epochs[worker] += 1
            tickets[worker] += 1
        assert min(epochs) > 20
        assert largest <= workers + 2 * (workers + 1) + 2


def deal_all(deck: Deck, workers: int, epochs: int, hand: int, seed: int) -> list[list[int]]:
    """The samples each worker gets, hand by hand, epoch by epoch."""
    samples: list[list[int]] = [[] for _ in range(workers)]
    tickets: Counter[int] = Counter()
    for epoch in range(epochs):
        shuffled = permutation(deck.size, seed, epoch)
        for worker in range(workers):
            while hands := dealt(deck, worker, tickets[worker], epoch, hand):
                samples[worker] += shuffled[hands].tolist()
                tickets[worker] += 1
            tickets[worker] += 1
    return samples


class TestWhenMembersChange:
    def test_the_rest_of_a_lost_worker_is_dealt_to_those_who_stay(self) -> None:
        deck = deck_of(12, 3)
        assert dealt(deck, 0, 0, count=2) == [0, 3]
        assert dealt(deck, 1, 0, count=2) == [1, 4]
        assert dealt(deck, 2, 0, count=3) == [2, 5, 8]
        played(deck, 1, 0, 0, 1)
        played(deck, 2, 0, 0, 1)
        assert show(deck, 2, (0, 0), (2, 0)) == [], "nobody needs to be told"
        assert dealt(deck, 0, 1) == [9, 11], "beyond the furthest all lanes are whole"
        assert dealt(deck, 0, 2, count=2) == [4, 7], "then what the lost held, and what the slower left"
        assert dealt(deck, 2, 1) == [10]
        assert dealt(deck, 2, 2) == [6]

    def test_where_all_are_level_the_new_lanes_are_strides_of_one_strip(self) -> None:
        deck = deck_of(30, 3)
        for worker in range(3):
            dealt(deck, worker, 0, count=4)
            played(deck, worker, 0, 0, 4)
        show(deck, 2, (0, 0), (1, 0))
        assert ask(deck, 0, 1) == Deal(0, 0, 1, 0, (Strip(12, 30, 2),))
        assert ask(deck, 1, 1) == Deal(1, 0, 1, 0, (Strip(13, 31, 2),))

    def test_who_joins_gets_a_lane_of_the_rest(self) -> None:
        deck = deck_of(24, 2)
        dealt(deck, 0, 0, count=3)
        dealt(deck, 1, 0, count=3)
        show(deck, 2, (0, 0), (1, 0), (2, 0))
        assert dealt(deck, 2, 0) == [8, 11, 14, 17, 20, 23]
        assert dealt(deck, 0, 1) == [6, 9, 12, 15, 18, 21]

    def test_who_joins_when_all_is_in_hands_passes(self) -> None:
        deck = deck_of(8, 2)
        dealt(deck, 0, 0)
        dealt(deck, 1, 0)
        show(deck, 2, (0, 0), (1, 0), (2, 0))
        assert ask(deck, 2, 0) == Pass(2, 0, 0, 0)
        assert dealt(deck, 2, 1, epoch=1) == [2, 5]

    def test_who_leaves_at_the_end_of_its_lane_leaves_nothing(self) -> None:
        deck = deck_of(8, 2)
        dealt(deck, 0, 0)
        played(deck, 0, 0, 0, 4)
        show(deck, 2, (1, 0))
        assert dealt(deck, 1, 0) == [1, 3, 5, 7]
        assert played(deck, 1, 0, 0, 4) == [CloseEpoch(0)]

    def test_lanes_that_their_owners_have_not_begun_are_cut_anew_too(self) -> None:
        """Worker 1 is lost in epoch 0; worker 0 is in epoch 1 already, and gets the rest of both, oldest first."""
        deck = deck_of(6, 2)
        dealt(deck, 0, 0)
        assert dealt(deck, 0, 1, epoch=1, count=1) == [0]
        show(deck, 2, (0, 0))
        assert dealt(deck, 0, 2, epoch=1) == [1, 3, 5]
        assert dealt(deck, 0, 3, epoch=1) == [2, 3, 4, 5]
        assert dealt(deck, 0, 4, epoch=1) == [1]

    def test_the_cards_outlive_everybody(self) -> None:
        deck = deck_of(5, 2)
        dealt(deck, 0, 0)
        played(deck, 0, 0, 1, 2)
        show(deck, 2)
        show(deck, 3, (4, 1))
        assert sorted(dealt(deck, 4, 0, life=1)) == [0, 1, 3, 4]
        assert played(deck, 4, 0, 0, 4, life=1) == [CloseEpoch(0)]

    def test_a_view_with_the_same_members_moves_nothing(self) -> None:
        deck, same = deck_of(9, 3), deck_of(9, 3)
        dealt(deck, 1, 0, count=2)
        dealt(same, 1, 0, count=2)
        show(deck, 7, (0, 0), (1, 0), (2, 0))
        assert dealt(deck, 0, 0) == dealt(same, 0, 0) == [0, 3, 6]

    def test_an_older_view_is_ignored(self) -> None:
        deck = deck_of(9, 3)
        show(deck, 5, (0, 0), (1, 0))
        show(deck, 4, (2, 0))
        assert deck.handle(HandRequested(0.0, 2, 0, 0, 0, 1)) == []
        assert dealt(deck, 1, 0) == [1, 3, 5, 7]

    def test_strips_stay_few_over_many_changes(self) -> None:
        """One worker is replaced a hundred times; the others advance at different speeds, one not at all."""
        deck, chance = deck_of(10**7, 8), random.Random(3)
        tickets: Counter[int] = Counter()
        for life in range(1, 101):
            for _ in range(40):
                worker = 1 + min(chance.randrange(6), chance.randrange(6))
                answer = ask(deck, worker, tickets[worker], count=256)
                assert isinstance(answer, Deal)
                tickets[worker] += 1
                played(deck, worker, answer.ticket, 0, len(list(answer.positions())))
            ask(deck, 0, 0, count=256, life=life - 1)
            show(deck, life + 1, (0, life), *((rank, 0) for rank in range(1, 8)))
        assert footprint(deck) < 8 * 100, "at most a strip for each worker at each change"


class TestReturns:
    def test_what_was_returned_goes_to_the_first_whose_lane_ends(self) -> None:
        deck = deck_of(8, 2)
        dealt(deck, 0, 0)
        assert dealt(deck, 1, 0, count=2) == [1, 3]
        returned(deck, 0, 0, 1, 3)
        assert dealt(deck, 1, 1, count=2) == [5, 7], "its own lane first"
        assert dealt(deck, 1, 2) == [2, 4]
        assert ask(deck, 0, 1) == Pass(0, 0, 1, 0)

    def test_it_may_come_back_to_who_returned_it(self) -> None:
        deck = deck_of(4, 1)
        dealt(deck, 0, 0)
        returned(deck, 0, 0, 0, 4)
        assert dealt(deck, 0, 1, count=3) == [0, 1, 2]
        assert dealt(deck, 0, 2, count=3) == [3]

    def test_who_is_in_a_later_epoch_gets_it_too(self) -> None:
        deck = deck_of(4, 2)
        dealt(deck, 0, 0)
        dealt(deck, 1, 0)
        assert dealt(deck, 1, 1, epoch=1, count=1) == [1]
        returned(deck, 0, 0, 1, 2)
        assert ask(deck, 1, 2, epoch=1) == Deal(1, 0, 2, 0, (Strip(2, 4, 2),))

    def test_batches_returned_one_after_the_other_are_one_strip(self) -> None:
        """A straggler under Backup, whose every gradient is late."""
        deck = deck_of(4000, 4)
        for ticket in range(100):
            dealt(deck, 3, ticket, count=10)
            returned(deck, 3, ticket, 0, 10)
        assert footprint(deck) == 4 + 4 + 1 + 1

    def test_what_was_acknowledged_cannot_be_returned_nor_the_reverse(self) -> None:
        deck = deck_of(6, 1)
        dealt(deck, 0, 0)
        played(deck, 0, 0, 0, 3)
        returned(deck, 0, 0, 2, 5)
        played(deck, 0, 0, 2, 5)
        assert dealt(deck, 0, 1) == [3, 4]


class TestCopiesAndGhosts:
    def test_the_same_ticket_gets_the_same_answer(self) -> None:
        deck = deck_of(8, 2)
        first = ask(deck, 0, 5, count=2)
        assert ask(deck, 0, 5, count=2) == first
        assert dealt(deck, 0, 6) == [4, 6]
        assert deck.handle(HandRequested(0.0, 0, 0, 5, 0, 2)) == [], "an older one gets none"
        passed = ask(deck, 0, 7)
        assert isinstance(passed, Pass)
        assert ask(deck, 0, 7) == passed

    def test_settling_twice_is_settling_once(self) -> None:
        deck = deck_of(4, 1)
        dealt(deck, 0, 0)
        played(deck, 0, 0, 0, 2)
        played(deck, 0, 0, 0, 2)
        played(deck, 0, 0, 1, 3)
        assert deck.epochs[0].played == 3
        assert played(deck, 0, 0, 0, 4) == [CloseEpoch(0)]
        assert played(deck, 0, 0, 0, 4) == []

    def test_a_life_that_is_over_settles_nothing_and_gets_nothing(self) -> None:
        deck = deck_of(4, 1)
        dealt(deck, 0, 0)
        show(deck, 2, (0, 1))
        played(deck, 0, 0, 0, 4, life=0)
        assert deck.handle(HandRequested(0.0, 0, 0, 1, 0, 4)) == []
        assert dealt(deck, 0, 0, life=1) == [0, 1, 2, 3]
        played(deck, 0, 0, 0, 4, life=0)
        assert 0 in deck.epochs

    def test_who_asks_before_it_is_named_is_answered_when_it_is(self) -> None:
        deck = deck_of(6, 1)
        assert deck.handle(HandRequested(0.0, 0, 1, 0, 0, 2)) == []
        assert deck.handle(HandRequested(0.0, 3, 0, 0, 0, 2)) == []
        assert show(deck, 2, (0, 1), (3, 0)) == [
            Deal(0, 1, 0, 0, (Strip(0, 4, 2),)),
            Deal(3, 0, 0, 0, (Strip(1, 5, 2),)),
        ]
        assert deck.early == {}

    def test_a_ghost_does_not_displace_who_is_to_be_named(self) -> None:
        deck = deck_of(6, 0)
        deck.handle(HandRequested(0.0, 0, 2, 0, 0, 2))
        deck.handle(HandRequested(0.0, 0, 1, 9, 0, 2))
        assert show(deck, 2, (0, 2)) == [Deal(0, 2, 0, 0, (Strip(0, 2, 1),))]


class TestLead:
    def test_the_fast_are_one_epoch_ahead_and_then_help(self) -> None:
        deck = deck_of(6, 2)
        assert dealt(deck, 1, 0, count=1) == [1]
        assert dealt(deck, 0, 0) == [0, 2, 4]
        assert ask(deck, 0, 1, epoch=0) == Pass(0, 0, 1, 0), "the slow worker's lane is its own"
        assert dealt(deck, 0, 2, epoch=1) == [0, 2, 4]
        assert ask(deck, 0, 3, epoch=2, count=1) == Deal(0, 0, 3, 0, (Strip(3, 5, 2),)), "not any more"
        assert ask(deck, 1, 1, epoch=0) == Deal(1, 0, 1, 0, (Strip(5, 7, 2),)), "first come, first served"
        assert ask(deck, 0, 4, epoch=2, count=9) == Deal(0, 0, 4, 2, (Strip(0, 6, 2),))
        assert dealt(deck, 1, 2, epoch=1) == [1, 3, 5], "the lanes of epoch 1 are as they were"

    def test_nobody_waits_for_what_is_in_a_hand(self) -> None:
        deck = deck_of(4, 2)
        dealt(deck, 1, 0)
        for epoch in range(10):
            ticket = 10 * epoch
            while isinstance(answer := ask(deck, 0, ticket, epoch), Deal):
                ticket += 1
                played(deck, 0, answer.ticket, 0, len(list(answer.positions())))
        assert list(deck.epochs) == [0, 8, 9], "the slow hand's, and within the lead"

    def test_slow_workers_get_less_and_every_epoch_is_finished(self) -> None:
        """One worker six times slower than three others: its share falls to a nineteenth."""
        deck, share = deck_of(400, 4), Counter[int]()
        tickets, epochs, closed = Counter[int](), Counter[int](), 0
        for tick in range(6 * 1000):
            for worker in range(4):
                if worker == 3 and tick % 6:
                    continue
                answer = ask(deck, worker, tickets[worker], epochs[worker], count=5)
                tickets[worker] += 1
                if isinstance(answer, Pass):
                    epochs[worker] += 1
                    continue
                got = len(list(answer.positions()))
                share[worker] += got
                closed += len(played(deck, worker, answer.ticket, 0, got))
        assert 0.8 / 19 < share[3] / share.total() < 1.2 / 19
        assert closed >= share.total() / 400 - 3


class TestRefusals:
    @pytest.mark.parametrize(
        "event",
        [
            HandRequested(0.0, 0, 0, 1, 2, 4),
            HandRequested(0.0, 0, 0, 1, -1, 4),
            HandRequested(0.0, 0, 0, 1, 0, 0),
            HandRequested(0.0, 9, 9, 1, 0, -3),
            HandAcknowledged(0.0, 0, 0, 0, -1, 1),
            HandAcknowledged(0.0, 0, 0, 0, 2, 1),
            HandReturned(0.0, 0, 0, 0, 0, 5),
        ],
    )
    def test_an_illegal_event_changes_nothing(self, event: DeckEvent) -> None:
        deck, twin = deck_of(8, 2), deck_of(8, 2)
        for each in (deck, twin):
            assert dealt(each, 0, 0) == [0, 2, 4, 6]
        with pytest.raises(IllegalEvent, match=r"worker \d (asked|settled)"):
            deck.handle(event)
        assert picture(deck) == picture(twin)

    @pytest.mark.parametrize(("size", "lead", "first"), [(0, 1, 0), (5, -1, 0), (5, 1, -1)])
    def test_an_impossible_deck_is_refused(self, size: int, lead: int, first: int) -> None:
        with pytest.raises(ConfigError, match=f"got {size}, {lead} and {first}"):
            Deck(size, lead, first)

    def test_a_deck_may_begin_with_a_later_epoch(self) -> None:
        deck = Deck(4, first=7)
        show(deck, 1, (0, 0))
        assert ask(deck, 0, 0, epoch=3) == Pass(0, 0, 0, 3)
        assert ask(deck, 0, 1, epoch=7) == Deal(0, 0, 1, 7, (Strip(0, 4, 1),))

    def test_check_sees_a_lost_position(self) -> None:
        deck = deck_of(8, 2)
        dealt(deck, 0, 0, count=2)
        deck.epochs[0].marks[1] += 1
        with pytest.raises(InvariantViolated, match="epoch 0 of 8: 5 undealt, 2 in hands, 0 played"):
            deck.check()


def picture(deck: Deck) -> object:
    """The whole state, comparable."""

    def of(thing: object) -> object:
        if isinstance(thing, Epoch | Hand | Player):
            return {name: of(value) for name, value in vars(thing).items()}
        return {key: of(value) for key, value in thing.items()} if isinstance(thing, dict) else thing

    return {name: of(value) for name, value in vars(deck).items() if name != "actions"}


def test_events_and_actions_travel() -> None:
    things: list[DeckEvent | DeckAction] = [
        HandRequested(0.5, 1, 0, 3, 2, 640),
        HandAcknowledged(0.5, 1, 0, 3, 0, 32),
        HandReturned(0.5, 1, 0, 3, 32, 64),
        Deal(1, 0, 3, 2, (Strip(1, 9, 4), Strip(20, 30, 1))),
        Pass(1, 0, 3, 2),
        CloseEpoch(2),
    ]
    decode = msgspec.msgpack.Decoder(list[DeckEvent | DeckAction]).decode
    assert decode(msgspec.msgpack.encode(things)) == things
    assert len(msgspec.msgpack.encode(things[3])) < 32


ranges = st.builds(range, st.integers(0, 30), st.integers(0, 90), st.integers(1, 7))
repeatable = settings(max_examples=300, deadline=None, derandomize=True, database=None)


@repeatable
@given(st.lists(ranges, max_size=5), st.integers(0, 60), st.integers(0, 80), st.integers(1, 6))
def test_cut_is_a_slice_of_the_strips_end_to_end(strips: list[range], start: int, stop: int, step: int) -> None:
    assert flat(cut(strips, start, stop, step)) == flat(strips)[start:stop:step]


@repeatable
@given(st.integers(1, 60), st.lists(st.tuples(st.integers(0, 59), st.integers(1, 12), st.integers(1, 5))))
def test_tidy_keeps_the_positions(size: int, cuts: list[tuple[int, int, int]]) -> None:
    """On disjoint strips, as they are in a deck: pieces of pieces of one range."""
    strips = [range(size)]
    for start, count, step in cuts:
        drawn = cut(strips, start, start + count * step, step)
        kept = [range(p, p + 1) for p in flat(strips) if p not in flat(drawn)]
        strips = tidy(drawn + kept)
        assert sorted(flat(strips)) == list(range(size))
        assert [strip.start for strip in strips] == sorted(strip.start for strip in strips)
    assert tidy([range(p, p + 1) for p in range(size)]) == [range(size)]


def flat(strips: Iterable[range]) -> list[int]:
    return [position for strip in strips for position in strip]


class Worker:
    """One life of a worker as the deck sees it: it asks, computes what it was dealt in order, and reports."""

    def __init__(self, rank: int, incarnation: int) -> None:
        self.life = (rank, incarnation)
        self.ticket = 0
        self.epoch = 0
        self.cards: list[tuple[int, int]] = []
        """(ticket, index within the hand) of what was dealt and is not computed."""
        self.computed: list[tuple[int, int, int]] = []
        """(ticket, start, stop) of what was computed and is not reported."""

    def compute(self, batch: int) -> None:
        now, self.cards = self.cards[:batch], self.cards[batch:]
        for ticket in dict.fromkeys(ticket for ticket, _ in now):
            indices = [index for of, index in now if of == ticket]
            self.computed.append((ticket, indices[0], indices[-1] + 1))


IN_DECK = "deck"
PLAYED = "played"


class Broken(AssertionError):
    """The deck broke a rule."""


def rule(condition: bool, what: str) -> None:
    if not condition:
        raise Broken(what)


class Table:
    """A deck, its workers, and where every position of every epoch is."""

    def __init__(self, size: int, lead: int, checks: bool = True) -> None:
        self.deck = Deck(size, lead)
        self.deck.checks = checks
        self.size = size
        self.lead = lead
        self.where: dict[int, list[object]] = {}
        self.hands: dict[tuple[int, int, int], tuple[int, list[int]]] = {}
        self.answers: dict[Life, Deal | Pass] = {}
        self.closed: set[int] = set()
        self.members: dict[int, int] = {}
        self.number = 0
        self.lives: Counter[int] = Counter()
        self.workers: dict[Life, Worker] = {}
        self.told: list[DeckEvent] = []
        self.done: list[list[DeckAction]] = []
        self.deals: Counter[tuple[int, int]] = Counter()
        self.seen: Counter[str] = Counter()

    # What may happen.

    def step(self, what: str, a: int, b: int) -> None:
        """One step of a random run; a step that makes no sense now is left out."""
        worker = self.workers.get((a, self.lives[a] - 1))
        match what:
            case "ask" if worker is not None:
                self.ask(worker, b + 1)
            case "compute" if worker is not None:
                worker.compute(b + 1)
            case "acknowledge" | "return":
                waiting = [
                    (each, part) for each in self.workers.values() if each.life[0] == a for part in each.computed
                ]
                if waiting:
                    self.report(*waiting[b % len(waiting)], counted=what == "acknowledge")
            case "join" if a not in self.members:
                self.lives[a] += 1
                worker = self.workers[a, self.lives[a] - 1] = Worker(a, self.lives[a] - 1)
                if b % 2:
                    self.ask(worker, b)
                self.show({**self.members, a: self.lives[a] - 1})
            case "lose" if a in self.members:
                if b % 3 == 0:  # it is back before anybody has noticed that it was gone
                    self.lives[a] += 1
                    self.workers[a, self.lives[a] - 1] = Worker(a, self.lives[a] - 1)
                    self.show({**self.members, a: self.lives[a] - 1})
                else:
                    self.show({rank: life for rank, life in self.members.items() if rank != a})
            case "copy" if self.told:
                self.seen["copies"] += 1
                self.tell(self.told[-1 - (a + 7 * b) % len(self.told)])
            case _:
                return

    def ask(self, worker: Worker, count: int) -> Deal | Pass | None:
        rank, incarnation = worker.life
        self.tell(HandRequested(0.0, rank, incarnation, worker.ticket, worker.epoch, count))
        worker.ticket += 1
        return self.answers.get(worker.life)

    def report(self, worker: Worker, part: tuple[int, int, int], counted: bool) -> None:
        worker.computed.remove(part)
        kind = HandAcknowledged if counted else HandReturned
        self.tell(kind(0.0, *worker.life, *part))

    def show(self, members: dict[int, int]) -> None:
        self.number += 1
        self.tell(ViewChanged(0.0, View(self.number, tuple(sorted(members.items())))))

    def play_on(self) -> None:
        """No more faults: when nobody gets anything any more, everything must have been played."""
        if not self.members:
            self.step("join", 0, 0)
        living = [self.workers[life] for life in self.members.items()]
        last = max(self.where, default=0)
        for _ in range(3 * (self.size + 2) * (last + 2)):
            for worker in living:
                worker.epoch = min(worker.epoch, last)
            answers = [self.ask(worker, 3) for worker in living]
            for worker in living:
                worker.compute(len(worker.cards))
                for part in list(worker.computed):
                    self.report(worker, part, counted=True)
            if all(isinstance(answer, Pass) and answer.epoch == last for answer in answers):
                break
        rule(self.closed == set(self.where), f"epochs {set(self.where) - self.closed} are never finished")
        rule(footprint(self.deck) == len(self.members) + len(self.deck.early), "something is kept of closed epochs")

    # What must hold.

    def tell(self, event: DeckEvent) -> None:
        actions = self.deck.handle(event)
        self.told.append(event)
        self.done.append(actions)
        answers = [action for action in actions if isinstance(action, Deal | Pass)]
        match event:
            case ViewChanged(view=view):
                self.judge_view(view)
                self.judge_early(answers)
            case HandRequested():
                self.judge_request(event, answers)
            case HandAcknowledged() | HandReturned():
                self.judge_report(event)
                rule(not answers, "a report was answered")
        closed = [action.epoch for action in actions if isinstance(action, CloseEpoch)]
        full = {epoch for epoch, places in self.where.items() if all(place == PLAYED for place in places)}
        rule(not self.closed & set(closed) and self.closed | set(closed) == full, f"{closed} closed, {full} are full")
        self.closed = full

    def judge_view(self, view: View) -> None:
        if view.number < self.number:
            return
        self.members = dict(view.members)
        for places in self.where.values():
            for position, place in enumerate(places):
                if isinstance(place, tuple) and self.members.get(place[0]) != place[1]:
                    places[position] = IN_DECK
                    self.seen["positions of the lost"] += 1

    def judge_early(self, answers: list[Deal | Pass]) -> None:
        for answer in answers:
            self.seen["early requests answered"] += 1
            self.judge_answer(answer, count=self.size)
        for life in self.members.items():
            if life not in self.answers:
                rule(self.workers[life].ticket == 0, f"the early request of {life} was forgotten")

    def judge_request(self, event: HandRequested, answers: list[Deal | Pass]) -> None:
        life = (event.worker, event.incarnation)
        last = self.answers.get(life)
        if self.members.get(event.worker) != event.incarnation or (last is not None and event.ticket < last.ticket):
            rule(not answers, f"a ghost was answered: {answers}")
            return
        rule(len(answers) == 1, f"{len(answers)} answers to {event}: a member is answered, once and at once")
        rule((answers[0].worker, answers[0].incarnation, answers[0].ticket) == (*life, event.ticket), "wrong address")
        if last is not None and event.ticket == last.ticket:
            rule(answers[0] == last, f"{event} was answered by {last}, and now by {answers[0]}")
            self.seen["answers repeated"] += 1
            return
        if event.epoch not in self.where:
            self.where[event.epoch] = [IN_DECK] * self.size
        self.judge_answer(answers[0], event.count, event.epoch)

    def judge_answer(self, answer: Deal | Pass, count: int, asked: int = 0) -> None:
        life = (answer.worker, answer.incarnation)
        worker = self.workers[life]
        rule(self.members.get(life[0]) == life[1], f"a ghost was answered: {answer}")
        self.answers[life] = answer
        if not self.where:
            self.where[0] = [IN_DECK] * self.size
        if isinstance(answer, Pass):
            rule(answer.epoch == worker.epoch, f"{answer}, asked for {worker.epoch}")
            reach = answer.epoch if len(self.members) == 1 else answer.epoch - self.lead - 1
            for epoch in range(reach + 1):
                rule(IN_DECK not in self.where[epoch], f"{answer} although something of epoch {epoch} is in the deck")
            worker.epoch += 1
            return
        positions = list(answer.positions())
        rule(0 < len(positions) <= count, f"{len(positions)} dealt, {count} asked for")
        rule(answer.epoch <= asked, f"dealt of epoch {answer.epoch}, asked for {asked}")
        key = (*life, answer.ticket)
        rule(key not in self.hands, f"ticket {key} was dealt twice")
        self.hands[key] = (answer.epoch, positions)
        for position in positions:
            place = self.where[answer.epoch][position]
            rule(place == IN_DECK, f"position {position} of epoch {answer.epoch} dealt to {life} is {place}")
            self.where[answer.epoch][position] = key
            self.deals[answer.epoch, position] += 1
            self.seen["positions dealt again"] += self.deals[answer.epoch, position] > 1
        self.seen["hands of an epoch before the lead"] += answer.epoch < asked - self.lead
        worker.cards += [(answer.ticket, index) for index in range(len(positions))]

    def judge_report(self, event: HandAcknowledged | HandReturned) -> None:
        key = (event.worker, event.incarnation, event.ticket)
        epoch, positions = self.hands[key]
        for position in positions[event.start : event.stop]:
            if self.where[epoch][position] == key:
                self.where[epoch][position] = PLAYED if isinstance(event, HandAcknowledged) else IN_DECK
            else:
                self.seen["positions reported in vain"] += 1


KINDS = ["ask"] * 5 + ["compute"] * 5 + ["acknowledge"] * 5 + ["return", "join", "lose", "copy", "copy"]
Step = tuple[str, int, int]

steps = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.integers(0, 7)), max_size=120)
peaceful = st.lists(
    st.tuples(st.sampled_from(["ask", "compute", "acknowledge", "copy"]), st.integers(0, 3), st.integers(0, 7)),
    max_size=150,
)


def run(table: Table, steps: Iterable[Step], workers: int) -> Table:
    for rank in range(workers):
        table.step("join", rank, 0)
    for step in steps:
        table.step(*step)
    table.play_on()
    return table


@repeatable
@given(st.integers(1, 40), st.integers(0, 2), st.integers(0, 4), steps)
def test_nothing_is_lost_and_nothing_played_is_dealt_again(
    size: int, lead: int, workers: int, steps: list[Step]
) -> None:
    """And equal events give equal actions."""
    table = run(Table(size, lead), steps, workers)
    again = Deck(size, lead)
    assert [again.handle(event) for event in table.told] == table.done


@repeatable
@given(st.integers(1, 60), st.integers(0, 2), st.integers(1, 4), peaceful)
def test_without_faults_everything_is_dealt_exactly_once(size: int, lead: int, workers: int, steps: list[Step]) -> None:
    table = run(Table(size, lead), steps, workers)
    assert set(table.deals.values()) <= {1}
    assert len(table.deals) == size * len(table.where)


@repeatable
@given(st.integers(1, 60), st.integers(1, 4), peaceful)
def test_without_faults_and_within_the_lead_the_lanes_are_strides(size: int, workers: int, steps: list[Step]) -> None:
    table = run(Table(size, lead=1000), steps, workers)
    for epoch in table.where:
        for rank in range(workers):
            hands = [hand for (worker, _, _), hand in table.hands.items() if worker == rank and hand[0] == epoch]
            assert [p for _, positions in hands for p in positions] == list(range(rank, size, workers))


def random_run(seed: int, checks: bool = True) -> Table:
    """A run that is longer than those above, and does more in an epoch."""
    chance = random.Random(seed)
    steps = [(chance.choice(KINDS), chance.randrange(4), chance.randrange(8)) for _ in range(300)]
    return run(Table(chance.randrange(1, 30), chance.randrange(3), checks), steps, chance.randrange(5))


def test_the_runs_contain_what_they_should() -> None:
    """A harness that stopped making trouble would pass every test: count what happened."""
    seen: Counter[str] = Counter()
    for seed in range(100):
        table = random_run(seed)
        seen += table.seen
        seen["epochs closed"] += len(table.closed)
    for what, least in {
        "copies": 2000,
        "answers repeated": 150,
        "early requests answered": 50,
        "positions of the lost": 1000,
        "positions dealt again": 1000,
        "positions reported in vain": 500,
        "hands of an epoch before the lead": 50,
        "epochs closed": 150,
    }.items():
        assert seen[what] >= least, f"{what}: {seen[what]} times, expected at least {least}"


# Decks that break one rule each. The docstring says which; the table below, what the judge must say.

honest_view, honest_request, honest_answer = Deck.on_view_changed, Deck.on_hand_requested, Deck.answer
honest_settled, honest_settle = Deck.on_hand_settled, Hand.settle
honest_furthest, honest_cut, honest_draw = Epoch.furthest, Epoch.cut_lanes, Epoch.draw


def forget_the_lost(self: Deck, view: View) -> None:
    """What a lost worker held is lost."""
    for rank, player in self.players.items():
        if view.number > self.view_number and dict(view.members).get(rank) != player.incarnation:
            player.hands.clear()
    honest_view(self, view)


def loosen_every_hand(self: Deck, view: View) -> None:
    """What those who stay hold is dealt again."""
    for player in self.players.values():
        for hand in player.hands.values():
            self.epochs[hand.epoch].loosen(hand.settle(0, self.size))
    honest_view(self, view)


def take_any_view(self: Deck, view: View) -> None:
    """The last view to arrive counts, whatever its number."""
    self.view_number = 0
    honest_view(self, view)


def forget_the_early(self: Deck, view: View) -> None:
    """A request of somebody no view has named yet is thrown away."""
    self.early.clear()
    honest_view(self, view)


def deal_repeats(self: Deck, event: HandRequested) -> None:
    """A request that comes again gets another hand."""
    if event.worker in self.players and event.incarnation == self.players[event.worker].incarnation:
        self.players[event.worker].answer = None
    honest_request(self, event)


def answer_ghosts(self: Deck, event: HandRequested) -> None:
    """What a life asks for that is over is dealt to the next one."""
    if event.worker in self.players and event.incarnation < self.players[event.worker].incarnation:
        event = msgspec.structs.replace(event, incarnation=self.players[event.worker].incarnation)
    honest_request(self, event)


def wait_for_the_slow(self: Deck, event: HandRequested) -> None:
    """Nobody begins an epoch before the last one is finished."""
    if event.epoch < self.unopened or not self.epochs:
        honest_request(self, event)


def never_help(self: Deck, event: HandRequested, player: Player) -> Deal | Pass:
    """The lanes of the slow are theirs for ever."""
    self.lead = 1000
    return honest_answer(self, event, player)


def look_at_one_epoch(self: Deck, event: HandRequested, player: Player) -> Deal | Pass:
    """What is left of older epochs is not dealt."""
    older = {number: self.epochs.pop(number) for number in list(self.epochs) if number < event.epoch}
    answer = honest_answer(self, event, player)
    self.epochs = older | self.epochs
    return answer


def play_what_is_returned(self: Deck, event: HandAcknowledged | HandReturned) -> None:
    """A gradient that counted nowhere counts."""
    honest_settled(self, HandAcknowledged(*msgspec.structs.astuple(event)))


def loosen_what_is_played(self: Deck, event: HandAcknowledged | HandReturned) -> None:
    """A gradient that counted is computed again."""
    honest_settled(self, HandReturned(*msgspec.structs.astuple(event)))


def let_ghosts_settle(self: Deck, event: HandAcknowledged | HandReturned) -> None:
    """The reports of a life that is over count for the next one."""
    if event.worker in self.players and event.ticket in self.players[event.worker].hands:
        player = self.players[event.worker]
        stop = min(event.stop, player.hands[event.ticket].unsettled[-1][1])
        start = min(event.start, stop)
        event = msgspec.structs.replace(event, incarnation=player.incarnation, start=start, stop=stop)
    honest_settled(self, event)


def settle_up_to(self: Hand, start: int, stop: int) -> list[range]:
    """A high-water mark: what comes before the part is settled with it, though it may be returned later."""
    return honest_settle(self, 0, stop)


def settle_again(self: Hand, start: int, stop: int) -> list[range]:
    """What was settled before is settled again."""
    honest_settle(self, start, stop)
    return cut(self.strips, start, stop)


def never_close(self: Deck) -> None:
    """An epoch stays open."""


def close_when_dealt(self: Deck) -> None:
    """An epoch is closed when all of it is in hands."""
    for number in [n for n, epoch in self.epochs.items() if epoch.furthest() == self.size and not epoch.loose]:
        del self.epochs[number]
        self.actions.append(CloseEpoch(number))


def start_at_the_slowest(self: Epoch) -> int:
    """New lanes start where the slowest lane is."""
    return min(self.start + min(self.marks, default=0) * len(self.marks), self.size)


def forget_who_is_behind(self: Epoch, lanes: int, start: int) -> None:
    """What the slower lanes have left is lost."""
    self.start, self.marks = start, [0] * lanes


def keep_the_marks(self: Epoch, lanes: int, start: int) -> None:
    """New lanes begin as far on as the old ones were."""
    marks = self.marks
    honest_cut(self, lanes, start)
    self.marks = (marks + [0] * lanes)[:lanes]


def draw_loose_twice(self: Epoch, lane: int, count: int) -> list[range]:
    """What is loose stays loose when it is dealt."""
    loose = self.loose
    drawn = honest_draw(self, lane, count)
    self.loose = loose
    return drawn


def draw_one_more(self: Epoch, lane: int, count: int) -> list[range]:
    """Hands are larger than asked for."""
    return honest_draw(self, lane, count + 1)


BROKEN: list[tuple[type, str, Callable[..., object], str]] = [
    (Deck, "on_view_changed", forget_the_lost, "in the deck"),
    (Deck, "on_view_changed", loosen_every_hand, "dealt to"),
    (Deck, "on_view_changed", take_any_view, "0 answers"),
    (Deck, "on_view_changed", forget_the_early, "forgotten"),
    (Deck, "on_hand_requested", deal_repeats, "and now by"),
    (Deck, "on_hand_requested", answer_ghosts, "ghost"),
    (Deck, "on_hand_requested", wait_for_the_slow, "0 answers"),
    (Deck, "answer", never_help, "in the deck"),
    (Deck, "answer", look_at_one_epoch, "in the deck"),
    (Deck, "on_hand_settled", play_what_is_returned, "are full"),
    (Deck, "on_hand_settled", loosen_what_is_played, "is played"),
    (Deck, "on_hand_settled", let_ghosts_settle, "are full"),
    (Deck, "settle", never_close, "are full"),
    (Deck, "settle", close_when_dealt, "are full"),
    (Hand, "settle", settle_up_to, "are full"),
    (Hand, "settle", settle_again, "is played"),
    (Epoch, "furthest", start_at_the_slowest, "dealt to"),
    (Epoch, "cut_lanes", forget_who_is_behind, "never finished"),
    (Epoch, "cut_lanes", keep_the_marks, "never finished"),
    (Epoch, "draw", draw_loose_twice, "dealt to"),
    (Epoch, "draw", draw_one_more, "asked for"),
]


@pytest.mark.parametrize(("owner", "name", "wrong", "verdict"), BROKEN, ids=lambda it: getattr(it, "__name__", ""))
def test_a_broken_deck_is_caught(
    owner: type, name: str, wrong: Callable[..., object], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the judge, from outside: the deck's own `check()` is off."""
    monkeypatch.setattr(owner, name, wrong)
    assert any(verdict in error for error in broken_rules())


def broken_rules() -> Iterator[str]:
    for seed in range(80):
        try:
            random_run(seed, checks=False)
        except Broken as error:
            yield str(error)
        except KeyError:
            yield "the deck fell over"
