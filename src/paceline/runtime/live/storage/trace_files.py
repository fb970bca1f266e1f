"""Traces and times of live processes: each node writes files of its own, the driver puts them together."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import ClassVar, Generic, Literal, TypeVar

import msgspec

from paceline import private_files
from paceline.core.messages import Node
from paceline.core.step_times import Row, read_rows
from paceline.core.trace import Header, Record, Trace, read_records
from paceline.errors import PacelineError

logger = logging.getLogger(__name__)

SUFFIX = ".trace"
TIMES_SUFFIX = ".times"
SUFFIXES = (SUFFIX, TIMES_SUFFIX)
CUT = "trace-cut"
"""A file beside the folder of the traces, in shared memory, where there is room: some trace has ended early."""
HELD = 128
"""Records that are buffered, encoded and written together. One at a time, between two gradients that fill the caches,
the encoder would have to be fetched from memory again for each."""
HELD_S = 0.2
"""How long records are buffered, while there are new ones. A killed process loses them."""
FEW = 6
"""Who writes so few in that time has long iterations, and writes the next ones at once, for those who watch."""


BLOCK, WHOLE = 64, 64
"""Of rows of times the first `WHOLE` blocks of `BLOCK` rows are kept, then every second block, then every fourth: after
each doubling of a run as many again, so that a week's are a few megabytes."""

T = TypeVar("T")


class RecordFile(Generic[T]):
    """What one node records, written while it runs. What a killed process had not flushed is lost."""

    suffix: ClassVar[str] = SUFFIX
    few: ClassVar[int] = 0

    def __init__(self, folder: Path, node: Node, incarnation: int) -> None:
        self.path = folder / f"{node.role}-{node.rank}.{incarnation}{self.suffix}"
        self.full = False
        self.file = self._open("wb")
        self.held: list[T] = []
        """Records that are not written yet."""
        self.written_s = 0.0
        self.at_once = 0
        """So many records more are written as they come."""

    def follow(self, incarnation: int) -> int:
        """Appends to the file of an earlier incarnation instead of its own; returns how many records that has."""
        self.path.unlink(missing_ok=True)
        self.path = self.path.with_name(f"{self.path.name.split('.')[0]}.{incarnation}{self.suffix}")
        self.file.close()
        self.file = self._open("a+b")
        self.file.seek(0)
        left = self.file.readall()
        whole = left.rfind(b"\n") + 1
        if whole < len(left):
            self.file.truncate(whole)
        return left.count(b"\n")

    def write(self, record: T) -> None:
        self.held.append(record)
        if len(self.held) >= HELD or time.monotonic() - self.written_s > HELD_S:
            self.at_once = self.few if len(self.held) < self.few else 0
            self.flush()
        elif self.at_once:
            self.at_once -= 1
            self.flush()

    def flush(self) -> None:
        """Writes what is buffered, best done when idle. Without room the trace ends here, and the training does not."""
        held, self.held = self.held, []
        left = msgspec.json.Encoder().encode_lines(held) if not self.full else b""
        try:
            while left:
                left = left[self.file.write(left) :]
        except OSError as error:
            self._end(error)
        self.written_s = time.monotonic()

    def _open(self, mode: Literal["wb", "a+b"]) -> FileIO:
        try:
            self.path.touch(0o600)
            return self.path.open(mode, buffering=0)
        except OSError as error:
            self._end(error)
            return open(os.devnull, mode, buffering=0)

    def _end(self, error: OSError) -> None:
        self.full = True
        with contextlib.suppress(OSError):
            (self.path.parent.parent / CUT).touch(0o600)
        logger.warning(f"{self.path.stem}: its trace ends here, the training goes on: {error.strerror}")

    def close(self) -> None:
        self.flush()
        self.file.close()


class TraceFile(RecordFile[Record]):
    """The trace of one node."""

    few = FEW


class TimesFile(RecordFile[Row]):
    """The times of one node; fewer and fewer of them, the longer it runs."""

    suffix = TIMES_SUFFIX

    def __init__(self, folder: Path, node: Node, incarnation: int) -> None:
        super().__init__(folder, node, incarnation)
        self.count = 0

    def write(self, record: Row) -> None:
        block = self.count // BLOCK
        self.count += 1
        if block < WHOLE or block % (1 << (block // WHOLE).bit_length()) == 0:
            super().write(record)


@contextlib.contextmanager
def tracing(shared: Path, kept: Path | None) -> Iterator[Path]:
    """Yields the folder for the traces in the run's folder, which is in shared memory.

    So that traces do not fill the machine's memory, it is a link to the folder on a disk that the run keeps, if any.
    """
    output = shared / "trace"
    on_disk = kept.resolve() / "trace" if kept is not None else None
    try:
        if on_disk is not None:
            shutil.rmtree(on_disk, ignore_errors=True)  # of a driver that was killed
            private_files.make_folder(on_disk)
            output.symlink_to(on_disk)
    except OSError:
        on_disk = None
    if on_disk is None:
        private_files.make_folder(output)
    try:
        yield output
    finally:
        if on_disk is not None:
            shutil.rmtree(on_disk, ignore_errors=True)


def gather(folder: Path, header: Header) -> Trace:
    """Merges the records of all nodes in time order, and keeps each node's own order."""
    records: list[Record] = []
    for path in sorted(folder.glob("*" + SUFFIX)):
        try:
            records.extend(read_records(path.read_bytes()))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            logger.warning(f"{path.name} is left out of the trace: {error}")
    records.sort(key=lambda record: record.event.at)
    return Trace(header, records)


def gather_times(folder: Path) -> list[Row]:
    """Returns the times of all nodes, each node's in its own order."""
    rows: list[Row] = []
    for path in sorted(folder.glob("*" + TIMES_SUFFIX)):
        try:
            rows.extend(read_rows(path.read_bytes()))
        except PacelineError as error:
            logger.warning(f"{path.name} is left out: {error}")
    return rows
