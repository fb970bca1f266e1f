"""Sample dispatchers that break one rule each. The docstring says which; the table below, what the judge must say."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest

from paceline.core.messages import View
from paceline.core.sample_dispatch import (
    CloseEpoch,
    Epoch,
    GrantLease,
    Lease,
    LeaseAcknowledged,
    LeaseHolder,
    LeaseRequested,
    LeaseReturned,
    SampleDispatcher,
    SkipEpoch,
    cut,
)

from .dispatch_judge import (
    Broken,
    random_run,
)

honest_view, honest_request, honest_answer = (
    SampleDispatcher.on_view_changed,
    SampleDispatcher.on_lease_requested,
    SampleDispatcher.answer,
)
honest_settled, honest_settle = SampleDispatcher.on_lease_settled, Lease.settle
honest_furthest, honest_cut, honest_draw = Epoch.furthest, Epoch.cut_stripes, Epoch.draw


def forget_the_lost(self: SampleDispatcher, view: View) -> None:
    """What a lost worker held is lost."""
    for rank, holder in self.holders.items():
        if view.number > self.view_number and dict(view.members).get(rank) != holder.incarnation:
            holder.leases.clear()
    honest_view(self, view)


def reclaim_every_lease(self: SampleDispatcher, view: View) -> None:
    """What those who stay hold is granted again."""
    for holder in self.holders.values():
        for lease in holder.leases.values():
            self.epochs[lease.epoch].reclaim(lease.settle(0, self.size))
    honest_view(self, view)


def take_any_view(self: SampleDispatcher, view: View) -> None:
    """The last view to arrive counts, whatever its number."""
    self.view_number = 0
    honest_view(self, view)


def forget_the_early(self: SampleDispatcher, view: View) -> None:
    """A request of somebody no view has named yet is thrown away."""
    self.early.clear()
    honest_view(self, view)


def grant_repeats(self: SampleDispatcher, event: LeaseRequested) -> None:
    """A request that comes again gets another lease."""
    if event.worker in self.holders and event.incarnation == self.holders[event.worker].incarnation:
        self.holders[event.worker].answer = None
    honest_request(self, event)


def answer_ghosts(self: SampleDispatcher, event: LeaseRequested) -> None:
    """What a former incarnation asks for is granted to the next one."""
    if event.worker in self.holders and event.incarnation < self.holders[event.worker].incarnation:
        event = msgspec.structs.replace(event, incarnation=self.holders[event.worker].incarnation)
    honest_request(self, event)


def wait_for_the_slow(self: SampleDispatcher, event: LeaseRequested) -> None:
    """Nobody begins an epoch before the last one is finished."""
    if event.epoch < self.unopened or not self.epochs:
        honest_request(self, event)


def never_help(self: SampleDispatcher, event: LeaseRequested, holder: LeaseHolder) -> GrantLease | SkipEpoch:
    """The stripes of the slow are theirs for ever."""
    self.lead = 1000
    return honest_answer(self, event, holder)


def look_at_one_epoch(self: SampleDispatcher, event: LeaseRequested, holder: LeaseHolder) -> GrantLease | SkipEpoch:
    """What is left of older epochs is not granted."""
    older = {number: self.epochs.pop(number) for number in list(self.epochs) if number < event.epoch}
    answer = honest_answer(self, event, holder)
    self.epochs = older | self.epochs
    return answer


def consume_what_is_returned(self: SampleDispatcher, event: LeaseAcknowledged | LeaseReturned) -> None:
    """A gradient that counted nowhere counts."""
    honest_settled(self, LeaseAcknowledged(*msgspec.structs.astuple(event)))


def reclaim_what_is_consumed(self: SampleDispatcher, event: LeaseAcknowledged | LeaseReturned) -> None:
    """A gradient that counted is computed again."""
    honest_settled(self, LeaseReturned(*msgspec.structs.astuple(event)))


def let_ghosts_settle(self: SampleDispatcher, event: LeaseAcknowledged | LeaseReturned) -> None:
    """The reports of a former incarnation count for the next one."""
    if event.worker in self.holders and event.ticket in self.holders[event.worker].leases:
        holder = self.holders[event.worker]
        stop = min(event.stop, holder.leases[event.ticket].unsettled[-1][1])
        start = min(event.start, stop)
        event = msgspec.structs.replace(event, incarnation=holder.incarnation, start=start, stop=stop)
    honest_settled(self, event)


def settle_up_to(self: Lease, start: int, stop: int) -> list[range]:
    """A high-water mark: what comes before the part is settled with it, though it may be returned later."""
    return honest_settle(self, 0, stop)


def settle_again(self: Lease, start: int, stop: int) -> list[range]:
    """What was settled before is settled again."""
    honest_settle(self, start, stop)
    return cut(self.ranges, start, stop)


def never_close(self: SampleDispatcher) -> None:
    """An epoch stays open."""


def close_when_granted(self: SampleDispatcher) -> None:
    """An epoch is closed when all of it is in leases."""
    for number in [n for n, epoch in self.epochs.items() if epoch.furthest() == self.size and not epoch.reclaimed]:
        del self.epochs[number]
        self.actions.append(CloseEpoch(number))


def start_at_the_slowest(self: Epoch) -> int:
    """New stripes start where the slowest stripe is."""
    return min(self.start + min(self.offsets, default=0) * len(self.offsets), self.size)


def forget_who_is_behind(self: Epoch, stripes: int, start: int) -> None:
    """What the slower stripes have left is lost."""
    self.start, self.offsets = start, [0] * stripes


def keep_the_offsets(self: Epoch, stripes: int, start: int) -> None:
    """New stripes begin as far on as the old ones were."""
    offsets = self.offsets
    honest_cut(self, stripes, start)
    self.offsets = (offsets + [0] * stripes)[:stripes]


def draw_reclaimed_twice(self: Epoch, stripe: int, count: int) -> list[range]:
    """What is reclaimed stays reclaimed when it is granted."""
    reclaimed = self.reclaimed
    drawn = honest_draw(self, stripe, count)
    self.reclaimed = reclaimed
    return drawn


def draw_one_more(self: Epoch, stripe: int, count: int) -> list[range]:
    """Leases are larger than asked for."""
    return honest_draw(self, stripe, count + 1)


BROKEN: list[tuple[type, str, Callable[..., object], str]] = [
    (SampleDispatcher, "on_view_changed", forget_the_lost, "is unassigned"),
    (SampleDispatcher, "on_view_changed", reclaim_every_lease, "granted to"),
    (SampleDispatcher, "on_view_changed", take_any_view, "0 answers"),
    (SampleDispatcher, "on_view_changed", forget_the_early, "forgotten"),
    (SampleDispatcher, "on_lease_requested", grant_repeats, "and now by"),
    (SampleDispatcher, "on_lease_requested", answer_ghosts, "ghost"),
    (SampleDispatcher, "on_lease_requested", wait_for_the_slow, "0 answers"),
    (SampleDispatcher, "answer", never_help, "is unassigned"),
    (SampleDispatcher, "answer", look_at_one_epoch, "is unassigned"),
    (SampleDispatcher, "on_lease_settled", consume_what_is_returned, "are full"),
    (SampleDispatcher, "on_lease_settled", reclaim_what_is_consumed, "is consumed"),
    (SampleDispatcher, "on_lease_settled", let_ghosts_settle, "are full"),
    (SampleDispatcher, "settle", never_close, "are full"),
    (SampleDispatcher, "settle", close_when_granted, "are full"),
    (Lease, "settle", settle_up_to, "are full"),
    (Lease, "settle", settle_again, "is consumed"),
    (Epoch, "furthest", start_at_the_slowest, "granted to"),
    (Epoch, "cut_stripes", forget_who_is_behind, "never finished"),
    (Epoch, "cut_stripes", keep_the_offsets, "never finished"),
    (Epoch, "draw", draw_reclaimed_twice, "granted to"),
    (Epoch, "draw", draw_one_more, "asked for"),
]


@pytest.mark.parametrize(("owner", "name", "wrong", "verdict"), BROKEN, ids=lambda it: getattr(it, "__name__", ""))
def test_a_broken_dispatcher_is_caught(
    owner: type, name: str, wrong: Callable[..., object], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the judge, from outside: the dispatcher's own `check()` is off."""
    monkeypatch.setattr(owner, name, wrong)
    assert any(verdict in error for error in broken_rules())


def broken_rules() -> Iterator[str]:
    for seed in range(80):
        try:
            random_run(seed, checks=False)
        except Broken as error:
            yield str(error)
        except KeyError:
            yield "the dispatcher fell over"
