"""Traces of live processes: each node writes a file of its own, the driver puts them together."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from paceline.core.messages import Node
from paceline.core.trace import Header, Record, Trace, encode_records, read_records

SUFFIX = ".trace"
HELD = 128
"""Records kept back, to be encoded and written together: one at a time, between two gradients that fill the caches, the
encoder would have to be fetched from memory again for each."""
HELD_S = 0.2
"""And for how long, while there are new ones: what a killed process had kept back is lost."""


class TraceFile:
    """The records of one node, written as they happen. What a killed process had not flushed is lost."""

    def __init__(self, folder: Path, node: Node, incarnation: int) -> None:
        self.path = folder / f"{node.role}-{node.rank}.{incarnation}{SUFFIX}"
        self.file = self.path.open("wb", buffering=0)
        self.held: list[Record] = []
        """What is not written yet."""
        self.written_s = 0.0
        self.full = False

    def follow(self, incarnation: int) -> int:
        """Go on with what an earlier life has left, instead of a file of its own; how many records there are."""
        self.path.unlink()
        self.path = self.path.with_name(f"{self.path.name.split('.')[0]}.{incarnation}{SUFFIX}")
        self.file.close()
        self.file = self.path.open("a+b", buffering=0)
        self.file.seek(0)
        left = self.file.readall()
        whole = left.rfind(b"\n") + 1
        self.file.truncate(whole)
        return left.count(b"\n")

    def write(self, record: Record) -> None:
        self.held.append(record)
        if len(self.held) >= HELD or time.monotonic() - self.written_s > HELD_S:
            self.flush()

    def flush(self) -> None:
        """Worth doing when there is nothing else to do. Without room the trace ends here, and the training does not."""
        held, self.held = self.held, []
        left = encode_records(held) if not self.full else b""
        try:
            while left:
                left = left[self.file.write(left) :]
        except OSError as error:
            self.full = True
            print(f"{self.path.stem}: its trace ends here, the training goes on: {error.strerror}", file=sys.stderr)
        self.written_s = time.monotonic()

    def close(self) -> None:
        self.flush()
        self.file.close()


@contextlib.contextmanager
def tracing(shared: Path, kept: Path | None) -> Iterator[Path]:
    """A folder for the traces, in the run's folder of shared memory; what lies there fills the memory of the machine.

    So if the run leaves a folder on a disk they are there, for as long as the run lasts, if they can be.
    """
    output = shared / "trace"
    on_disk = kept.resolve() / "trace" if kept is not None else None
    try:
        if on_disk is not None:
            shutil.rmtree(on_disk, ignore_errors=True)  # of a driver that was killed
            on_disk.mkdir()
            output.symlink_to(on_disk)
    except OSError:
        on_disk = None
    if on_disk is None:
        output.mkdir()
    try:
        yield output
    finally:
        if on_disk is not None:
            shutil.rmtree(on_disk, ignore_errors=True)


def gather(folder: Path, header: Header) -> Trace:
    """All nodes' records in time order. Each node's own order is kept."""
    records: list[Record] = []
    for path in sorted(folder.glob("*" + SUFFIX)):
        try:
            records.extend(read_records(path.read_bytes()))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            print(f"WARNING: {path.name} is left out of the trace: {error}", file=sys.stderr)
    records.sort(key=lambda record: record.event.at)
    return Trace(header, records)
