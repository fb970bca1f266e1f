"""Which worker gets which samples: leases on the positions of each epoch, so that no sample is lost.

An epoch is the positions 0 to size - 1 of a permutation that the dispatcher never sees. At every moment each position
of an open epoch is in exactly one of four places:

    place      a position comes there                              it leaves
    stripe     when the epoch opens or the members change          when the stripe's owner asks for a lease
    reclaimed  when it is returned, its holder is gone, or its     to whoever asks first with nothing left in its own
               stripe fell behind at a change of members           stripe
    lease      when it is granted                                  when it is consumed, returned, or its holder is gone
    consumed   when it is acknowledged                             never; an epoch that is all consumed is closed

Stripes. While the members do not change, worker w of N (in rank order) owns every N-th position from the w-th on. So
if all take batches of one size, step t of all together is one contiguous part of the permutation: the joined batch
that single-process training would take (`sample_order.SampleOrder`).

Leases. A worker asks for the next `count` positions of its stripe and gets them as strides (start, stop, step), one
stride where nothing went wrong; it works out the positions by itself. What is in a lease is its holder's alone until
it is settled, and what is in no lease can be granted to others without a message to anybody. So `count` is a
compromise: a whole stripe at once is one message an epoch, but then a worker that joins finds nothing until the next
one. A few dozen batches, asked for before the last lease is used up, cost nobody a round trip and leave most of the
epoch to share.

Settling. A gradient that counted on at least one shard acknowledges its part of a lease, one that counted nowhere
returns it. Both name the part, from `start` to `stop` within the lease, so they may come in any order, twice, or for
many batches at once. What a worker has not settled when a view removes it is reclaimed; its last gradients may have
counted all the same. So samples are used at least once, and exactly once where nobody was lost. Only what is still in
a lease can be settled, so copies of an earlier report and reports of a former incarnation change nothing.

Changes of members. Those who stay keep their leases. Of every open epoch, what lies beyond the furthest stripe is
untouched, and is cut into new stripes, every M-th position for each of the M members; what the other stripes have left
before that is reclaimed, with the leases of those who are lost. A return leaves the stripes alone: under Backup each
iteration has one. Reclaimed positions are granted when somebody's stripe ends.

Nobody waits here. Who waits for whom is decided by the policy, and under BSP a worker held up by the dispatcher would
hold up those it waits for. A worker that has nothing left to do in an epoch is told to skip it (`SkipEpoch`), and asks
for the next one, whatever the others do. But who asks for epoch e gets the oldest positions it may have, and of the
epochs before e - `lead` it may have everything, the stripes of slow workers too. With a lead of 1 the fast are in epoch
e + 1 while the slow are in e, and nobody starts e + 2 while a position of e is in no lease. (With a lead of 0 the
stripes would depend on who is first by a hair at the end of an epoch, also under BSP.)

Balanced batches (`shared`). Workers whose batches differ would come to the ends of equal stripes at different times. So
there all take from one stripe, in the order in which they ask.

A worker has one request open at a time and numbers its requests upwards (`ticket`). The same ticket again gets the same
answer again, an older one gets none. A request of a worker that no view has named yet is kept until a view does. An
incarnation that a view has removed does not come back: whoever rejoins has a new one.

What is kept: a number for each worker and open epoch (of the epochs beyond the lead only those with something in a
lease are open), the unsettled leases, about one stride for each return and for each member at each change of members.
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


class LeaseEvent(Struct, frozen=True, array_like=True, tag=True):
    """What a worker asks or reports under one of its tickets."""

    at: float
    worker: int
    incarnation: int
    ticket: int


class LeaseRequested(LeaseEvent, frozen=True):
    """A worker wants `count` more positions, of `epoch` or of an older one. It numbers its requests upwards."""

    epoch: int
    count: int


class LeaseAcknowledged(LeaseEvent, frozen=True):
    """A gradient on this part of a lease, from `start` to before `stop`, counted on at least one shard."""

    start: int
    stop: int


class LeaseReturned(LeaseEvent, frozen=True):
    """A gradient on this part of a lease counted nowhere, or the worker will not compute it."""

    start: int
    stop: int


class Stride(NamedTuple):
    """A stride is the positions range(start, stop, step)."""

    start: int
    stop: int
    step: int


class GrantLease(Struct, frozen=True, array_like=True, tag=True):
    """Give the worker these positions of `epoch`: the answer to its request of this ticket."""

    worker: int
    incarnation: int
    ticket: int
    epoch: int
    strides: tuple[Stride, ...]

    def positions(self) -> Iterator[int]:
        """Yields the positions in the order in which `start` and `stop` of a settled part count them."""
        return chain.from_iterable(range(*each) for each in self.strides)


class SkipEpoch(Struct, frozen=True, array_like=True, tag=True):
    """Tell the worker that nothing of `epoch` or before is left for it: the answer to its request of this ticket."""

    worker: int
    incarnation: int
    ticket: int
    epoch: int


class CloseEpoch(Struct, frozen=True, array_like=True, tag=True):
    """Every position of this epoch has been acknowledged: forget it."""

    epoch: int


DispatchEvent = ViewChanged | LeaseRequested | LeaseAcknowledged | LeaseReturned
DispatchAction = GrantLease | SkipEpoch | CloseEpoch


class Epoch:
    """An open epoch knows which positions are unassigned, and how many were consumed.

    Stripe j holds the positions start + j + k * N, from k = offsets[j] on.
    """

    def __init__(self, size: int, stripes: int) -> None:
        self.size = size
        self.start = 0
        self.offsets = [0] * stripes
        self.reclaimed: list[range] = []
        self.consumed = 0

    def stripe(self, stripe: int) -> range:
        """Returns what is left in a stripe."""
        stripes = len(self.offsets)
        return range(self.start + stripe + self.offsets[stripe] * stripes, self.size, stripes)

    def furthest(self) -> int:
        """Returns the position from which on all stripes are untouched."""
        return min(self.start + max(self.offsets, default=0) * len(self.offsets), self.size)

    def cut_stripes(self, stripes: int, start: int) -> None:
        """Cuts new stripes from `start` on, and reclaims what the old ones have left before that."""
        lefts = [self.stripe(stripe) for stripe in range(len(self.offsets))]
        self.reclaim(range(left.start, start, left.step) for left in lefts)
        self.start = start
        self.offsets = [0] * stripes

    def draw(self, stripe: int, count: int) -> list[range]:
        """Takes the next `count` positions of a stripe, or reclaimed ones when the stripe has no more."""
        drawn = [self.stripe(stripe)[:count]]
        self.offsets[stripe] += len(drawn[0])
        if not drawn[0]:
            drawn = cut(self.reclaimed, 0, count)
            self.reclaimed = cut(self.reclaimed, count, length(self.reclaimed))
        return drawn

    def reclaim(self, ranges: Iterable[range]) -> None:
        """Adds ranges to those that were reclaimed."""
        self.reclaimed = tidy(chain(self.reclaimed, filter(None, ranges)))


class Lease:
    """Positions that were granted to a worker; `unsettled` are the parts (start, stop) of them that it has not
    settled."""

    def __init__(self, epoch: int, ranges: Sequence[range]) -> None:
        self.epoch = epoch
        self.ranges = ranges
        self.unsettled = [(0, length(ranges))]

    def settle(self, start: int, stop: int) -> list[range]:
        """Settles this part of the lease, and returns what of it was unsettled."""
        taken, left = [], []
        for first, end in self.unsettled:
            low, high = max(first, start), min(end, stop)
            if low >= high:
                left.append((first, end))
                continue
            taken += cut(self.ranges, low, high)
            left += [part for part in ((first, low), (high, end)) if part[0] < part[1]]
        self.unsettled = left
        return taken


class LeaseHolder:
    """A member, with its leases by ticket, and the last answer in case it asks again."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.stripe = 0
        self.leases: dict[int, Lease] = {}
        self.answer: GrantLease | SkipEpoch | None = None


class SampleDispatcher:
    """Grants the positions of epochs of `size`, the first of them numbered `first`; the module explains `lead`."""

    def __init__(self, size: int, lead: int = 1, first: int = 0, shared: bool = False) -> None:
        if size < 1 or lead < 0 or first < 0:
            raise ConfigError(f"a dispatcher needs size >= 1, lead >= 0 and first >= 0, got {size}, {lead} and {first}")
        self.size = size
        self.lead = lead
        self.shared = shared
        """Whether all members take from one stripe."""
        self.view_number = 0
        self.holders: dict[int, LeaseHolder] = {}
        """The members by rank, in rank order."""
        self.early: dict[int, LeaseRequested] = {}
        """The newest request of each rank that no view has named yet."""
        self.epochs: dict[int, Epoch] = {}
        """The open epochs, oldest first."""
        self.unopened = first
        self.actions: list[DispatchAction] = []
        self.checks = False

    def handle(self, event: DispatchEvent) -> list[DispatchAction]:
        """Takes one event; nothing else changes the state, and equal events in equal order give equal actions."""
        actions: list[DispatchAction] = []
        self.actions = actions
        match event:
            case ViewChanged(view=view):
                self.on_view_changed(view)
            case LeaseRequested():
                self.on_lease_requested(event)
            case LeaseAcknowledged() | LeaseReturned():
                self.on_lease_settled(event)
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
        if members == {rank: holder.incarnation for rank, holder in self.holders.items()}:
            return
        for rank, holder in self.holders.items():
            if members.get(rank) != holder.incarnation:
                for lease in holder.leases.values():
                    self.epochs[lease.epoch].reclaim(lease.settle(0, self.size))
        self.holders = {rank: self.holder_of(rank, incarnation) for rank, incarnation in members.items()}
        for stripe, holder in enumerate(self.holders.values()):
            holder.stripe = 0 if self.shared else stripe
        for epoch in self.epochs.values():
            epoch.cut_stripes(self.stripes, start=epoch.furthest())
        for rank, holder in self.holders.items():
            if rank in self.early and self.early[rank].incarnation <= holder.incarnation:
                self.on_lease_requested(self.early.pop(rank))

    @property
    def stripes(self) -> int:
        return min(1, len(self.holders)) if self.shared else len(self.holders)

    def left(self, epoch: int) -> tuple[int, int]:
        """Returns the epoch that a request for `epoch` would be granted from, and how much it has left, if `shared`."""
        for number, each in self.epochs.items():
            left = len(each.stripe(0)) + length(each.reclaimed) if number <= epoch and each.offsets else 0
            if left:
                return number, left
        return epoch, self.size if epoch == self.unopened else 0

    def holder_of(self, rank: int, incarnation: int) -> LeaseHolder:
        """Returns the holder with its leases if it stays a member, else a new one."""
        known = self.holders.get(rank)
        return known if known is not None and known.incarnation == incarnation else LeaseHolder(incarnation)

    def on_lease_requested(self, event: LeaseRequested) -> None:
        if not 0 <= event.epoch <= self.unopened or event.count < 1:
            raise IllegalEvent(
                f"worker {event.worker} asked for {event.count} positions of epoch {event.epoch}: "
                f"at least 1, and of an epoch up to {self.unopened}"
            )
        holder = self.holders.get(event.worker)
        if holder is None or event.incarnation > holder.incarnation:
            known = self.early.get(event.worker, event)
            self.early[event.worker] = max(known, event, key=lambda early: (early.incarnation, early.ticket))
        elif event.incarnation < holder.incarnation:
            return  # a former incarnation
        elif holder.answer is None or event.ticket > holder.answer.ticket:
            holder.answer = self.answer(event, holder)
            self.actions.append(holder.answer)
        elif event.ticket == holder.answer.ticket:
            self.actions.append(holder.answer)

    def answer(self, event: LeaseRequested, holder: LeaseHolder) -> GrantLease | SkipEpoch:
        if event.epoch == self.unopened:
            self.epochs[event.epoch] = Epoch(self.size, self.stripes)
            self.unopened += 1
        for number, epoch in self.epochs.items():
            if number > event.epoch:
                break
            drawn = epoch.draw(holder.stripe, event.count)
            if not drawn and number < event.epoch - self.lead:
                epoch.cut_stripes(self.stripes, start=self.size)
                drawn = epoch.draw(holder.stripe, event.count)
            if drawn:
                holder.leases[event.ticket] = Lease(number, drawn)
                strides = tuple(Stride(each.start, each.stop, each.step) for each in drawn)
                return GrantLease(event.worker, event.incarnation, event.ticket, number, strides)
        return SkipEpoch(event.worker, event.incarnation, event.ticket, event.epoch)

    def on_lease_settled(self, event: LeaseAcknowledged | LeaseReturned) -> None:
        holder = self.holders.get(event.worker)
        if holder is None or holder.incarnation != event.incarnation or event.ticket not in holder.leases:
            return  # a former incarnation, or settled before
        lease = holder.leases[event.ticket]
        if not 0 <= event.start <= event.stop <= length(lease.ranges):
            raise IllegalEvent(
                f"worker {event.worker} settled {event.start} to {event.stop} of a lease of {length(lease.ranges)}"
            )
        ranges = lease.settle(event.start, event.stop)
        if isinstance(event, LeaseAcknowledged):
            self.epochs[lease.epoch].consumed += length(ranges)
        else:
            self.epochs[lease.epoch].reclaim(ranges)
        if not lease.unsettled:
            del holder.leases[event.ticket]

    def settle(self) -> None:
        """Closes the epochs that are all consumed."""
        for number in [number for number, epoch in self.epochs.items() if epoch.consumed == self.size]:
            del self.epochs[number]
            self.actions.append(CloseEpoch(number))

    def check(self) -> None:
        """Checks by number that no position is lost and none is in two places."""
        held = dict.fromkeys(self.epochs, 0)
        for holder in self.holders.values():
            for ticket, lease in holder.leases.items():
                require(lease.unsettled != [], f"lease {ticket} is kept although it is settled")
                held[lease.epoch] += sum(stop - start for start, stop in lease.unsettled)
        for number, epoch in self.epochs.items():
            require(len(epoch.offsets) == self.stripes, f"epoch {number} has stripes for {len(epoch.offsets)}")
            unassigned = self.size - epoch.start - sum(epoch.offsets) + length(epoch.reclaimed)
            where = f"{unassigned} unassigned, {held[number]} in leases, {epoch.consumed} consumed"
            require(unassigned + held[number] + epoch.consumed == self.size, f"epoch {number} of {self.size}: {where}")


def length(ranges: Iterable[range]) -> int:
    return sum(len(each) for each in ranges)


def cut(ranges: Iterable[range], start: int, stop: int, step: int = 1) -> list[range]:
    """Returns ranges[start:stop:step], as if the ranges were one list."""
    parts = []
    for each in ranges:
        if start >= stop:
            break
        part = each[start : min(stop, len(each)) : step]
        if part:
            parts.append(part)
        start += len(part) * step - len(each)
        stop -= len(each)
    return parts


def tidy(ranges: Iterable[range]) -> list[range]:
    """Returns the same positions in the order of their first ones, with ranges joined that continue each other."""
    joined: list[range] = []
    for each in sorted(ranges, key=lambda each: (each.step, each.start % each.step, each.start)):
        if joined and joined[-1].step == each.step and joined[-1][-1] + each.step == each.start:
            each = range(joined.pop().start, each.stop, each.step)
        joined.append(each)
    return sorted(joined, key=lambda each: (each.start, each.step))
