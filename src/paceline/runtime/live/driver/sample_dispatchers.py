"""The driver's side of leasing samples: a dispatcher for each sampler of the script (`core/sample_dispatch.py`).

Workers name a sampler by its number, the order in which the script made them. The first message about a sampler sets
its size and seed; a worker that has others for it is refused, since the two would mean different samples by the same
position.

The driver numbers the views, so it can tell a dispatcher at once whose leases are to be reclaimed. Nobody waits for a
dispatcher: a request is answered in the turn in which it is heard. Where batches are balanced the answer says how large
they are to be, and the lease is as many samples as a round of them needs (`core/control/batch_balance.py`).

A resumed run starts the oldest epoch that was not finished when its checkpoint was ordered over again. What was
acknowledged by then had counted before the servers wrote, so nothing is lost; some of that epoch comes twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import assert_never

from msgspec import structs

from paceline.core.control.batch_balance import BatchBalance, BatchRequested
from paceline.core.events import ViewChanged
from paceline.core.messages import View
from paceline.core.policy import Policy
from paceline.core.sample_dispatch import (
    CloseEpoch,
    DispatchAction,
    GrantLease,
    LeaseRequested,
    SampleDispatcher,
    SkipEpoch,
)
from paceline.errors import ConfigError
from paceline.runtime.balance import check_balance
from paceline.runtime.live.protocol import lease_messages, wire
from paceline.runtime.live.trainer.lease_requests import CURRENT


class SamplerDispatch:
    """The dispatcher of one sampler, with the size and the seed that the sampler has on every worker."""

    def __init__(self, size: int, seed: int, first: int, batch: int | None) -> None:
        """`batch` is the size of equal batches, if they are to be balanced."""
        self.size = size
        self.seed = seed
        self.first = first
        self.machine = SampleDispatcher(size, first=first, shared=batch is not None)
        self.balance = BatchBalance(batch) if batch is not None else None
        self.batches: dict[tuple[int, int], int] = {}
        """What each (worker, incarnation) was told last to take in a step, if batches are balanced."""
        self.asked: dict[tuple[int, int], int] = {}
        """The epoch each (worker, incarnation) asked for last."""

    def current(self) -> int:
        """The newest epoch that somebody is in."""
        return max(self.machine.unopened - 1, self.first)

    def see(self, at: float, view: View) -> list[DispatchAction]:
        """Tells both machines who takes part."""
        if self.balance is not None:
            self.balance.handle(ViewChanged(at, view))
        return self.machine.handle(ViewChanged(at, view))

    def count(self, epoch: int, asked: BatchRequested) -> int:
        """Returns how many samples a worker gets whose batches are balanced; 1 if there is nothing left to share."""
        assert self.balance is not None
        number, left = self.machine.left(epoch)
        if not left:
            return 1
        orders = self.balance.handle(structs.replace(asked, epoch=number, left=left))
        for order in orders:
            self.batches[order.worker, order.incarnation] = order.samples
        return orders[-1].samples * orders[-1].steps if orders else 1

    def finished(self) -> list[int]:
        """The epochs of which every sample was part of a gradient that counted."""
        return [epoch for epoch in range(self.first, self.machine.unopened) if epoch not in self.machine.epochs]


class SampleDispatchers:
    """All dispatchers of a run, by the number of their sampler."""

    def __init__(
        self,
        resumed: dict[int, int],
        now: Callable[[], float],
        tell_worker: Callable[[int, int, wire.ToWorker], None],
        policy: Callable[[], Policy | None],
    ) -> None:
        """`resumed` is, of each sampler, the epoch that a resumed run starts with; `policy` is the run's."""
        self.resumed = resumed
        self.now = now
        self.tell_worker = tell_worker
        self.policy = policy
        self.dispatches: dict[int, SamplerDispatch] = {}
        self.view = View(0, ())
        """The newest, without peers that are done."""

    def announce(self, view: View) -> None:
        self.view = view
        for sampler, dispatch in self.dispatches.items():
            self.carry_out(sampler, dispatch.see(self.now(), view))

    def hear(self, message: lease_messages.LeaseEvents) -> None:
        asked = message.batches
        try:
            if asked is not None and (policy := self.policy()) is not None:
                check_balance(policy)
        except ConfigError as error:
            self.tell_worker(message.rank, message.incarnation, wire.Refuse(str(error)))
            return
        dispatch = self.dispatches.get(message.sampler) or self.open(message)
        if (message.size, message.seed) != (dispatch.size, dispatch.seed):
            reason = (
                f"paceline.Sampler {message.sampler} of worker {message.rank} has {message.size} samples and seed "
                f"{message.seed}, another worker's has {dispatch.size} and {dispatch.seed}: make the same samplers in "
                "the same order on every worker"
            )
            self.tell_worker(message.rank, message.incarnation, wire.Refuse(reason))
            return
        batch = dispatch.balance.batch if dispatch.balance is not None else None
        requests = any(isinstance(event, LeaseRequested) for event in message.events)
        if requests and batch != (None if asked is None else asked.batch):
            reason = (
                f"paceline.BatchSampler {message.sampler} of worker {message.rank} has other batches than another "
                "worker's: give batch_size and balance alike on every worker"
            )
            self.tell_worker(message.rank, message.incarnation, wire.Refuse(reason))
            return
        for event in message.events:
            if isinstance(event, LeaseRequested):
                epoch = dispatch.current() if event.epoch == CURRENT else event.epoch
                count = event.count if asked is None else dispatch.count(epoch, asked)
                event = structs.replace(event, epoch=epoch, count=count)
                dispatch.asked[event.worker, event.incarnation] = epoch
            self.carry_out(message.sampler, dispatch.machine.handle(event))

    def open(self, message: lease_messages.LeaseEvents) -> SamplerDispatch:
        first = self.resumed.get(message.sampler, 0)
        batch = message.batches.batch if message.batches is not None else None
        dispatch = self.dispatches[message.sampler] = SamplerDispatch(message.size, message.seed, first, batch)
        dispatch.see(self.now(), self.view)
        return dispatch

    def carry_out(self, sampler: int, actions: Iterable[DispatchAction]) -> None:
        for action in actions:
            match action:
                case GrantLease() | SkipEpoch():
                    process, dispatch = (action.worker, action.incarnation), self.dispatches[sampler]
                    answer = lease_messages.LeaseAnswer(
                        sampler, dispatch.asked[process], action, dispatch.batches.get(process)
                    )
                    self.tell_worker(*process, answer)
                case CloseEpoch():
                    pass  # the dispatcher has forgotten it, and nobody else kept anything of it
                case _:
                    assert_never(action)

    def unfinished(self) -> dict[int, int]:
        """Of each sampler: the oldest epoch that is not finished."""
        machines = {number: dispatch.machine for number, dispatch in self.dispatches.items()}
        oldest = {number: min(machine.epochs, default=machine.unopened) for number, machine in machines.items()}
        return {**self.resumed, **oldest}
