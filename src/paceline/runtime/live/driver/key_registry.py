"""The driver's part in keys: which key is which process of the run.

Each incarnation of a worker has a key pair of its own. On this host the driver makes it and leaves it in the run's
folder; on others their agents do, and only the public key comes here. Every server is told of every key, before it has
anything that could be asked for, and again in each of its incarnations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from paceline.runtime.live.driver.servers import Servers
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.storage.process_keys import write_keys


@dataclass(eq=False)
class KeyRegistry:
    servers: Servers
    keys: bool
    """False in a run without keys: then nobody is enrolled."""
    folder: Path | None
    """Where workers of this host find their keys; None if all are on others."""
    known: dict[tuple[int, int], str] = field(default_factory=dict)
    """The public key of each (rank, incarnation)."""

    def make(self, rank: int, incarnation: int) -> None:
        """Make keys for a process of this host, before it starts."""
        if self.keys and self.folder is not None:
            self.enrol(rank, incarnation, write_keys(self.folder, rank, incarnation))

    def enrol(self, rank: int, incarnation: int, public: str) -> None:
        """This key is this process."""
        if self.keys:
            self.known[rank, incarnation] = public
            for shard in self.servers.there:
                self._tell(shard, rank, incarnation)

    def tell(self, shard: int) -> None:
        """A server has started: tell it of everybody."""
        for rank, incarnation in self.known:
            self._tell(shard, rank, incarnation)

    def _tell(self, shard: int, rank: int, incarnation: int) -> None:
        self.servers.tell(shard, wire.Enrol(self.known[rank, incarnation], f"{rank}:{incarnation}"))

    def forget(self, rank: int, incarnation: int) -> None:
        """This process is no more, and its key is nobody's."""
        if self.known.pop((rank, incarnation), None) is not None:
            for shard in self.servers.there:
                self.servers.tell(shard, wire.Enrol("", f"{rank}:{incarnation}"))
