"""The key pair of each process of a run that crosses hosts, as a file that only its user can read."""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline import private_files
from paceline.errors import PacelineError
from paceline.runtime.live.messaging.remote_links import KeyPair, make_keys


def key_path(folder: Path, rank: int, incarnation: int) -> Path:
    """Returns where a process of a run with keys finds its key pair."""
    return folder / f"key-{rank}.{incarnation}"


def find_keys(folder: Path, rank: int, incarnation: int) -> KeyPair:
    path = key_path(folder, rank, incarnation)
    try:
        return msgspec.json.decode(path.read_bytes(), type=KeyPair)
    except (OSError, msgspec.MsgspecError) as error:
        raise PacelineError(f"worker {rank} has no key to reach servers on other hosts: {error}") from None


def write_keys(folder: Path, rank: int, incarnation: int) -> str:
    """Writes a new key pair for a process, and returns the public key."""
    keys = make_keys()
    private_files.write(key_path(folder, rank, incarnation), msgspec.json.encode(keys))
    return keys.public
