"""Who gets which samples: a machine that deals the positions of each epoch, so that none is lost.

An epoch is the positions 0 to size - 1 of a permutation the deck never sees. At every moment each position of an
open epoch lies in exactly one of four places:

    place     comes there                                       goes on
    lane      the epoch opens; the members change               dealt to the lane's owner, when it asks
    loose     returned, or its holder is gone; its lane fell    dealt to whoever asks first with nothing left in its
              behind                                            own lane
    hand      dealt                                             played, returned, or its holder is gone
    played    acknowledged                                      never; an epoch that is all played is closed

Lanes. While the members do not change, worker w of N (in rank order) owns every N-th position from the w-th on. So
if all take batches of one size, step t of all together is one contiguous part of the permutation: the joined batch
that single-process training would take (`dealing.Dealer`).

Hands. A worker asks for the next `count` positions of its lane and gets them as strips (start, stop, step), one
strip where nothing went wrong; it works out the positions by itself. What is in a hand is its holder's alone until
it is settled, and what is in no hand can be dealt to others without telling anybody. So `count` is the bargain: a
whole lane at once is one message an epoch, but then whoever joins finds nothing until the next one. A few dozen
batches, asked for before the last hand is used up, cost nobody a round trip and leave most of the epoch to share.

Settling. A gradient that counted on at least one shard acknowledges its part of a hand, one that counted nowhere
returns it. Both name the part, from `start` to `stop` within the hand, so they may come in any order, twice, or
for many batches at once. What a worker has not settled when a view ends its life becomes loose; its last gradients
may have counted all the same, so: at least once, and exactly once where nobody was lost. Only what is still in a
hand can be settled, so copies of an earlier report and reports of a life that is over change nothing.

The members change. What is in the hands of those who stay, stays. Of every open epoch, what lies beyond the
furthest lane is whole, and is cut into new lanes, every M-th position for each of the M members; what the other
lanes have left before that is loose, with what the lost had in their hands. A return leaves the lanes alone: under
Backup each iteration has one. Loose positions are dealt again when somebody's lane ends.

Nobody waits here. Who waits for whom is a policy's business, and under BSP a worker held up by the deck would hold
up those it waits for. A worker that has nothing left to do in an epoch is told to pass, and asks for the next one,
whatever the others do. But who asks for epoch e gets the oldest positions it may have, and of the epochs before
e - `lead` it may have everything, the lanes of slow workers too. With a lead of 1 the fast are in epoch e + 1 while
the slow are in e, and nobody starts e + 2 while a position of e is in no hand. (With a lead of 0 the lanes would
depend on who is first by a hair at the end of an epoch, also under BSP.)

A worker has one request open at a time and counts them up: the ticket. The same ticket again gets the same answer
again, an older one none. A request of somebody no view has named yet is kept until one does. A life that a view
has ended does not come back: whoever rejoins has a new incarnation.

What is kept: a number for each worker and open epoch (of the epochs beyond the lead only those with something in a
hand are open), the unsettled hands, a strip or so for each return and for each member at each change of members.
Nothing grows with `size`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, assert_never

from msgspec import Struct

from paceline.core.events import ViewChanged
from paceline.core.machine import IllegalEvent, require
from paceline.core.messages import View
from paceline.errors import ConfigError


class HandRequested(Struct, frozen=True, array_like=True, tag=True):
    """A worker wants `count` more positions, of `epoch` or of an older one. It numbers its requests upwards."""

    at: float
    worker: int
    incarnation: int
    ticket: int
    epoch: int
    count: int


class HandAcknowledged(Struct, frozen=True, array_like=True, tag=True):
    """A gradient on this part of a hand, from `start` to before `stop`, counted on at least one shard."""

    at: float
    worker: int
    incarnation: int
    ticket: int
    start: int
    stop: int


class HandReturned(Struct, frozen=True, array_like=True, tag=True):
    """A gradient on this part of a hand counted nowhere, or the worker will not compute it."""

    at: float
    worker: int
    incarnation: int
    ticket: int
    start: int
    stop: int


class Strip(NamedTuple):
    """The positions range(start, stop, step)."""

    start: int
    stop: int
    step: int


class Deal(Struct, frozen=True, array_like=True, tag=True):
    """Give the worker these positions of `epoch`: the answer to its request of this ticket."""

    worker: int
    incarnation: int
    ticket: int
    epoch: int
    strips: tuple[Strip, ...]

    def positions(self) -> Iterator[int]:
        """In the order in which `start` and `stop` of a settled part count them."""
        return chain.from_iterable(range(*strip) for strip in self.strips)


class Pass(Struct, frozen=True, array_like=True, tag=True):
    """Tell the worker that nothing of `epoch` or before is left for it: the answer to its request of this ticket."""

    worker: int
    incarnation: int
    ticket: int
    epoch: int


class CloseEpoch(Struct, frozen=True, array_like=True, tag=True):
    """Every position of this epoch has been acknowledged: forget it."""

    epoch: int


DeckEvent = ViewChanged | HandRequested | HandAcknowledged | HandReturned
DeckAction = Deal | Pass | CloseEpoch


class Epoch:
    """An open epoch: what is undealt, and how much was played. Lane j holds start + j + k * N, from k = marks[j] on."""

    def __init__(self, size: int, lanes: int) -> None:
        self.size = size
        self.start = 0
        self.marks = [0] * lanes
        self.loose: list[range] = []
        self.played = 0

    def lane(self, lane: int) -> range:
        """What is left in a lane."""
        lanes = len(self.marks)
        return range(self.start + lane + self.marks[lane] * lanes, self.size, lanes)

    def furthest(self) -> int:
        """Where all lanes are whole from."""
        return min(self.start + max(self.marks, default=0) * len(self.marks), self.size)

    def cut_lanes(self, lanes: int, start: int) -> None:
        """So many new lanes from `start` on; what the old ones have left before that is loose."""
        lefts = [self.lane(lane) for lane in range(len(self.marks))]
        self.loosen(range(left.start, start, left.step) for left in lefts)
        self.start = start
        self.marks = [0] * lanes

    def draw(self, lane: int, count: int) -> list[range]:
        """The next of a lane; of what is loose when it has no more."""
        drawn = [self.lane(lane)[:count]]
        self.marks[lane] += len(drawn[0])
        if not drawn[0]:
            drawn = cut(self.loose, 0, count)
            self.loose = cut(self.loose, count, length(self.loose))
        return drawn

    def loosen(self, strips: Iterable[range]) -> None:
        self.loose = tidy(chain(self.loose, filter(None, strips)))


class Hand:
    """Positions dealt and not all settled; `unsettled` counts them from 0, as parts (start, stop)."""

    def __init__(self, epoch: int, strips: Sequence[range]) -> None:
        self.epoch = epoch
        self.strips = strips
        self.unsettled = [(0, length(strips))]

    def settle(self, start: int, stop: int) -> list[range]:
        """Take this part out of the hand: what of it was unsettled."""
        taken, left = [], []
        for first, end in self.unsettled:
            low, high = max(first, start), min(end, stop)
            if low >= high:
                left.append((first, end))
                continue
            taken += cut(self.strips, low, high)
            left += [part for part in ((first, low), (high, end)) if part[0] < part[1]]
        self.unsettled = left
        return taken


class Player:
    """A member: its hands by ticket, and the last answer, in case it asks again."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.lane = 0
        self.hands: dict[int, Hand] = {}
        self.answer: Deal | Pass | None = None


class Deck:
    """Deals epochs of `size` positions, the first of them numbered `first`. See the top of this file for `lead`."""

    def __init__(self, size: int, lead: int = 1, first: int = 0) -> None:
        if size < 1 or lead < 0 or first < 0:
            raise ConfigError(f"a deck needs size >= 1, lead >= 0 and first >= 0, got {size}, {lead} and {first}")
        self.size = size
        self.lead = lead
        self.view_number = 0
        self.players: dict[int, Player] = {}
        """The members by rank, in rank order."""
        self.early: dict[int, HandRequested] = {}
        """The newest request of each rank that no view has named yet."""
        self.epochs: dict[int, Epoch] = {}
        """The open ones, oldest first."""
        self.unopened = first
        self.actions: list[DeckAction] = []
        self.checks = False

    def handle(self, event: DeckEvent) -> list[DeckAction]:
        """The only mutator: equal events in equal order give equal actions."""
        actions: list[DeckAction] = []
        self.actions = actions
        match event:
            case ViewChanged(view=view):
                self.on_view_changed(view)
            case HandRequested():
                self.on_hand_requested(event)
            case HandAcknowledged() | HandReturned():
                self.on_hand_settled(event)
            case _:
                assert_never(event)
        self.settle()
        if self.checks:
            self.check()
        return actions

    def on_view_changed(self, view: View) -> None:
        if view.number <= self.view_number:
            return
        self.view_number = view.number
        members = dict(sorted(view.members))
        if members == {rank: player.incarnation for rank, player in self.players.items()}:
            return
        for rank, player in self.players.items():
            if members.get(rank) != player.incarnation:
                for hand in player.hands.values():
                    self.epochs[hand.epoch].loosen(hand.settle(0, self.size))
        self.players = {rank: self.seat(rank, incarnation) for rank, incarnation in members.items()}
        for lane, player in enumerate(self.players.values()):
            player.lane = lane
        for epoch in self.epochs.values():
            epoch.cut_lanes(len(self.players), start=epoch.furthest())
        for rank, player in self.players.items():
            if rank in self.early and self.early[rank].incarnation <= player.incarnation:
                self.on_hand_requested(self.early.pop(rank))

    def seat(self, rank: int, incarnation: int) -> Player:
        """Who stays keeps its hands."""
        known = self.players.get(rank)
        return known if known is not None and known.incarnation == incarnation else Player(incarnation)

    def on_hand_requested(self, event: HandRequested) -> None:
        if not 0 <= event.epoch <= self.unopened or event.count < 1:
            raise IllegalEvent(
                f"worker {event.worker} asked for {event.count} positions of epoch {event.epoch}: "
                f"at least 1, and of an epoch up to {self.unopened}"
            )
        player = self.players.get(event.worker)
        if player is None or event.incarnation > player.incarnation:
            known = self.early.get(event.worker, event)
            self.early[event.worker] = max(known, event, key=lambda early: (early.incarnation, early.ticket))
        elif event.incarnation < player.incarnation:
            return  # a ghost
        elif player.answer is None or event.ticket > player.answer.ticket:
            player.answer = self.answer(event, player)
            self.actions.append(player.answer)
        elif event.ticket == player.answer.ticket:
            self.actions.append(player.answer)

    def answer(self, event: HandRequested, player: Player) -> Deal | Pass:
        if event.epoch == self.unopened:
            self.epochs[event.epoch] = Epoch(self.size, len(self.players))
            self.unopened += 1
        for number, epoch in self.epochs.items():
            if number > event.epoch:
                break
            drawn = epoch.draw(player.lane, event.count)
            if not drawn and number < event.epoch - self.lead:
                epoch.cut_lanes(len(self.players), start=self.size)
                drawn = epoch.draw(player.lane, event.count)
            if drawn:
                player.hands[event.ticket] = Hand(number, drawn)
                strips = tuple(Strip(strip.start, strip.stop, strip.step) for strip in drawn)
                return Deal(event.worker, event.incarnation, event.ticket, number, strips)
        return Pass(event.worker, event.incarnation, event.ticket, event.epoch)

    def on_hand_settled(self, event: HandAcknowledged | HandReturned) -> None:
        player = self.players.get(event.worker)
        if player is None or player.incarnation != event.incarnation or event.ticket not in player.hands:
            return  # a ghost, or settled before
        hand = player.hands[event.ticket]
        if not 0 <= event.start <= event.stop <= length(hand.strips):
            raise IllegalEvent(
                f"worker {event.worker} settled {event.start} to {event.stop} of a hand of {length(hand.strips)}"
            )
        strips = hand.settle(event.start, event.stop)
        if isinstance(event, HandAcknowledged):
            self.epochs[hand.epoch].played += length(strips)
        else:
            self.epochs[hand.epoch].loosen(strips)
        if not hand.unsettled:
            del player.hands[event.ticket]

    def settle(self) -> None:
        """An epoch that is all played is closed."""
        for number in [number for number, epoch in self.epochs.items() if epoch.played == self.size]:
            del self.epochs[number]
            self.actions.append(CloseEpoch(number))

    def check(self) -> None:
        """Nothing is lost and nothing is in two places, by number."""
        held = dict.fromkeys(self.epochs, 0)
        for player in self.players.values():
            for ticket, hand in player.hands.items():
                require(hand.unsettled != [], f"hand {ticket} is kept although it is settled")
                held[hand.epoch] += sum(stop - start for start, stop in hand.unsettled)
        for number, epoch in self.epochs.items():
            require(len(epoch.marks) == len(self.players), f"epoch {number} has lanes for {len(epoch.marks)}")
            undealt = self.size - epoch.start - sum(epoch.marks) + length(epoch.loose)
            where = f"{undealt} undealt, {held[number]} in hands, {epoch.played} played"
            require(undealt + held[number] + epoch.played == self.size, f"epoch {number} of {self.size}: {where}")


def length(strips: Iterable[range]) -> int:
    return sum(len(strip) for strip in strips)


def cut(strips: Iterable[range], start: int, stop: int, step: int = 1) -> list[range]:
    """strips[start:stop:step], as if the strips were one list."""
    parts = []
    for strip in strips:
        if start >= stop:
            break
        part = strip[start : min(stop, len(strip)) : step]
        if part:
            parts.append(part)
        start += len(part) * step - len(strip)
        stop -= len(strip)
    return parts


def tidy(strips: Iterable[range]) -> list[range]:
    """The same positions in order of their first ones; strips that go on where another of their step ends are one."""
    joined: list[range] = []
    for strip in sorted(strips, key=lambda strip: (strip.step, strip.start % strip.step, strip.start)):
        if joined and joined[-1].step == strip.step and joined[-1][-1] + strip.step == strip.start:
            strip = range(joined.pop().start, strip.stop, strip.step)
        joined.append(strip)
    return sorted(joined, key=lambda strip: (strip.start, strip.step))
