"""Workers that wait in a barrier of the script: the driver is told when others wait for their pushes."""

from __future__ import annotations

from paceline.core.shard import Shard
from paceline.core.worker_barrier import awaited
from paceline.runtime.live.protocol import script_calls
from paceline.runtime.live.server.connection import ServerConnection


class Absences:
    """The workers in the barrier, and what the driver knows of who waits for them."""

    def __init__(self, run: ServerConnection, machine: Shard) -> None:
        self.run = run
        self.machine = machine
        self.absent: dict[int, int] = {}
        """rank -> incarnation."""
        self.told: set[tuple[int, int]] = set()
        """(rank, iteration) that the driver knows of."""

    def take(self, message: script_calls.Absent) -> None:
        self.absent = dict(message.workers)
        self.told.clear()

    def tell(self) -> None:
        """Tells the driver what is new, after everything that happened."""
        for rank, iteration in awaited(self.machine, self.absent).items():
            if (rank, iteration) not in self.told:
                self.told.add((rank, iteration))
                self.run.tell(script_calls.Awaited(self.run.shard, rank, self.absent[rank], iteration))
