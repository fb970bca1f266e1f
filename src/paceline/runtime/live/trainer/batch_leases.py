"""The leases of a sampler that yields whole batches, of one size or balanced (`core/control/batch_balance.py`).

Balanced, a worker asks with each request for a lease how large its next batches are to be, and says how long its latest
steps took; the lease holds the samples of one round. The script draws the batches of a lease at its size, whenever that
is: a loader that draws ahead has batches of the size they were drawn with, and a push weighs what is in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from weakref import ref

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from paceline.core.control.batch_balance import BatchRequested, StepTime
from paceline.errors import PacelineError
from paceline.runtime.live.system.training_end import TrainingEnd
from paceline.runtime.live.trainer.data_loaders import find_loader
from paceline.runtime.live.trainer.lease_requests import LeaseRequests
from paceline.runtime.live.trainer.sampler_leases import SamplerLeases
from paceline.sample_order import BatchSizes

REPORTED = 16
"""The latest steps that a request tells of, at most."""


class BatchLeases(SamplerLeases):
    """Draws batches from the leases of one sampler."""

    def __init__(
        self,
        requests: LeaseRequests,
        share: int,
        sizes: BatchSizes,
        end: TrainingEnd,
        check_caller: Callable[[], None],
    ) -> None:
        super().__init__(requests, share, None, end, check_caller)
        self.sizes = sizes
        self.step_samples = sizes.batch
        self.drawn: list[int] = []
        """How many samples this iteration has yielded, after each batch."""
        self.steps: deque[StepTime] = deque(maxlen=REPORTED)
        """The latest steps that no request has told of."""
        if sizes.balance:
            requests.asks_for_batches = self.ask_for_batches

    def ask_for_batches(self, at: float, ticket: int) -> BatchRequested:
        run, sizes, steps = self.requests.run, self.sizes, tuple(self.steps)
        self.steps.clear()
        return BatchRequested(at, run.rank, run.incarnation, ticket, sizes.batch, sizes.least, sizes.most, steps)

    def note_step(self, samples: float, seconds: float) -> None:
        """A step has computed for so long on so many samples."""
        self.steps.append((samples, max(seconds, 0.0)))

    def draw_batches(self) -> Iterator[list[int]]:
        """Yields the batches of one iteration, until the epoch is over for this worker or training has ended."""
        if self.end:
            self.end.check()
            return
        self.check_caller()
        ahead = find_loader().ahead
        if ahead is not None and not hasattr(ahead, "_rcvd_idx"):
            raise PacelineError("this DataLoader draws ahead of the loop, and its batches are not torch's")
        self.drawn = []
        iteration = self._begin_iteration(self._received(ahead) if ahead is not None else None)
        before, leased = self.yielded, self.leased
        while (lease := self._next_lease(self.yielded > before)) is not None:
            leased.current = lease
            while leased.current is lease and lease.drawn < len(lease.samples):
                if self.end:
                    return
                start = lease.drawn
                lease.drawn = min(start + (lease.batch or self.sizes.batch), len(lease.samples))
                self.yielded += lease.drawn - start
                self.drawn.append(self.yielded - before)
                yield lease.samples[start : lease.drawn]
                if self.iteration != iteration:
                    raise PacelineError("two loops draw from one paceline.BatchSampler: make a sampler for each")
            self.check_caller()
        self.exhausted = True

    def _received(self, ahead: _MultiProcessingDataLoaderIter) -> Callable[[], int]:
        """Returns a function that tells how many samples the loop has got from a loader that draws ahead."""
        alive, drawn = ref(ahead), self.drawn

        def used() -> int:
            loader = alive()
            received = 0 if loader is None else min(int(loader._rcvd_idx), len(drawn))
            return drawn[received - 1] if received else 0

        return used

    def lease_size(self) -> int:
        """Returns how many samples the next lease is to have, if batches are not balanced: whole batches."""
        return -(-super().lease_size() // self.sizes.batch) * self.sizes.batch
