"""The scheduler of a live run, where the policy has one: a machine in the driver's process.

Workers and servers have a connection to the driver anyhow, so they send their pulls and their reports there, and a
release comes back the same way. The driver tells it every view. If a server is restarted from a checkpoint, its
first word is where it stands; workers that wait for a release then say their push again (`worker.py`).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from msgspec import structs

from paceline.core.actions import Park, Send
from paceline.core.events import PullArrived, RiseArrived, ServersChanged, ViewChanged
from paceline.core.messages import Release, View
from paceline.core.policy import Policy
from paceline.core.scheduler import SCHEDULER
from paceline.runtime.driver import NoSuchAction, SchedulerCarrier, Seat
from paceline.runtime.live import wire
from paceline.runtime.live.recording import TraceFile

if TYPE_CHECKING:
    from paceline.runtime.live.launch import Driver


class Scheduling(SchedulerCarrier):
    """Carries out the scheduler's actions."""

    def __init__(self, driver: Driver, policy: Policy, output: Path) -> None:
        self.driver = driver
        self.trace = TraceFile(output, SCHEDULER, 0)
        machine = policy.machine("scheduler", 0, driver.members, driver.plan.seed)
        self.seat = Seat(SCHEDULER, 0, machine, self, self.trace.write)
        self.waits: dict[int, str] = {}
        """Why each parked worker waits."""

    def now(self) -> float:
        return time.monotonic() - self.driver.epoch_s

    def hear(self, message: wire.Ask | wire.Report) -> None:
        match message:
            case wire.Ask(pull):
                self.seat.tell(PullArrived(self.now(), pull))
            case wire.Report(rise):
                self.seat.tell(RiseArrived(self.now(), rise))
            case _:
                assert_never(message)

    def announce(self, view: View) -> None:
        self.seat.tell(ViewChanged(self.now(), view))

    def change_servers(self, event: ServersChanged) -> None:
        self.seat.tell(structs.replace(event, at=self.now()))

    def park(self, action: Park) -> None:
        self.waits[action.pull.worker] = action.reason

    def send(self, action: Send) -> None:
        release = action.message
        if not isinstance(release, Release):
            raise NoSuchAction(f"a scheduler cannot {action}")
        self.waits.pop(release.worker, None)
        self.driver.tell_worker(release.worker, release.incarnation, wire.Let(release))

    def close(self) -> None:
        self.trace.close()
