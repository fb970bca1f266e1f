"""Files and folders of a run that only their owner can read, whatever the umask is: mode 0600 and 0700."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def make_folder(path: Path, exist_ok: bool = False) -> Path:
    """Makes a folder, and those above it that are missing. One that is there keeps its mode."""
    if not path.parent.exists():
        make_folder(path.parent, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=exist_ok)
    return path


def opener(path: str, flags: int) -> int:
    """Opens a file for `open(..., opener=opener)`: a new one is its owner's only."""
    return os.open(path, flags, 0o600)


def write(path: Path, data: bytes) -> None:
    """Writes a whole file."""
    with open(path, "wb", opener=opener) as file:
        file.write(data)


def replace(path: Path, data: bytes) -> None:
    """Writes a whole file atomically, in place of one that is there."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(draft, "xb", opener=opener) as file:
            file.write(data)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
