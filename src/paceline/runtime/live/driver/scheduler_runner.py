"""The scheduler of a live run, where the policy has one: a machine in the driver's process.

Workers and servers have a connection to the driver anyhow, so they send their pulls and their reports there, and a
release comes back the same way; a re-sync is written where a worker sees it while it computes
(`storage/abort_flag.py`). The driver tells it every view. If a server is restarted from a checkpoint, its first word is
where it stands; workers that wait for a release then say their push again (`worker.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from pathlib import Path
from typing import assert_never

from msgspec import structs

from paceline.core.actions import Park, Send, SetTimer
from paceline.core.events import NotifyArrived, PullArrived, RiseArrived, ServersChanged, TimerFired, ViewChanged
from paceline.core.machine import Machine
from paceline.core.messages import Notify, Plan, Pull, Release, Resync, Rise, ToScheduler, View
from paceline.core.scheduler import SCHEDULER
from paceline.runtime.execution import MachineRunner, NoSuchAction
from paceline.runtime.live.driver.messenger import Messenger
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.storage.abort_flag import AbortFlags
from paceline.runtime.live.storage.trace_files import TraceFile


class SchedulerRunner:
    """Carries out the scheduler's actions."""

    def __init__(
        self,
        machine: Machine,
        folder: Path,
        now: Callable[[], float],
        messenger: Messenger,
        ring: Callable[[Resync], None] | None,
    ) -> None:
        """`ring` has a worker of another host give up its computation; None if all are on this one."""
        self.now = now
        self.messenger = messenger
        self.ring = ring
        self.trace = TraceFile(folder / "trace", SCHEDULER, 0)
        self.runner = MachineRunner(SCHEDULER, 0, machine, self, self.trace.write)
        self.waits: dict[int, str] = {}
        """Why each parked worker waits."""
        self.timers: list[tuple[float, int]] = []
        """(when, which), the next first."""
        self.abort_flags = AbortFlags(folder)

    def until_timer(self, at_most_s: float) -> float:
        """How long to wait for a message."""
        return min(at_most_s, max(0.0005, self.timers[0][0] - self.now())) if self.timers else at_most_s

    def fire_timers(self) -> None:
        while self.timers and self.timers[0][0] <= self.now():
            self.runner.deliver(TimerFired(self.now(), heappop(self.timers)[1]))

    def hear(self, message: ToScheduler) -> None:
        match message:
            case Pull():
                self.runner.deliver(PullArrived(self.now(), message))
            case Rise():
                self.runner.deliver(RiseArrived(self.now(), message))
            case Notify():
                self.runner.deliver(NotifyArrived(self.now(), message))
            case _:
                assert_never(message)

    def announce(self, view: View) -> None:
        self.runner.deliver(ViewChanged(self.now(), view))
        self.abort_flags.announce(view)

    def change_servers(self, event: ServersChanged) -> None:
        self.runner.deliver(structs.replace(event, at=self.now()))

    def park(self, action: Park) -> None:
        self.waits[action.pull.worker] = action.reason

    def send(self, action: Send) -> None:
        match action.message:
            case Release() as release:
                self.waits.pop(release.worker, None)
                self.messenger.to_worker(release.worker, release.incarnation, wire.Released(release))
            case Resync() as resync:
                (self.ring or self.abort_flags.set)(resync)
            case Plan() as plan:
                self.messenger.to_server(action.to.rank, wire.Planned(plan))
            case _:
                raise NoSuchAction(f"a scheduler cannot {action}")

    def set_timer(self, action: SetTimer) -> None:
        heappush(self.timers, (self.now() + action.after_s, action.timer))

    def close(self) -> None:
        self.abort_flags.close()
        self.trace.close()
