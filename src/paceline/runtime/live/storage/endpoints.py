"""How a worker reaches a server: through a Unix socket and shared memory on the same host, else over TCP.

Each process of a run has a folder in the shared memory of its host. Two processes of one host have different folders
if different launchers started them. Whether they share a host is not decided by names or addresses: an endpoint states
a random text (nonce), and whoever finds that text in the endpoint's folder is on its host.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from paceline import private_files
from paceline.runtime.live.messaging.unix_sockets import Link, server_path
from paceline.runtime.live.protocol.configuration import Endpoint
from paceline.runtime.live.storage import shared_memory

NONCE = "nonce"


def make_nonce(folder: Path) -> None:
    """Writes a random text that can only be read on this host."""
    private_files.write(folder / NONCE, secrets.token_hex(16).encode())


def read_nonce(folder: Path) -> str:
    """Returns the random text of a folder; "" if it has none."""
    try:
        return (folder / NONCE).read_text()
    except OSError:
        return ""


def is_local(endpoint: Endpoint) -> bool:
    """Whether the folder of an endpoint is on this host."""
    folder = Path(endpoint.folder)
    return bool(endpoint.nonce) and shared_memory.is_run_folder(folder) and read_nonce(folder) == endpoint.nonce


def shared_folder(folder: Path, endpoint: Endpoint) -> Path | None:
    """Returns the folder in which an endpoint can be reached by shared memory; None from another host."""
    if not endpoint.folder or Path(endpoint.folder) == folder:
        return folder
    return Path(endpoint.folder) if is_local(endpoint) else None


def connect(folder: Path, process: tuple[int, int], shard: int, endpoint: Endpoint) -> Link | None:
    """Connects to a server of this host; None if it is on another one."""
    theirs = shared_folder(folder, endpoint)
    if theirs is None:
        return None
    if theirs != folder:
        for path in (shared_memory.segment_path(folder, *process), shared_memory.staging_path(folder, *process)):
            there = theirs / path.name
            if path.exists() and not there.is_symlink():
                there.symlink_to(path)
    return Link(server_path(theirs, shard, endpoint.incarnation), b"%d:%d" % process)
