"""What a server tells the driver of itself: how its workers look from here, and how everybody stands."""

from __future__ import annotations

import time

from paceline.runtime.live.protocol import resizing_messages, wire
from paceline.runtime.live.server.connection import ServerConnection
from paceline.runtime.live.server.shard_executor import ShardExecutor

STATUS_S = 0.5


class StatusReports:
    """Reports from time to time, and whenever something changes that the driver has asked about."""

    def __init__(self, run: ServerConnection, executor: ShardExecutor) -> None:
        self.run = run
        self.executor = executor
        self.told_s = 0.0
        self.surveyed: int | None = None
        """The change of servers because of which the driver wants to know how everybody stands."""
        self.standing: resizing_messages.Standing | None = None
        """What it was told last."""

    def survey(self, change: int | None) -> None:
        """The driver wants to know, because of this change of servers, or not any more."""
        self.surveyed, self.standing = change, None

    def tell(self) -> None:
        if self.executor.buffers.members and time.monotonic() - self.told_s >= STATUS_S:
            self.told_s = time.monotonic()
            self.tell_status()
        if self.surveyed is not None:
            self.tell_standing(self.surveyed)

    def tell_status(self) -> None:
        """Tells how the workers look from here, and so that this server is well."""
        executor = self.executor
        status = {
            worker: wire.WorkerStatus(pushed, executor.waits.get(worker, ""), executor.staleness.get(worker, 0))
            for worker, pushed in executor.machine.progress.next.items()
        }
        self.run.tell(wire.Status(self.run.shard, status, executor.state.hyper))

    def tell_standing(self, change: int) -> None:
        machine, progress = self.executor.machine, self.executor.machine.progress
        standing = resizing_messages.Standing(
            change, self.run.shard, machine.view.number, progress.V, machine.version, dict(progress.next),
            tuple(machine.waiting), bool(machine.held), self.executor.state.hyper,
        )  # fmt: skip
        if standing != self.standing:
            self.standing = standing
            self.run.tell(standing)
