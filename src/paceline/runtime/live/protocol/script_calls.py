"""The messages that follow from a script's calls of `paceline.stop`, `paceline.barrier` and `opt.attach`.

worker -> driver     EndRun, AtBarrier, LRSchedulerStates
driver -> worker     BarrierOpened, Follow
driver -> server     Absent
server -> driver     Awaited
"""

from __future__ import annotations

from msgspec import Struct


class LRSchedulerStates(Struct, frozen=True, tag=True):
    """The states of a worker's LR schedulers (`paceline.lr_schedulers.States`, encoded), which only workers read."""

    rank: int
    incarnation: int
    states: bytes


class AtBarrier(Struct, frozen=True, tag=True):
    """A worker's script waits for all others, in `paceline.barrier()`."""

    rank: int
    incarnation: int


class BarrierOpened(Struct, frozen=True, tag=True):
    """All workers have reached the barrier and may go on."""


class Absent(Struct, frozen=True, tag=True):
    """These (rank, incarnation) wait in a barrier: the server is to report when others wait for their pushes."""

    workers: tuple[tuple[int, int], ...]


class Awaited(Struct, frozen=True, tag=True):
    """Others wait for the push of `iteration` by this worker, which waits in a barrier."""

    shard: int
    worker: int
    incarnation: int
    iteration: int


class Follow(Struct, frozen=True, tag=True):
    """A worker in a barrier is to push `iteration` without a gradient, since others wait for it."""

    iteration: int


class EndRun(Struct, frozen=True, tag=True):
    """A worker's script has called `paceline.stop()`."""

    rank: int
    incarnation: int
    iteration: int
