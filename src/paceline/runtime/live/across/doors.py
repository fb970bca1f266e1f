"""How a worker reaches a server: through a Unix socket and shared memory on the same host, else over TCP.

Each process of a run has a folder in the shared memory of its host. Two processes may be on one host and have
different folders, when two launchers brought them there. That they share a host is not a matter of names or
addresses: a file with a random text in the other's folder is read, and it is the text that was told or it is not.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from paceline.runtime.live import memory
from paceline.runtime.live.configuration import Door
from paceline.runtime.live.sockets import Link, server_path

NONCE = "nonce"


def make_nonce(folder: Path) -> None:
    """Leave what proves to others that they are on this host."""
    (folder / NONCE).write_text(secrets.token_hex(16))


def read_nonce(folder: Path) -> str:
    """What is to be told to others; "" if it is not there."""
    try:
        return (folder / NONCE).read_text()
    except OSError:
        return ""


def is_here(door: Door) -> bool:
    """Whether the folder behind this door is on this host."""
    return bool(door.nonce) and read_nonce(Path(door.folder)) == door.nonce


def near_folder(folder: Path, door: Door) -> Path | None:
    """The folder to meet in, if shared memory reaches that far."""
    if not door.folder or Path(door.folder) == folder:
        return folder
    return Path(door.folder) if is_here(door) else None


def knock(folder: Path, process: tuple[int, int], shard: int, door: Door) -> Link | None:
    """A link to a server of this host; None if it is on another one."""
    theirs = near_folder(folder, door)
    if theirs is None:
        return None
    if theirs != folder:
        for path in (memory.segment_path(folder, *process), memory.staging_path(folder, *process)):
            there = theirs / path.name
            if path.exists() and not there.is_symlink():
                there.symlink_to(path)
    return Link(server_path(theirs, shard, door.life), b"%d:%d" % process)
