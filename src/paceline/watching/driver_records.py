"""What the driver of a live run writes down for those who watch it: a line each in `feed.jsonl` of the run's folder.

Traces have what workers, servers and peers do. Here is what only the driver knows: when the run's clock began, what
scripts logged, what it said to the terminal, and how the run ended. A run that was resumed has several beginnings; what
stands before the last one is of an earlier part.
"""

from __future__ import annotations

import math

import msgspec
from msgspec import Struct

NAME = "feed.jsonl"


class Begun(Struct, frozen=True, tag="begun"):
    """Training has begun. `epoch_s` is second 0 of the run on the monotonic clock of the driver's host."""

    at: float
    epoch_s: float
    policy: str
    workers: int
    """How many the run was configured with."""
    servers: int
    slice_bytes: tuple[int, ...] = ()
    target: str | None = None


class Logged(Struct, frozen=True, tag="logged"):
    """A script has logged metrics. A value that is no finite number is None."""

    at: float
    updates: int
    values: dict[str, float | None]


class Said(Struct, frozen=True, tag="said"):
    """The driver has told the user something."""

    at: float
    text: str


class Ended(Struct, frozen=True, tag="ended"):
    """The run has ended; `how` as in `Run.ended`."""

    at: float
    how: str
    failures: tuple[str, ...] = ()


DriverRecord = Begun | Logged | Said | Ended


def finite(values: dict[str, float]) -> dict[str, float | None]:
    """Returns the values as they can be written."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def encode(records: list[DriverRecord]) -> bytes:
    """Writes records as lines."""
    return msgspec.json.Encoder().encode_lines(records)


def decode(lines: list[bytes]) -> list[DriverRecord]:
    """Reads lines; raises what msgspec raises for one that is damaged."""
    read = msgspec.json.Decoder(DriverRecord).decode
    return [read(line) for line in lines if line]
