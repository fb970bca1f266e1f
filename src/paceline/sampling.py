"""`paceline.Sampler` and `BatchSampler`: the part of the data this worker gets, for a `DataLoader`.

In a live run the driver dispatches the samples (`core/sample_dispatch.py`, `runtime/live/trainer/sample_leases.py`). In
a world of one an epoch is a permutation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sized

import torch

from paceline.errors import ConfigError, PacelineError
from paceline.sample_order import BatchSizes, permutation
from paceline.session import world

_numbers = itertools.count()


class Sampler(torch.utils.data.Sampler[int]):
    """Draws a new permutation of the data each epoch, shared among the workers so that no sample is lost.

    While nobody comes or goes, worker w of N gets every N-th sample of the permutation from the w-th on, so the
    workers' batches together are one pass over the data. A step acknowledges the samples it used. Those of a worker
    that is killed or leaves, of a gradient that the policy dropped, and those drawn but not used (a loop that was left,
    `drop_last`) are given out again, to whoever has nothing else left: each sample of an epoch is part of at least one
    gradient that counts, and of exactly one if all goes well. A loop that is left early goes on in the same epoch next
    time. What nobody asks for any more when the script ends stays undone. A worker
    that joins late comes into the present epoch: if its script counts epochs it does more of them than the others,
    alone in the end; `opt.global_step` is the run's.

    A step is taken to use what was drawn since the step before, from every sampler; of a torch `DataLoader` with
    `num_workers`, which draws ahead of the loop, the batches the loop has got. If anything else draws ahead, give
    `per_step`: the samples of one step of this worker, of all its micro-batches together.

    Every worker makes the same samplers (size and seed) in the same order, and draws from them after
    `paceline.Optimizer` is made, in the thread that calls `step`. `len` is this worker's share of an epoch if all
    goes well.
    """

    def __init__(self, dataset: Sized, seed: int = 0, per_step: int | None = None) -> None:
        if per_step is not None and (not isinstance(per_step, int) or isinstance(per_step, bool) or per_step < 1):
            raise ConfigError(f"per_step={per_step!r} is out of range: a whole number, 1 or more")
        self.size = len(dataset)
        self.seed = seed
        self.per_step = per_step
        self.number = next(_numbers)
        """The number of the sampler, the same on every worker."""
        self.epoch = 0
        """The next epoch, in a world of one."""

    def __iter__(self) -> Iterator[int]:
        live = world().live
        if live is None and world().run is not None:
            raise PacelineError(
                "a paceline.Sampler was drawn from before paceline.Optimizer was made: this worker has no share yet"
            )
        if live is not None and self.size:
            return live.participation.leases.of_sampler(self.number, self.size, self.seed, self.per_step).draw()
        if world().end:
            world().end.check()
            return iter(())
        self.epoch += 1
        return iter(permutation(self.size, self.seed, self.epoch - 1).tolist())

    def __len__(self) -> int:
        rank, size = world().rank % world().size, world().size
        return len(range(rank, self.size, size))


class BatchSampler(torch.utils.data.Sampler[list[int]]):
    """Draws whole batches, whose sizes may follow the speeds of the workers.

        loader = DataLoader(data, batch_sampler=paceline.BatchSampler(data, batch_size=32, balance=True))

    As `Sampler` otherwise. With `balance` the joined batch stays `batch_size` samples for each live worker, and each
    worker takes the part of it that it computes in the same time as the others, at least `min_batch` and at most
    `max_batch`; these two are this worker's own, as its memory allows. Sizes follow when speeds change. Each batch
    weighs what is in it, so nothing else of the script changes; a loss must be a mean over the batch. For policies
    under which workers wait for slower ones: bsp, backup, deadline, ssp and its kind, hop.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        balance: bool = False,
        min_batch: int = 1,
        max_batch: int | None = None,
        seed: int = 0,
    ) -> None:
        most = {} if max_batch is None else {"max_batch": max_batch}
        for name, value in {"batch_size": batch_size, "min_batch": min_batch, **most}.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r} is out of range: a whole number, 1 or more")
        if not balance and (min_batch != 1 or max_batch is not None):
            raise ConfigError("min_batch and max_batch are for balance=True: other batches have batch_size samples")
        if max_batch is not None and max_batch < min_batch:
            raise ConfigError(f"max_batch={max_batch} is out of range: {min_batch}, which is min_batch, or more")
        self.size = len(dataset)
        self.seed = seed
        self.sizes = BatchSizes(batch_size, balance, min_batch, max_batch)
        self.number = next(_numbers)
        self.epoch = 0
        """The next epoch, in a world of one."""

    def __iter__(self) -> Iterator[list[int]]:
        live = world().live
        if live is None and world().run is not None:
            raise PacelineError(
                "a paceline.BatchSampler was drawn from before paceline.Optimizer was made: there is no share yet"
            )
        if live is not None and self.size:
            leases = live.participation.leases.of_batches(self.number, self.size, self.seed, self.sizes)
            return leases.draw_batches()
        if world().end:
            world().end.check()
            return iter(())
        self.epoch += 1
        order = permutation(self.size, self.seed, self.epoch - 1).tolist()
        return (order[at : at + self.sizes.batch] for at in range(0, self.size, self.sizes.batch))

    def __len__(self) -> int:
        """Returns the batches of an epoch if all workers are equally fast, rounded up."""
        return -(-self.size // (self.sizes.batch * world().size))
