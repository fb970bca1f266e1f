"""Which samples a worker gets: an endless stream of permutations, shared in strides.

Sample k of the stream is element k % n of the permutation of epoch k // n. Step t of N workers together is the
N * batch samples from t * N * batch on, the joined batch that single-process training would take; of these,
worker w takes every N-th from the w-th on. Where batches differ, each worker takes its own part of the joined batch, in
the order of ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import ConfigError

SAMPLE_STREAM = 2
KEPT_STEPS = 16
"""How many joined batches are kept, those used last: workers of unequal speed are some steps apart."""
SHUFFLED, SORTED = "shuffled", "sorted"


Batch = int | tuple[int, ...]
"""The samples of a gradient, of all workers' or of each worker's."""


class BatchSizes(NamedTuple):
    """How many samples a step of this worker uses: `batch`, or, balanced, from `least` to `most`."""

    batch: int
    balance: bool = False
    least: int = 1
    most: int | None = None


class SampleOrder:
    """The order of the samples of a data set of `size`, for `workers` that take `batch` at a time."""

    def __init__(self, size: int, workers: int, batch: Batch, seed: int) -> None:
        self.size = size
        self.workers = workers
        self.batches = (batch,) * workers if isinstance(batch, int) else batch
        self.seed = seed
        self.epochs: dict[int, NDArray[np.int64]] = {}
        self.steps: dict[int, NDArray[np.int64]] = {}
        self.taken = 0
        """How many samples of the stream `next` has returned."""

    @property
    def is_even(self) -> bool:
        """Whether all workers take batches of one size."""
        return len(set(self.batches)) == 1

    def of_worker(self, worker: int, step: int) -> NDArray[np.int64]:
        """Returns the samples of one worker's step."""
        rank = worker % self.workers
        if self.is_even:
            return self.joined(step)[rank :: self.workers]
        first = sum(self.batches[:rank])
        return self.joined(step)[first : first + self.batches[rank]]

    def next(self, count: int) -> NDArray[np.int64]:
        """Returns the next samples of the stream, whoever takes them: for batches that are not known beforehand."""
        self.taken += count
        return self._stream(self.taken - count, count)

    def joined(self, step: int) -> NDArray[np.int64]:
        """Returns the samples of all workers' step together."""
        samples = self.steps.pop(step, None)
        if samples is None:
            samples = self._join(step)
            if len(self.steps) >= KEPT_STEPS:
                del self.steps[next(iter(self.steps))]
        self.steps[step] = samples
        return samples

    def _join(self, step: int) -> NDArray[np.int64]:
        count = sum(self.batches)
        return self._stream(step * count, count)

    def _stream(self, first: int, count: int) -> NDArray[np.int64]:
        parts = []
        while count:
            epoch, offset = divmod(first, self.size)
            part = self._epoch(epoch)[offset : offset + count]
            parts.append(part)
            first += len(part)
            count -= len(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self.epochs:
            # Slow workers may be an epoch or two behind; older ones are made again when asked for.
            if len(self.epochs) > 8:
                self.epochs.clear()
            self.epochs[epoch] = permutation(self.size, self.seed, epoch)
        return self.epochs[epoch]


class SortedSampleOrder(SampleOrder):
    """The other extreme: each worker has samples of its own for good, and those are sorted by label."""

    def __init__(self, labels: NDArray[np.int64], workers: int, batch: Batch, seed: int) -> None:
        super().__init__(len(labels), workers, batch, seed)
        self.parts = np.array_split(np.argsort(labels, kind="stable"), workers)

    def of_worker(self, worker: int, step: int) -> NDArray[np.int64]:
        part, batch = self.parts[worker % self.workers], self.batches[worker % self.workers]
        random = np.random.Generator(np.random.PCG64([self.seed, SAMPLE_STREAM, worker, step]))
        return random.choice(part, batch, replace=len(part) < batch)


def permutation(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the order of the samples in an epoch."""
    random = np.random.Generator(np.random.PCG64([seed, SAMPLE_STREAM, epoch]))
    return random.permutation(size)


def sample_order_of(shards: str, data: tuple[Tensor, Tensor], workers: int, batch: Batch, seed: int) -> SampleOrder:
    """Returns the order of this name, `shuffled` or `sorted`, for a data set of (inputs, targets)."""
    if shards == SHUFFLED:
        return SampleOrder(len(data[0]), workers, batch, seed)
    if shards != SORTED:
        raise ConfigError(f"unknown shards {shards!r} (known: {SHUFFLED}, {SORTED})")
    if data[1].is_floating_point() or data[1].dim() != 1:
        raise ConfigError("shards=sorted needs labels to sort by: the targets of this workload are no classes")
    return SortedSampleOrder(data[1].numpy(), workers, batch, seed)
