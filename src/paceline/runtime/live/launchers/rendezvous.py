"""How the processes of a launcher's run find each other: through a key-value store of torch.distributed.

torchrun has a store of its own; under Slurm the first rank's driver makes one. It tells what nobody can know before:
addresses, public keys, and the folder in which a node's processes meet. Nothing else passes through it, and nobody
reads it once the run has begun.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import msgspec
from msgspec import Struct

from paceline.errors import ConfigError, RunFailed
from paceline.runtime.live.launchers.launcher_environment import Place

PATIENCE_S = 300.0
"""How long the store may take to be there."""
POLL_S = 0.1
LINE_S = 30.0
"""How long others may be missing before a line says so."""
T = TypeVar("T", bound=Struct)
Found = TypeVar("Found")


class DriverThere(Struct, frozen=True):
    """The driver's address and public key; or why there will be none."""

    address: str = ""
    key: str = ""
    failed: str = ""


class AgentThere(Struct, frozen=True):
    """The public key and the name of an agent."""

    key: str
    token: str


class FolderThere(Struct, frozen=True):
    """The folder of a node's agent, or of a run that may be started anew."""

    path: str


class RendezvousStore:
    """The store, with a note under each name. Notes are of one attempt of the launcher, unless they are kept."""

    def __init__(self, place: Place, make: bool = False, on_wait: Callable[[], None] = lambda: None) -> None:
        """Makes the store if it is to and the launcher has none; else waits until it answers, calling `on_wait`."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        make = make and not place.has_store
        if not make:
            await_listener(place, on_wait)
        try:
            self.store = TCPStore(
                place.master, place.port, is_master=make, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE_S)
            )
        except RuntimeError as error:
            raise ConfigError(f"no store at {place.master}:{place.port}: {str(error).splitlines()[0]}") from None
        self.kept = PrefixStore(f"paceline/{place.name}", self.store)
        """Notes that are there in the launcher's next attempt too, if it keeps the store."""
        self.notes = PrefixStore(f"attempt-{place.attempt}", self.kept)

    def put(self, name: str, note: Struct, keep_over_attempts: bool = False) -> None:
        """Writes a note."""
        (self.kept if keep_over_attempts else self.notes).set(name, msgspec.json.encode(note).decode())

    def read(self, name: str, kind: type[T], keep_over_attempts: bool = False) -> T | None:
        """Reads a note; None if it is not there."""
        store = self.kept if keep_over_attempts else self.notes
        if not store.check([name]):
            return None
        try:
            return msgspec.json.decode(store.get(name), type=kind)
        except msgspec.MsgspecError as error:
            raise RunFailed(f"the store's {name} is not what it should be: {error}") from None

    def wait_for(
        self,
        name: str,
        kind: type[T],
        on_wait: Callable[[], None] = lambda: None,
        on_delay: Callable[[], None] = lambda: None,
    ) -> T:
        """Returns the note of this name once it is there."""
        return poll(lambda: self.read(name, kind), on_wait, on_delay)


def poll(
    look: Callable[[], Found | None],
    on_wait: Callable[[], None],
    on_delay: Callable[[], None] = lambda: None,
    interval_s: float = POLL_S,
) -> Found:
    """Returns what `look` finds once it does; calls `on_wait` meanwhile, and `on_delay` once if it takes long."""
    began, told = time.monotonic(), False
    while (found := look()) is None:
        if not told and time.monotonic() - began > LINE_S:
            told = True
            on_delay()
        on_wait()
        time.sleep(interval_s)
    return found


def await_listener(place: Place, on_wait: Callable[[], None]) -> None:
    """Returns when the store's port answers."""
    until = time.monotonic() + PATIENCE_S

    def answers() -> bool | None:
        try:
            socket.create_connection((place.master, place.port), timeout=5.0).close()
        except OSError as error:
            if time.monotonic() > until:
                where = f"{place.master}:{place.port}"
                raise ConfigError(f"rank 0 of {place.launcher} does not answer at {where}: {error}") from None
            return None
        return True

    poll(answers, on_wait)
