"""A worker's leases of samples: what it is granted, and what becomes of the samples that its script draws.

For each sampler a worker has one lease that the script draws from, and one in reserve. When it begins with the reserve
it asks the driver's dispatcher (`core/sample_dispatch.py`) for the next lease, so the answer is there long before it is
needed and nobody waits for a round trip, except for the very first lease. What was settled goes along with that
request: one message for a lease, not for a step.

How large a lease is. Large leases are few messages; small ones leave more to share with whoever joins, and less is
granted again when this worker is killed. A sampler yields single samples and does not know the batch; what a step has
used is known after the first one, and until then it is taken to be few. A lease is an eighth of this worker's share of
the epoch, but not less than 4 steps' worth and not more than 32.

What a step has used. The gradient does not say which samples are in it. So it is what was drawn since the step before,
which is exact for a loop that draws its batch, steps, and draws the next. A loader with processes of its own draws
ahead of the loop, but torch's knows how many batches it has handed over, and these are what was used. If anything else
draws ahead, the script must say how much a step uses (`per_step`), and each step settles so much of what was drawn,
oldest first: what was drawn ahead would otherwise be acknowledged by a step that has not seen it, and lost if its own
gradient is.

A step that counted on at least one shard acknowledges what it used; one that the policy dropped everywhere returns
it. A step that was skipped, or whose gradient was not finite, acknowledges too: the next try would be no better, and
a run in which a sample makes NaN, or that has diverged, would never end. What was drawn and not used is returned when
the script starts to draw anew, having left the loop early. What a loader drops because its last batch is not whole
counts as not drawn, and the next iteration begins with it: granted again it would be last again, in a share of few
batches, and dropped for ever. Reports wait for the next request, or for the end: if the worker is killed before, what
they say is granted again. At least once, never less.

A pass that is given up (`worker/abortable_step.py`) runs again. What it has drawn itself, in the closure, it will not
see a second time unless it is put back; so it is, and the second run draws the same samples. From a loader that draws
ahead the second run gets the next batches: those of the first are returned with the step. (With `per_step` they are
taken to be a step's worth, if a closure was ever seen to draw.) A pass that has drawn the last of an iteration is not
given up: its second run would find nothing, and after the last epoch nobody would draw what it had.

An iteration of a sampler ends when the dispatcher has nothing left of the epoch (`SkipEpoch`); the next one is then in
the next epoch. A loop that is left early goes on in the same epoch with what it had not drawn. An iteration is never
empty, whatever others took: a loop around the loader that waits for steps would otherwise spin.

With local steps a gradient stands for a round of steps. What each of them has used is held until the round ends, and
settled then: of a round that counts nowhere, or is lost with its worker, all samples are granted again.

All of this is in the thread that calls `step`, as everything that reads from connections.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from paceline.errors import PacelineError
from paceline.runtime.live.protocol import lease_messages
from paceline.runtime.live.system.training_end import TrainingEnd
from paceline.runtime.live.trainer.batch_leases import BatchLeases
from paceline.runtime.live.trainer.lease_requests import LeaseRequests
from paceline.runtime.live.trainer.run_connection import RunConnection
from paceline.runtime.live.trainer.sampler_leases import SamplerLeases
from paceline.sample_order import BatchSizes


class SampleLeases:
    """The leases of all samplers of this worker."""

    def __init__(self, run: RunConnection, end: TrainingEnd, await_driver: Callable[[], None]) -> None:
        """`await_driver` hears what the driver says next, if it says something soon."""
        self.run = run
        self.end = end
        self.await_driver = await_driver
        self.samplers: dict[int, SamplerLeases] = {}
        self.by_rounds = False
        """Whether what steps use is settled when their round ends (`hold`)."""
        self.last_weight = 1.0
        """What the last step weighed."""
        self.caller = os.getpid(), threading.get_ident()
        """The process and thread that made the optimizer: it alone may draw."""

    def check_caller(self, deed: str = "a paceline.Sampler was drawn from") -> None:
        """Refuses threads other than the one that made the optimizer."""
        if self.caller != (os.getpid(), threading.get_ident()):
            raise PacelineError(f"{deed} outside the thread that made paceline.Optimizer: only that one may")

    def of_sampler(self, sampler: int, size: int, seed: int, per_step: int | None) -> SamplerLeases:
        """Returns the leases of a sampler, which are made if it has none."""
        if sampler not in self.samplers:
            requests = LeaseRequests(self.run, self.await_driver, sampler, size, seed)
            share = size // self.run.config.members.workers
            self.samplers[sampler] = SamplerLeases(requests, share, per_step, self.end, self.check_caller)
        return self.samplers[sampler]

    def of_batches(self, sampler: int, size: int, seed: int, sizes: BatchSizes) -> BatchLeases:
        """Returns the leases of a sampler of batches, which are made if it has none."""
        known = self.samplers.get(sampler)
        if not isinstance(known, BatchLeases):
            requests = LeaseRequests(self.run, self.await_driver, sampler, size, seed)
            share = size // self.run.config.members.workers
            known = self.samplers[sampler] = BatchLeases(requests, share, sizes, self.end, self.check_caller)
        return known

    def receive(self, answer: lease_messages.LeaseAnswer) -> None:
        """Takes an answer of the driver to a request."""
        self.samplers[answer.sampler].requests.receive(answer)

    def weight(self) -> float:
        """Returns how many samples this step uses: those of the first sampler that was drawn from; 1 without any.

        A step for which nothing was drawn, as a second one on the same batch, weighs what the one before did.
        """
        weights = (self.samplers[number].weight() for number in sorted(self.samplers))
        self.last_weight = float(next((weight for weight in weights if weight > 0), self.last_weight))
        return self.last_weight

    def note_step(self, seconds: float) -> None:
        """A step has computed for so long."""
        for sampler in self.samplers.values():
            if isinstance(sampler, BatchLeases) and (samples := sampler.weight()) > 0:
                sampler.note_step(samples, seconds)

    def relative_batch(self) -> float:
        """Returns the samples of this step as a multiple of an equal batch; 1 if batches are not balanced."""
        for sampler in self.samplers.values():
            if isinstance(sampler, BatchLeases) and sampler.sizes.balance and (samples := sampler.weight()) > 0:
                return samples / sampler.sizes.batch
        return 1.0

    def settle(self, counted: bool) -> None:
        """A step was taken, or a round: the samples it used are acknowledged or returned."""
        for sampler in self.samplers.values():
            if self.by_rounds:
                sampler.settle_round(counted)
            else:
                sampler.settle_step(counted)

    def hold(self) -> None:
        """A step of a round was taken: what becomes of its samples is known when the round ends."""
        for sampler in self.samplers.values():
            sampler.hold_step()

    def begin_pass(self) -> None:
        """A closure runs that may be given up."""
        for sampler in self.samplers.values():
            sampler.begin_pass()

    def may_repeat(self) -> bool:
        """Returns whether what the pass has drawn can be drawn again, or other samples in its place."""
        return all(sampler.may_repeat() for sampler in self.samplers.values())

    def end_pass(self, given_up: bool) -> None:
        """The closure has ended, or is given up and will run again."""
        for sampler in self.samplers.values():
            sampler.end_pass(given_up)

    def report(self) -> None:
        """Reports what is settled, before this worker leaves; the rest is granted to others then."""
        for sampler in self.samplers.values():
            sampler.requests.report()
