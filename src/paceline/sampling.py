"""`paceline.Sampler`: the part of the data this worker gets, for a `DataLoader`."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch

from paceline.dealing import permutation
from paceline.session import world


class Sampler(torch.utils.data.Sampler[int]):
    """For a `DataLoader`: each epoch a new permutation, of which worker w of N takes every N-th sample.

    The same on every worker for the same seed, so the workers' batches together are one pass over the data.
    """

    def __init__(self, dataset: Sized, seed: int = 0) -> None:
        self.size = len(dataset)
        self.seed = seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        mine = permutation(self.size, self.seed, self.epoch)[world().rank % world().size :: world().size]
        self.epoch += 1
        return iter(mine.tolist())

    def __len__(self) -> int:
        rank, size = world().rank % world().size, world().size
        return len(range(rank, self.size, size))
