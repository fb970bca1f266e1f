"""Workers whose processes have ended: what was theirs is cleared away, and what the machine orders is done.

`core/control/worker_restarts.py` decides who is started again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from paceline.core.control.worker_restarts import (
    DropWorker,
    EndRun,
    RestartLater,
    StartWorker,
    TimePassed,
    WorkerEnded,
    WorkerEvent,
    WorkerRestarter,
)
from paceline.errors import RunFailed
from paceline.runtime.live.driver.children import Child, how
from paceline.runtime.live.driver.fault_injection import FaultInjector
from paceline.runtime.live.driver.health import HealthMonitor
from paceline.runtime.live.driver.key_registry import KeyRegistry
from paceline.runtime.live.driver.processes import Workers
from paceline.runtime.live.driver.remote_hosts import RemoteChild
from paceline.runtime.live.driver.roster import Roster
from paceline.runtime.live.driver.run_state import RunState
from paceline.runtime.live.peer import parameter_slots
from paceline.runtime.live.storage import shared_memory


@dataclass(eq=False)
class WorkerRestarts:
    """Takes workers out of the run whose processes have ended, and starts some again."""

    machine: WorkerRestarter
    state: RunState
    roster: Roster
    workers: Workers
    injector: FaultInjector
    has_place: Callable[[int], bool]
    """Whether the host that a worker belongs to is there; if not, it starts it when it is."""
    health: HealthMonitor
    keys: KeyRegistry
    folder: Path
    say: Callable[[str], None]

    @property
    def due(self) -> set[int]:
        """The workers that will be started again."""
        return self.machine.ranks

    def may_start(self, rank: int) -> bool:
        """Whether this worker, which has ended, may be started again."""
        return rank in self.due or bool(self.injector.due)

    def take(self, child: Child, code: int) -> None:
        """A worker's process has ended with this exit code."""
        process = (child.rank, child.incarnation)
        self.roster.remove(*process, finished=code == 0)
        self.health.forget(child.rank)
        self.keys.forget(*process)
        shared_memory.remove(self.folder, *process)
        if code:  # of a peer that ended well neighbours may not have read the last parameters: its slots stay
            parameter_slots.remove(self.folder, *process)
        lost_with = str(child.host) if isinstance(child, RemoteChild) and child.is_lost else ""
        stopping = self.state.stopping
        back_after_s = None if stopping or lost_with else self.injector.restart_pause(child, code)
        self._deliver(WorkerEnded(time.monotonic(), *process, code, how(code), lost_with, back_after_s, stopping))

    def tick(self) -> None:
        """Start those whose time has come."""
        if self.machine.due:
            away = frozenset(rank for rank in self.due if not self.has_place(rank))
            self._deliver(TimePassed(time.monotonic(), self.state.stopping, away))

    def _deliver(self, event: WorkerEvent) -> None:
        for order in self.machine.handle(event):
            match order:
                case StartWorker(rank):
                    self.workers.start(rank)
                case RestartLater(rank, after_s, how, left):
                    why = ", as the scenario says" if left is None else ""
                    rest = "" if left is None else f" ({left} restarts left)"
                    self.say(f"worker {rank} {how}{why}; starting it again in {after_s:g} s{rest}")
                case DropWorker(rank, how):
                    others = len(self.workers.live())
                    rest = f"; {others} other{' goes' if others == 1 else 's go'} on" if self.state.begun else ""
                    self.say(f"worker {rank} {how}{rest}")
                case EndRun(why):
                    raise RunFailed(why)
                case _:
                    assert_never(order)
