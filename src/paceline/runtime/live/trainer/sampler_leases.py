"""The leases of one sampler: which samples the script draws next, and which of them a step has used.

`trainer/sample_leases.py` explains the rules.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from paceline.core.sample_dispatch import GrantLease
from paceline.errors import PacelineError
from paceline.runtime.live.system.training_end import TrainingEnd
from paceline.runtime.live.trainer.data_loaders import find_loader
from paceline.runtime.live.trainer.lease_requests import CURRENT, LeaseRequests

FEW_STEPS, MANY_STEPS, PARTS = 4, 32, 8
"""A lease is one of PARTS parts of a worker's share, but from FEW_STEPS to MANY_STEPS steps' worth."""
FIRST_GUESS = 8
"""Samples of a step, before the first one."""


class SampleLease:
    """The samples of one lease: the first `drawn` of them were drawn, and the first `settled` of those settled."""

    __slots__ = ("batch", "drawn", "epoch", "samples", "settled", "ticket")

    def __init__(self, ticket: int, epoch: int, samples: list[int], batch: int | None = None) -> None:
        """`batch` is how many samples a step is to use, if batches are balanced."""
        self.ticket = ticket
        self.batch = batch
        self.epoch = epoch
        self.samples = samples
        self.drawn = 0
        self.settled = 0


class LeasedSamples:
    """The leases with samples that are not settled, oldest first."""

    def __init__(self) -> None:
        self.leases: deque[SampleLease] = deque()
        self.current = SampleLease(0, CURRENT, [])
        """The lease that is drawn from."""

    @property
    def unsettled(self) -> int:
        """How many samples were drawn and are not settled."""
        return sum(lease.drawn - lease.settled for lease in self.leases)

    def undrawn(self) -> SampleLease | None:
        """Returns the oldest lease with samples that were not drawn."""
        return next((lease for lease in self.leases if lease.drawn < len(lease.samples)), None)

    def settle(self, most: int) -> Iterator[Part]:
        """Settles drawn samples, oldest first and no more than `most`; yields each part."""
        for lease in self.leases:
            start = lease.settled
            lease.settled = stop = min(lease.drawn, start + most)
            if stop > start:
                most -= stop - start
                yield Part(lease.ticket, start, stop)
        while self.leases and self.leases[0].settled == len(self.leases[0].samples):
            self.leases.popleft()

    def put_back(self, count: int) -> None:
        """Returns the last `count` drawn samples: they are drawn next, by the next iteration if need be."""
        for lease in reversed(self.leases):
            part = min(count, lease.drawn - lease.settled)
            lease.drawn -= part
            count -= part
            if part:
                self.current = lease


class Part(NamedTuple):
    """The samples of a lease from `start` to before `stop`."""

    ticket: int
    start: int
    stop: int


class PassStart(NamedTuple):
    """Where a sampler was when a pass began that may be given up."""

    iteration: int = 0
    yielded: int = 0
    used: int = 0
    """Samples that the step had used by then."""


class SamplerLeases:
    """Draws samples from the leases of one sampler, and settles those that steps have used."""

    def __init__(
        self,
        requests: LeaseRequests,
        share: int,
        per_step: int | None,
        end: TrainingEnd,
        check_caller: Callable[[], None],
    ) -> None:
        """`share` is this worker's part of an epoch; `check_caller` refuses threads that must not draw."""
        self.requests = requests
        self.share = share
        self.per_step = per_step
        self.end = end
        self.check_caller = check_caller
        self.leased = LeasedSamples()
        self.step_samples = per_step or FIRST_GUESS
        """How many samples a step uses: as the script says, or the most seen so far."""
        self.iteration = 0
        self.settled = 0
        """Samples settled in this iteration."""
        self.used: Callable[[], int] | None = None
        """Tells how many samples were used in this iteration, if the loader knows."""
        self.exhausted = False
        """Whether this iteration yields nothing more."""
        self.yielded = 0
        """Samples yielded in all iterations."""
        self.pass_start = PassStart()
        self.draws_inside = False
        """Whether a pass was seen to draw."""
        self.aborted = (0, 0)
        """(offset, count) of the samples consumed by an aborted pass, among those the step has used."""
        self.held: list[Part] = []
        """What the steps of a round have used, until the round ends."""

    def draw(self) -> Iterator[int]:
        """Yields the samples of one iteration, until the epoch is over for this worker or training has ended."""
        if self.end:
            self.end.check()
            return
        self.check_caller()
        loader = find_loader()
        if self.per_step is None and loader.ahead is not None and loader.used() is None:
            raise PacelineError(
                "this DataLoader draws ahead of the loop, and its batches are not torch's: say how many samples a step "
                "uses, paceline.Sampler(data, per_step=...)"
            )
        iteration, before, leased = self._begin_iteration(loader.used()), self.yielded, self.leased
        while (lease := self._next_lease(self.yielded > before)) is not None:
            leased.current = lease
            # Meanwhile drawn samples may be put back, even into the lease before.
            while leased.current is lease and lease.drawn < len(lease.samples):
                if self.end:
                    return
                lease.drawn += 1
                self.yielded += 1
                yield lease.samples[lease.drawn - 1]
                if self.iteration != iteration:
                    raise PacelineError("two loops draw from one paceline.Sampler: make a sampler for each")
            self.check_caller()
        self.exhausted = True
        leased.put_back((self.yielded - before) % loader.whole)

    def _begin_iteration(self, used: Callable[[], int] | None) -> int:
        """Begins an iteration, whose loader may know what is `used`; returns its number."""
        self.iteration += 1
        self.settle(counted=False)
        self.settled, self.used, self.aborted = 0, used, (0, 0)
        self.exhausted = False
        return self.iteration

    def _next_lease(self, drew: bool) -> SampleLease | None:
        """Returns the lease to draw from; None if the iteration, which `drew` something already, is over."""
        lease = self.leased.undrawn()
        while lease is None:
            if not self.requests.open and self.requests.answer is None:
                self.requests.request(self.lease_size())
            answer = self.requests.take_answer()
            if isinstance(answer, GrantLease):
                samples = self.requests.samples(answer)
                lease = SampleLease(answer.ticket, answer.epoch, samples, self.requests.batch)
                self.leased.leases.append(lease)
            self.requests.request(self.lease_size())
            if drew:
                break
        return lease

    def lease_size(self) -> int:
        """Returns how many samples the next lease is to have."""
        if self.per_step is None:
            self.step_samples = max(self.step_samples, self.leased.unsettled)
        return min(max(self.share // PARTS, FEW_STEPS * self.step_samples), MANY_STEPS * self.step_samples)

    def settle(self, counted: bool, most: int = sys.maxsize) -> None:
        """Settles drawn samples, oldest first and no more than `most`."""
        self._note(counted, self._take(most))

    def settle_step(self, counted: bool) -> None:
        """A step was taken: the samples it used are acknowledged or returned."""
        offset, aborted = self.aborted
        if aborted:
            self.aborted = (0, 0)
            self.settle(counted, offset)
            self.settle(False, aborted)
        self._note(counted, self._take_used())

    def hold_step(self) -> None:
        """A step of a round was taken: the samples it used are settled with the round."""
        self.held += self._take_used()

    def settle_round(self, counted: bool) -> None:
        """A round has ended: the samples its steps have used are acknowledged or returned."""
        held, self.held = self.held, []
        self._note(counted, held)

    def _take_used(self) -> list[Part]:
        """Returns what a step has used, which is settled from now on."""
        if self.per_step is not None:
            return self._take(self.per_step)
        if self.used is not None:
            return self._take(max(self.used() - self.settled, 0))
        taken = self._take(sys.maxsize)
        self.step_samples = max(self.step_samples, sum(part.stop - part.start for part in taken))
        return taken

    def _take(self, most: int) -> list[Part]:
        taken = list(self.leased.settle(most))
        self.settled += sum(part.stop - part.start for part in taken)
        return taken

    def _note(self, counted: bool, parts: Iterable[Part]) -> None:
        for part in parts:
            self.requests.note(counted, *part)

    def used_in_step(self) -> int:
        """Returns how many samples were used since the step before, as far as is known."""
        if self.used is not None:
            return max(self.used() - self.settled, 0)
        return self.leased.unsettled

    def weight(self) -> int:
        """Returns how many samples the gradient of this step stands for: none of a pass that was given up."""
        used = self.used_in_step() if self.per_step is None else self.per_step
        return min(used, self.leased.unsettled) - (self.aborted[1] if self.per_step is None else 0)

    def begin_pass(self) -> None:
        """A pass begins that may be given up."""
        self.pass_start = PassStart(self.iteration, self.yielded, self.used_in_step())

    def may_repeat(self) -> bool:
        """Returns whether a second run of the pass finds samples: False if it has drawn the last of the iteration."""
        if not self.exhausted:
            return True
        drew = self.yielded != self.pass_start.yielded
        unsettled = self.leased.unsettled
        if self.per_step is not None:
            return not (self.draws_inside or drew) or unsettled >= 2 * self.per_step
        used = self.used_in_step()
        drawn = used - self._used_before_pass()
        return drawn <= 0 or (self.used is not None and unsettled - used >= drawn)

    def end_pass(self, given_up: bool) -> None:
        """The pass has ended. If it is given up, the samples it has drawn itself are not used."""
        self.draws_inside |= self.yielded != self.pass_start.yielded
        if not given_up:
            return
        before = self._used_before_pass()
        if self.per_step is not None:
            # Who draws ahead has nothing more to draw in the last passes of an iteration.
            self.aborted = (0, self.per_step) if self.draws_inside else (0, 0)
        elif self.used is not None:
            self.aborted = (before, max(self.used_in_step() - before, 0))
        else:
            self.leased.put_back(max(self.used_in_step() - before, 0))

    def _used_before_pass(self) -> int:
        """Returns what the step had used when the pass began; a new iteration has returned it."""
        return self.pass_start.used if self.iteration == self.pass_start.iteration else 0
