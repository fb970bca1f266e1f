"""The driver's part in keys: which key is which process of the run.

Each incarnation of a worker has a key pair of its own. On this host the driver makes it and leaves it in the run's
folder; on others their agents do, and only the public key comes here. Every server is told of every key, before it has
anything that could be asked for, and again in each of its lives.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paceline.runtime.live import wire
from paceline.runtime.live.across.abroad import key_path
from paceline.runtime.live.across.far import make_keys

if TYPE_CHECKING:
    from paceline.runtime.live.driver.servers import Servers


class Enrolling:
    def __init__(self, servers: Servers, keys: bool) -> None:
        self.servers = servers
        self.keys = keys
        """False in a run without keys: then nobody is enrolled."""
        self.known: dict[tuple[int, int], str] = {}
        """The public key of each (rank, incarnation)."""

    def make(self, folder: Path, rank: int, incarnation: int) -> None:
        """Make keys for a process of this host, before it starts."""
        if self.keys:
            self.enrol(rank, incarnation, leave_keys(folder, rank, incarnation))

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


def leave_keys(folder: Path, rank: int, incarnation: int) -> str:
    """Leave a new key pair where the process will find it; the public key."""
    keys = make_keys()
    descriptor = os.open(key_path(folder, rank, incarnation), os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(keys))
    return keys.public
