"""The driver's side of leasing samples: a dispatcher for each sampler of the script (`core/sample_dispatch.py`).

Workers name a sampler by its number, the order in which the script made them. The first message about a sampler sets
its size and seed; a worker that has others for it is refused, since the two would mean different samples by the same
position.

The driver numbers the views, so it can tell a dispatcher at once whose leases are to be reclaimed. Nobody waits for a
dispatcher: a request is answered in the turn in which it is heard.

A resumed run starts the oldest epoch that was not finished when its checkpoint was ordered over again. What was
acknowledged by then had counted before the servers wrote, so nothing is lost; some of that epoch comes twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import assert_never

import msgspec

from paceline.core.events import ViewChanged
from paceline.core.messages import View
from paceline.core.sample_dispatch import (
    CloseEpoch,
    DispatchAction,
    GrantLease,
    LeaseRequested,
    SampleDispatcher,
    SkipEpoch,
)
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.trainer.lease_requests import CURRENT


class SamplerDispatch:
    """The dispatcher of one sampler, with the size and the seed that the sampler has on every worker."""

    def __init__(self, size: int, seed: int, first: int) -> None:
        self.size = size
        self.seed = seed
        self.first = first
        self.machine = SampleDispatcher(size, first=first)
        self.asked: dict[tuple[int, int], int] = {}
        """The epoch each (worker, incarnation) asked for last."""

    def current(self) -> int:
        """The newest epoch that somebody is in."""
        return max(self.machine.unopened - 1, self.first)

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
    ) -> None:
        """`resumed` is, of each sampler, the epoch that a resumed run starts with."""
        self.resumed = resumed
        self.now = now
        self.tell_worker = tell_worker
        self.dispatches: dict[int, SamplerDispatch] = {}
        self.view = View(0, ())
        """The newest, without peers that are done."""

    def announce(self, view: View) -> None:
        self.view = view
        for sampler, dispatch in self.dispatches.items():
            self.carry_out(sampler, dispatch.machine.handle(ViewChanged(self.now(), view)))

    def hear(self, message: wire.LeaseEvents) -> None:
        dispatch = self.dispatches.get(message.sampler) or self.open(message)
        if (message.size, message.seed) != (dispatch.size, dispatch.seed):
            reason = (
                f"paceline.Sampler {message.sampler} of worker {message.rank} has {message.size} samples and seed "
                f"{message.seed}, another worker's has {dispatch.size} and {dispatch.seed}: make the same samplers in "
                "the same order on every worker"
            )
            self.tell_worker(message.rank, message.incarnation, wire.Refuse(reason))
            return
        for event in message.events:
            if isinstance(event, LeaseRequested):
                epoch = dispatch.current() if event.epoch == CURRENT else event.epoch
                event = msgspec.structs.replace(event, epoch=epoch)
                dispatch.asked[event.worker, event.incarnation] = epoch
            self.carry_out(message.sampler, dispatch.machine.handle(event))

    def open(self, message: wire.LeaseEvents) -> SamplerDispatch:
        first = self.resumed.get(message.sampler, 0)
        dispatch = self.dispatches[message.sampler] = SamplerDispatch(message.size, message.seed, first)
        dispatch.machine.handle(ViewChanged(self.now(), self.view))
        return dispatch

    def carry_out(self, sampler: int, actions: Iterable[DispatchAction]) -> None:
        for action in actions:
            match action:
                case GrantLease() | SkipEpoch():
                    epoch = self.dispatches[sampler].asked[action.worker, action.incarnation]
                    self.tell_worker(action.worker, action.incarnation, wire.LeaseAnswer(sampler, epoch, action))
                case CloseEpoch():
                    pass  # the dispatcher has forgotten it, and nobody else kept anything of it
                case _:
                    assert_never(action)

    def unfinished(self) -> dict[int, int]:
        """Of each sampler: the oldest epoch that is not finished."""
        machines = {number: dispatch.machine for number, dispatch in self.dispatches.items()}
        oldest = {number: min(machine.epochs, default=machine.unopened) for number, machine in machines.items()}
        return {**self.resumed, **oldest}
