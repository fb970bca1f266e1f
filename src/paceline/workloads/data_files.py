"""Data files: where they may lie, and how idx files are read.

The environment variable PACELINE_DATA names a folder: it, or its sub-folder of the data set's name, may have the
files. What is not there is looked for where Debian's packages put it. Nothing is ever downloaded.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import ConfigError

VARIABLE = "PACELINE_DATA"
SYSTEM = Path("/usr/share/datasets")
UNSIGNED_BYTES = 8
"""The type of values in an idx file, its third byte: the only one that MNIST and its relatives use."""


def folders(name: str) -> list[Path]:
    """Returns the folders where the files of a data set may be."""
    chosen = os.environ.get(VARIABLE)
    if chosen and not Path(chosen).is_dir():
        raise ConfigError(f"{VARIABLE}={chosen} names no folder: set it to one that has the data, or unset it")
    return [Path(chosen, name), Path(chosen), SYSTEM / name] if chosen else [SYSTEM / name]


def find(file: str, places: list[Path]) -> Path | None:
    """Finds the file, packed or not, in the first folder that has it."""
    candidates = (folder / name for folder in places for name in (file, f"{file}.gz"))
    return next((path for path in candidates if path.is_file()), None)


def read_bytes(path: Path) -> bytes:
    """Reads a file, packed or not."""
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from None


def read_idx(path: Path) -> Tensor:
    """Reads an idx file, packed or not: its fourth byte counts the dimensions, then come their sizes, then the
    values."""
    raw = read_bytes(path)
    dimensions = raw[3] if len(raw) > 4 and raw[:3] == bytes([0, 0, UNSIGNED_BYTES]) else 0
    start = 4 + 4 * dimensions
    shape = struct.unpack_from(f">{dimensions}i", raw, 4) if len(raw) >= start else ()
    if not dimensions or len(raw) - start != math.prod(shape):
        raise ConfigError(f"{str(path)!r} is not a whole idx file of bytes")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=start).reshape(shape)
