"""The driver's side of `paceline.barrier()`: who waits there, and whom those in it keep waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from paceline.core.worker_barrier import Process, WorkerBarrier
from paceline.runtime.live.driver.processes import Workers
from paceline.runtime.live.driver.roster import Roster
from paceline.runtime.live.driver.run_state import RunState
from paceline.runtime.live.driver.servers import Servers
from paceline.runtime.live.protocol import script_calls, wire

LONG_S = 20.0
"""After how long it is said whom the others wait for."""


@dataclass(eq=False)
class ScriptBarrier:
    """Opens the barrier, and has those in it push if others wait for them."""

    state: RunState
    roster: Roster
    workers: Workers
    needed: int
    """It opens when so many have come, or the run has begun."""
    servers: Servers
    tell_worker: Callable[[int, int, wire.ToWorker], None]
    excuse: Callable[[Iterable[int]], None]
    """Tells who is not stuck."""
    say: Callable[[str], None]
    barrier: WorkerBarrier = field(default_factory=WorkerBarrier)
    ended: set[Process] = field(default_factory=set)
    """Processes whose scripts have ended."""
    absent: tuple[Process, ...] = ()
    """Members that wait in the barrier, as the servers know them."""
    since_s: float = 0.0
    """When the first came who waits."""
    told_long: bool = False

    def enter(self, message: script_calls.AtBarrier) -> None:
        """A script waits."""
        if not self.barrier.waiting:
            self.since_s, self.told_long = time.monotonic(), False
        self.barrier.enter((message.rank, message.incarnation))

    def take_leave(self, leave: wire.Leave) -> None:
        if not leave.retires:
            self.ended.add((leave.rank, leave.incarnation))

    def take_awaited(self, message: script_calls.Awaited) -> None:
        """Others wait for this worker's push: it has to make one."""
        if (message.worker, message.incarnation) in self.barrier.waiting:
            self.tell_worker(message.worker, message.incarnation, script_calls.Follow(message.iteration))

    def tell_server(self, shard: int) -> None:
        """A server that has just begun knows nothing of this."""
        if self.absent:
            self.servers.tell(shard, script_calls.Absent(self.absent))

    def tick(self) -> None:
        waiting = self.barrier.waiting
        if not waiting and not self.absent:
            return
        live = {(child.rank, child.incarnation) for child in self.workers.live()} - self.ended
        complete = self.state.begun or len(live) >= self.needed
        opened = self.barrier.open(live) if complete else ()
        absent = tuple(sorted(each for each in self.barrier.waiting if self.roster.has(*each)))
        if absent != self.absent:
            self.absent = absent
            self.servers.tell_configured(script_calls.Absent(absent))
        for process in opened:
            self.tell_worker(*process, script_calls.BarrierOpened())
        self.excuse(rank for rank, _ in absent)
        if not self.told_long and time.monotonic() - self.since_s > LONG_S and self.barrier.waiting:
            self.told_long = True
            missing = ", ".join(f"worker {rank}" for rank, _ in sorted(live - self.barrier.waiting))
            those = f"{len(self.barrier.waiting)} in paceline.barrier()"
            self.say(f"{those} still wait for {missing or 'others to come'}")
