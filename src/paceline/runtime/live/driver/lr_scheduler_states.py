"""What the workers' LR schedulers are: of the lowest rank, whose rates the servers use. Kept for who comes later.

The driver does not read the states. They go into checkpoints, to workers that join, and beside the logs of a durable
run, whose last checkpoint may be old.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct

from paceline.run import write_whole
from paceline.runtime.live.driver.roster import Roster
from paceline.runtime.live.protocol import script_calls
from paceline.runtime.live.storage import update_log
from paceline.runtime.live.storage.checksums import read_with_checksum, with_checksum

LARGEST = 1 << 20
"""Bytes of the states that are kept."""
FILE = "schedulers"
"""In the folder of the logs."""


class KeptStates(Struct, frozen=True):
    states: bytes


@dataclass(eq=False)
class LRSchedulerStates:
    """Keeps what workers say of their LR schedulers."""

    roster: Roster
    resumed: bytes
    """What this run has begun with."""
    keep: Callable[[bytes], None]
    """Writes new states down."""
    said: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """rank -> (incarnation, what it said last)."""
    _last: bytes = b""

    def take(self, message: script_calls.LRSchedulerStates) -> None:
        if len(message.states) > LARGEST:
            return
        self.said[message.rank] = message.incarnation, message.states
        before, now = self._last, self.now
        if now != before:
            self.keep(now)

    @property
    def now(self) -> bytes:
        """The states of the member with the lowest rank that has said any; of the last one, when all have left."""
        speaking = [rank for rank, (incarnation, _) in self.said.items() if self.roster.has(rank, incarnation)]
        if speaking:
            self._last = self.said[min(speaking)][1]
        elif not self._last:
            self._last = self.resumed
        return self._last


def write_beside_logs(run: Path, states: bytes) -> None:
    """Keep the states in the folder of a durable run's logs."""
    write_whole(run / update_log.FOLDER / FILE, with_checksum(KeptStates(states)), private=True)


def read_beside_logs(run: Path) -> bytes:
    """The states that a durable run has left beside its logs, b"" if it had none; raises `Damaged`."""
    return read_with_checksum(run / update_log.FOLDER / FILE, KeptStates).states
