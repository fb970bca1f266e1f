"""Where the scripts of all live workers meet (`paceline.barrier`), and whom those who wait there keep waiting.

    entered      a worker waits until every live one does. Then all go on, at once
    live         the workers whose scripts run: whoever is lost, or whose script has ended, is not waited for

A barrier has no number: it opens when nobody is elsewhere, so workers that call it unequally often do not wait for
ever. Who comes to a run late counts from the moment its process is started.

Training goes on meanwhile, if the policy lets it: a worker in the barrier pushes nothing, and under BSP the others
would wait for its gradient for ever, and it for them. So it *follows*: where somebody else waits for its push, it
pushes an iteration without a gradient (`awaited`). Where nobody is waited for, as under ASP, it does nothing. Peers
see for themselves when others are further (`core/hop_peer.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from paceline.core.planned_barrier import PlannedShard
from paceline.core.scheduler import ReportingShard
from paceline.core.shard import Shard

Process = tuple[int, int]
"""A worker's rank and its incarnation."""


class WorkerBarrier:
    def __init__(self) -> None:
        self.waiting: set[Process] = set()

    def enter(self, process: Process) -> None:
        """This worker's script waits."""
        self.waiting.add(process)

    def open(self, live: Iterable[Process]) -> tuple[Process, ...]:
        """Those who go on, if these are the workers whose scripts run: all who wait, or nobody."""
        there = set(live)
        self.waiting &= there
        if self.waiting != there:
            return ()
        self.waiting = set()
        return tuple(sorted(there))


def awaited(shard: Shard, absent: Collection[int]) -> dict[int, int]:
    """Of the workers that push nothing for now: whose push others wait for on this shard, and of which iteration."""
    at, V = shard.progress.next, shard.progress.V
    there = [worker for worker in absent if worker in at and worker not in shard.waiting]
    if isinstance(shard, ReportingShard):  # those who wait do so at the scheduler, and if lazily, for longer
        policy, lazy = shard.policy, getattr(shard.policy, "lazy", False)
        others = [at[worker] for worker in at if worker not in absent]
        held_up = any(not policy.may_pull(after - 1, V) or (lazy and after > V) for after in others)
    else:
        held_up = any(worker not in absent for worker in shard.waiting)
    if not held_up:
        return {}
    if isinstance(shard, PlannedShard):
        return {worker: at[worker] for worker in there if worker in shard.barrier.awaited}
    return {worker: at[worker] for worker in there if at[worker] <= V}
