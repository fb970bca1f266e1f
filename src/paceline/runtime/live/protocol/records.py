"""Records that are both sent between processes and kept on disk."""

from __future__ import annotations

from msgspec import Struct


class DurabilityOptions(Struct, frozen=True):
    """How durable a run is to be, and how long its logs may become."""

    fsync: bool = False
    """Whether to survive a power failure too: servers wait for the disk before each answer."""
    least_bytes: int = 64 << 20
    times: int = 4
    """A snapshot is taken when a segment is longer than `least_bytes` and than so many times the shard,"""
    events: int = 10_000
    """or has so many records: recovery takes as long as replaying them does."""

    def longest(self, shard_bytes: int) -> int:
        return max(self.least_bytes, self.times * shard_bytes)


class ShardEntry(Struct, frozen=True):
    """One shard's file in a manifest."""

    file: str
    sha256: str
    iteration: int
    version: int

    def __post_init__(self) -> None:
        check_name(self.file)


def check_name(name: str) -> None:
    """Refuses a name that leads out of the checkpoint's folder: a manifest may come from another host."""
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise ValueError(f"a checkpoint has no file {name!r}")
