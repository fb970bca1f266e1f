"""How a worker asks the driver for leases of samples, and reports what became of the samples it was granted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.core.control.batch_balance import BatchRequested
from paceline.core.sample_dispatch import GrantLease, LeaseAcknowledged, LeaseRequested, LeaseReturned, SkipEpoch
from paceline.runtime.live.protocol import lease_messages
from paceline.runtime.live.trainer.run_connection import RunConnection
from paceline.sample_order import permutation

CURRENT = -1
"""In a request: the epoch that the others are in."""


class LeaseRequests:
    """One sampler's requests for leases; one at a time is open, and reports travel with the next one."""

    def __init__(
        self, run: RunConnection, await_driver: Callable[[], None], sampler: int, size: int, seed: int
    ) -> None:
        self.run = run
        self.await_driver = await_driver
        self.sampler = sampler
        self.size = size
        self.seed = seed
        self.epoch = CURRENT
        self.ticket = 0
        self.open = False
        """Whether a request is not answered yet."""
        self.answer: GrantLease | SkipEpoch | None = None
        """The answer to the last request, until it is taken."""
        self.batch: int | None = None
        """The samples of each batch of the last lease, if batches are balanced."""
        self.asks_for_batches: Callable[[float, int], BatchRequested] | None = None
        """Makes what goes with a request of this time and ticket, if batches are balanced."""
        self.reports: list[tuple[bool, int, int, int]] = []
        """(counted, ticket, start, stop) of the samples that are settled and not reported."""
        self.permutations: dict[int, NDArray[np.int64]] = {}

    def request(self, count: int) -> None:
        """Asks for a lease of so many samples."""
        self.ticket += 1
        self.open = True
        run = self.run
        self._send(LeaseRequested(run.now(), run.rank, run.incarnation, self.ticket, self.epoch, count))

    def receive(self, message: lease_messages.LeaseAnswer) -> None:
        """Takes an answer of the driver; one to an earlier request is ignored."""
        if self.open and message.answer.ticket == self.ticket:
            self.open = False
            self.epoch = message.epoch
            self.answer = message.answer
            self.batch = message.batch

    def take_answer(self) -> GrantLease | SkipEpoch:
        """Returns the answer to the last request, when it has come."""
        while self.answer is None:
            self.await_driver()
        answer, self.answer = self.answer, None
        if isinstance(answer, SkipEpoch):
            self.epoch = answer.epoch + 1
        return answer

    def samples(self, granted: GrantLease) -> list[int]:
        """Returns the samples at the granted positions of the epoch's permutation."""
        if granted.epoch not in self.permutations:
            while len(self.permutations) > 1:  # one before and this one: returned samples are of the epoch before
                del self.permutations[min(self.permutations)]
            self.permutations[granted.epoch] = permutation(self.size, self.seed, granted.epoch)
        order = self.permutations[granted.epoch]
        parts: list[list[int]] = [order[strip.start : strip.stop : strip.step].tolist() for strip in granted.strides]
        return parts[0] if len(parts) == 1 else [sample for part in parts for sample in part]

    def note(self, counted: bool, ticket: int, start: int, stop: int) -> None:
        """Has these samples of a lease reported, together with those before them if they were settled alike."""
        if self.reports:
            before = self.reports[-1]
            if before[0] == counted and before[1] == ticket and before[3] == start:
                start = before[2]
                self.reports.pop()
        self.reports.append((counted, ticket, start, stop))

    def report(self) -> None:
        """Reports at once what is settled, without a request."""
        if self.reports:
            self._send()

    def _send(self, *requests: LeaseRequested) -> None:
        run, now = self.run, self.run.now()
        settled: Sequence[LeaseAcknowledged | LeaseReturned] = [
            (LeaseAcknowledged if counted else LeaseReturned)(now, run.rank, run.incarnation, ticket, start, stop)
            for counted, ticket, start, stop in self.reports
        ]
        self.reports.clear()
        events = (*settled, *requests)
        batches = self.asks_for_batches(now, self.ticket) if requests and self.asks_for_batches is not None else None
        run.send(
            lease_messages.LeaseEvents(run.rank, run.incarnation, self.sampler, self.size, self.seed, events, batches)
        )
