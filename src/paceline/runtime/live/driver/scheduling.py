"""The scheduler of a live run, where the policy has one: a machine in the driver's process.

Workers and servers have a connection to the driver anyhow, so they send their pulls and their reports there, and a
release comes back the same way; a re-sync is written where a worker sees it while it computes (`bell.py`). The driver
tells it every view. If a server is restarted from a checkpoint, its
first word is where it stands; workers that wait for a release then say their push again (`worker.py`).
"""

from __future__ import annotations

import time
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from msgspec import structs

from paceline.core.actions import Park, Send, SetTimer
from paceline.core.events import NotifyArrived, PullArrived, RiseArrived, ServersChanged, TimerFired, ViewChanged
from paceline.core.messages import Notify, Plan, Pull, Release, Resync, Rise, ToScheduler, View
from paceline.core.policy import Policy
from paceline.core.scheduler import SCHEDULER
from paceline.runtime.driver import NoSuchAction, SchedulerCarrier, Seat
from paceline.runtime.live import wire
from paceline.runtime.live.bell import Bells
from paceline.runtime.live.recording import TraceFile

if TYPE_CHECKING:
    from paceline.runtime.live.driver.launch import Driver


class Scheduling(SchedulerCarrier):
    """Carries out the scheduler's actions."""

    def __init__(self, driver: Driver, policy: Policy, output: Path) -> None:
        self.driver = driver
        self.trace = TraceFile(output, SCHEDULER, 0)
        machine = policy.machine("scheduler", 0, driver.members, driver.plan.seed)
        self.seat = Seat(SCHEDULER, 0, machine, self, self.trace.write)
        self.waits: dict[int, str] = {}
        """Why each parked worker waits."""
        self.timers: list[tuple[float, int]] = []
        """(when, which), the next first."""
        self.bells = Bells(driver.folder.path)

    def now(self) -> float:
        return time.monotonic() - self.driver.epoch_s

    def until_timer(self, at_most_s: float) -> float:
        """How long to wait for a message."""
        return min(at_most_s, max(0.0005, self.timers[0][0] - self.now())) if self.timers else at_most_s

    def fire_timers(self) -> None:
        while self.timers and self.timers[0][0] <= self.now():
            self.seat.tell(TimerFired(self.now(), heappop(self.timers)[1]))

    def hear(self, message: ToScheduler) -> None:
        match message:
            case Pull():
                self.seat.tell(PullArrived(self.now(), message))
            case Rise():
                self.seat.tell(RiseArrived(self.now(), message))
            case Notify():
                self.seat.tell(NotifyArrived(self.now(), message))
            case _:
                assert_never(message)

    def announce(self, view: View) -> None:
        self.seat.tell(ViewChanged(self.now(), view))
        self.bells.announce(view)

    def change_servers(self, event: ServersChanged) -> None:
        self.seat.tell(structs.replace(event, at=self.now()))

    def park(self, action: Park) -> None:
        self.waits[action.pull.worker] = action.reason

    def send(self, action: Send) -> None:
        match action.message:
            case Release() as release:
                self.waits.pop(release.worker, None)
                self.driver.tell_worker(release.worker, release.incarnation, wire.Told(release))
            case Resync() as resync:
                if self.driver.hosts is not None:
                    self.driver.hosts.ring(resync)
                else:
                    self.bells.ring(resync)
            case Plan() as plan:
                self.driver.servers.tell(action.to.rank, wire.Planned(plan))
            case _:
                raise NoSuchAction(f"a scheduler cannot {action}")

    def set_timer(self, action: SetTimer) -> None:
        heappush(self.timers, (self.now() + action.after_s, action.timer))

    def close(self) -> None:
        self.bells.close()
        self.trace.close()
