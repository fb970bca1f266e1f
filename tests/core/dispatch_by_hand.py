"""A sample dispatcher told what happens by hand: short names for its events, and what it answers."""

from __future__ import annotations

from paceline.core.events import ViewChanged
from paceline.core.messages import View
from paceline.core.sample_dispatch import (
    DispatchAction,
    GrantLease,
    LeaseAcknowledged,
    LeaseRequested,
    LeaseReturned,
    SampleDispatcher,
    SkipEpoch,
)

ALL = 1 << 40
Process = tuple[int, int]


def dispatcher_of(size: int, workers: int, lead: int = 1) -> SampleDispatcher:
    dispatcher = SampleDispatcher(size, lead)
    dispatcher.checks = True
    show(dispatcher, 1, *((rank, 0) for rank in range(workers)))
    return dispatcher


def show(dispatcher: SampleDispatcher, number: int, *members: Process) -> list[DispatchAction]:
    return dispatcher.handle(ViewChanged(0.0, View(number, members)))


def ask(
    dispatcher: SampleDispatcher, worker: int, ticket: int, epoch: int = 0, count: int = ALL, incarnation: int = 0
) -> GrantLease | SkipEpoch:
    (answer,) = dispatcher.handle(LeaseRequested(0.0, worker, incarnation, ticket, epoch, count))
    assert isinstance(answer, GrantLease | SkipEpoch)
    assert (answer.worker, answer.incarnation, answer.ticket) == (worker, incarnation, ticket)
    return answer


def granted(
    dispatcher: SampleDispatcher, worker: int, ticket: int, epoch: int = 0, count: int = ALL, incarnation: int = 0
) -> list[int]:
    answer = ask(dispatcher, worker, ticket, epoch, count, incarnation)
    return list(answer.positions()) if isinstance(answer, GrantLease) else []


def acknowledged(
    dispatcher: SampleDispatcher, worker: int, ticket: int, start: int, stop: int, incarnation: int = 0
) -> list[DispatchAction]:
    return dispatcher.handle(LeaseAcknowledged(0.0, worker, incarnation, ticket, start, stop))


def returned(
    dispatcher: SampleDispatcher, worker: int, ticket: int, start: int, stop: int, incarnation: int = 0
) -> list[DispatchAction]:
    return dispatcher.handle(LeaseReturned(0.0, worker, incarnation, ticket, start, stop))


def footprint(dispatcher: SampleDispatcher) -> int:
    """How many numbers, ranges and parts the dispatcher keeps."""
    total = len(dispatcher.holders) + len(dispatcher.early)
    for epoch in dispatcher.epochs.values():
        total += 1 + len(epoch.offsets) + len(epoch.reclaimed)
    for holder in dispatcher.holders.values():
        total += sum(len(lease.ranges) + len(lease.unsettled) for lease in holder.leases.values())
    return total
