"""What the processes of a live run are told before anything else: its configuration, and where listeners are."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from paceline.core.messages import Members


class Door(Struct, frozen=True):
    """Where a server, or a peer, is spoken to, in one of its lives (`doors.py`)."""

    life: int
    folder: str = ""
    """Its run folder, for those who are on its host; "" if it is the listener's own."""
    nonce: str = ""
    """What is in the file NONCE of that folder: who reads it there is on the same host."""
    address: str = ""
    """tcp://HOST:PORT for the others; "" in a run that does not cross hosts."""
    key: str = ""
    """Its public key; "" without keys."""
    common: bool = False
    """Its parameters are where it steps them, for all to read: the segment `memory.COMMON`."""


class Abroad(Struct, frozen=True):
    """How the listeners of a run that crosses hosts are to listen, and what they send."""

    host: str
    """The interface's address, or 0.0.0.0."""
    advertise: str
    """The address others are told; "" for `host`."""
    ports: tuple[int, int] = (0, 0)
    """The first and the last port that may be used; (0, 0) leaves it to the system."""
    keys: bool = True
    """False: anybody who reaches a port is believed (--insecure)."""
    wire: str = "float32"
    """How floats travel (`tensors/halves.py`)."""
    near: bool = True
    """Who is on a server's host uses shared memory; False: the network too, so that it can be measured."""


class LiveConfig(Struct, frozen=True):
    """What every process of a run is told at its start, in a file of the run's folder."""

    members: Members
    seed: int
    cluster: dict[str, Any] | None
    """The scenario whose slowdowns, slow links and faults are injected, as a table (cluster/files.py)."""
    output: str
    """Where traces go."""
    slicing: str
    """How the parameters are cut over the servers (`Layout.slicing`)."""
    policy: str | None = None
    """What beats the script's policy, if anything does."""
    keeps_state: bool = False
    """Peers leave their optimizer's state at the end: there will be a checkpoint."""
    run: str = ""
    """A name no other run has: what was said in another one is not for this one."""
    abroad: Abroad | None = None
    """If the run crosses hosts."""
