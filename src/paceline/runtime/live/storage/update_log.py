"""What a durable server writes: a log of every event of its machine, and snapshots that keep it short.

In `<the run's folder>/durable/shard-N/`:

    000003.snapshot    values, optimizer's state and machine as they were before segment 3 (safetensors)
    000003.log         what happened since, record by record
    end                how many records and updates are in it

A machine is deterministic, so the snapshot and the log restore everything the server knew (`server/log_replay.py`). A
record is written after the machine has decided and before any of its actions is carried out: whatever a worker or the
driver has been told is in the log. Gradients that count follow the record of their push as raw bytes. A segment begins
with those that the machine held when its snapshot was taken.

`write` hands the bytes to the kernel: they survive `kill -9` of any process, not a power failure. With `fsync` they are
on the disk before an answer leaves.

A record: a head of 28 bytes (mark, length of the description, length of the gradient, serial number, checksum), the
description in msgpack, zeros up to a multiple of 64 bytes of the file, the gradient. The last record may be incomplete:
its writer was killed before it acted on it, and it is dropped. To tell that from damage there is `end`, which is
written after each record, with fsync after the disk has it: a record that is counted there and cannot be read is
damaged or gone, and that is an error.

A segment that is not needed any more becomes the file of a later one: overwriting pages that are in memory is several
times faster than growing a file. Old records in it are never read, since shard and segment are part of each checksum.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import Struct as Packed
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.events import Event
from paceline.core.messages import Handle, Members
from paceline.errors import Damaged, PacelineError
from paceline.runtime.live.storage.checksums import sync, tensors_checksum
from paceline.tensors.assignment import Assignment
from paceline.tensors.layout import Layout
from paceline.tensors.optimizers import OptimizerSpec
from paceline.tensors.piece_optimizers import Hyper, State

FOLDER = "durable"
SHARDS = "shard-*"
"""The pattern of the folders in it, one for each server."""
LOG, SNAPSHOT, PART = ".log", ".snapshot", ".part"
SPARE = "spare"
"""A segment that is not needed any more."""
HEAD = Packed("<4sIQQI")
MARK = b"plg2"
END = "end"
"""The file that says how far the log is written, in two slots by turns: one of them is whole at any time."""
SLOT = Packed("<QQII")
ALIGNED = 64
"""Gradients begin at multiples of so many bytes."""
PADDING = bytes(ALIGNED)
MANY = 512
"""Buffers in one system call at most: the kernel takes 1024."""
META, CHECKSUM = "meta", "checksum"
"""Names among a snapshot's tensors: the bytes of its `SnapshotMeta`, and a checksum over all others."""


class LoggedEvent(Struct, frozen=True, array_like=True, tag=True):
    """An event of the machine. If it is a push that counts, its gradient follows."""

    event: Event
    version: int
    """The version of the slice after it: a replay that arrives at another one does not fit this log."""
    absent: tuple[int, ...] = ()
    """Tensors that have no gradient in the push."""


class LoggedHyper(Struct, frozen=True, array_like=True, tag=True):
    """The hyper-parameters from now on."""

    hyper: tuple[Hyper, ...]


class HeldGradient(Struct, frozen=True, array_like=True, tag=True):
    """A gradient, which follows, that the machine held when the segment began."""

    handle: Handle
    absent: tuple[int, ...]


class SnapshotMeta(Struct, frozen=True):
    """What a snapshot holds besides tensors: all that is needed to make the machine and the optimizer again."""

    shard: int
    incarnation: int = msgspec.field(name="life")  # the name in the files, also in those of older versions
    """The server's incarnation when its machine began: the machine's trace has that number."""
    policy: str
    members: Members
    seed: int
    layout: Layout
    assignment: Assignment
    optimizer: OptimizerSpec
    """The optimizer, with its hyper-parameters at the time."""
    hyper: tuple[Hyper, ...] | None
    machine: Any
    """The machine's state (`core/state_snapshot.py`); None before its first event."""
    told: int
    """How many events the machine has handled."""
    timers: tuple[tuple[float, int], ...]
    serial: int
    """The serial number of the first record of its segment: how many the log had before."""


class LogEnd(NamedTuple):
    """How much of a log has been written at least, or, with fsync, has reached the disk."""

    serial: int
    """The serial number of the next record: how many there are."""
    version: int
    """The version of the slice after the last record: the number of updates."""
    given_up: bool = False
    """Whether the log could not be written any further and the server has gone on without it."""


BEGINNING = LogEnd(0, 0)


class LogEntry(NamedTuple):
    """A record as it is read: where the next one begins, what it says, and the gradient behind it."""

    end: int
    said: LoggedEvent | LoggedHyper | HeldGradient
    gradient: memoryview


encode = msgspec.msgpack.Encoder().encode
decode_record = msgspec.msgpack.Decoder(LoggedEvent | LoggedHyper | HeldGradient).decode
decode_meta = msgspec.msgpack.Decoder(SnapshotMeta).decode


def folder_of(run: Path, shard: int) -> Path:
    return run / FOLDER / f"shard-{shard}"


def log_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}{LOG}"


def snapshot_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}{SNAPSHOT}"


def numbers(folder: Path, suffix: str) -> list[int]:
    """Lists the numbers of the segments, or of the whole snapshots, the oldest first."""
    return sorted(int(path.stem) for path in folder.glob(f"*{suffix}"))


def hold(folder: Path) -> int:
    """Locks the log in this folder, and returns the lock's descriptor; the kernel releases it when the process ends."""
    descriptor = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise PacelineError(f"another process writes the log in {folder}: is the run still going on?") from None
    return descriptor


class LogSegment:
    """Writes one segment. All methods raise `OSError` if that fails."""

    def __init__(self, folder: Path, number: int, position: int = 0, end: LogEnd = BEGINNING) -> None:
        path = log_path(folder, number)
        spare = folder / SPARE
        if not path.exists() and spare.exists():
            spare.rename(path)
        else:
            path.touch(0o600)
            os.truncate(path, position)
        self.descriptor = os.open(path, os.O_WRONLY)
        os.lseek(self.descriptor, position, os.SEEK_SET)
        self.end_path = folder / END
        self.end_descriptor = os.open(self.end_path, os.O_CREAT | os.O_WRONLY, 0o600)
        sync(folder)
        self.seed = seed(folder, number)
        self.number = number
        self.position = position
        self.serial, self.version = end.serial, end.version
        self.slot = 0
        self.note_end()
        self.note_end()

    @property
    def end(self) -> LogEnd:
        return LogEnd(self.serial, self.version)

    def append(self, said: LoggedEvent | LoggedHyper | HeldGradient, gradient: Sequence[memoryview] = ()) -> int:
        """Writes a record, and returns its bytes. It counts as written with the next `note_end`."""
        described = encode(said)
        nbytes = sum(len(part) for part in gradient)
        checksum = zlib.crc32(described, head_checksum(self.seed, len(described), nbytes, self.serial))
        for part in gradient:
            checksum = zlib.crc32(part, checksum)
        head = HEAD.pack(MARK, len(described), nbytes, self.serial, checksum)
        gap = -(self.position + len(head) + len(described)) % ALIGNED if nbytes else 0
        self._write([head + described + PADDING[:gap], *gradient])
        written = len(head) + len(described) + gap + nbytes
        self.position += written
        self.serial += 1
        if isinstance(said, LoggedEvent):
            self.version = said.version
        return written

    def _write(self, parts: list[bytes | memoryview]) -> None:
        while parts:
            written = os.writev(self.descriptor, parts[:MANY])
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if written:
                parts[0] = memoryview(parts[0])[written:]

    def note_end(self) -> None:
        """Notes that everything up to here is written, in the slot whose turn it is."""
        os.pwrite(self.end_descriptor, pack_end(self.end), self.slot * SLOT.size)
        self.slot = 1 - self.slot

    def give_up(self) -> None:
        """Notes, in place, since a full disk has no room for more, that the server goes on without this log.

        If that fails the log loses its end, so that nobody takes it for complete.
        """
        try:
            with self.end_path.open("r+b") as file:
                file.write(2 * pack_end(self.end._replace(given_up=True)))
        except OSError:
            self.end_path.unlink(missing_ok=True)

    def sync(self) -> None:
        os.fdatasync(self.descriptor)
        self.note_end()

    def close(self) -> None:
        """Closes the file, cut off where the records of this segment end."""
        os.ftruncate(self.descriptor, self.position)
        os.close(self.descriptor)
        os.close(self.end_descriptor)


def seed(folder: Path, segment: int) -> int:
    """Returns what the checksums of a segment's records begin with: a CRC of its shard and its number."""
    return zlib.crc32(f"{folder.name}/{segment}".encode())


def head_checksum(seed: int, length: int, nbytes: int, serial: int) -> int:
    """Returns the checksum of a record's head, which those of description and gradient continue."""
    return zlib.crc32(HEAD.pack(MARK, length, nbytes, serial, 0), seed)


def pack_end(end: LogEnd) -> bytes:
    fields = SLOT.pack(end.serial, end.version, end.given_up, 0)[:-4]
    return fields + zlib.crc32(fields).to_bytes(4, "little")


def read_end(folder: Path) -> LogEnd:
    """Reads how much has been written to the log in this folder."""
    path = folder / END
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path}, which says how long the log is, cannot be read: {error.strerror}") from None
    found: list[LogEnd] = []
    for slot in (data[: SLOT.size], data[SLOT.size : 2 * SLOT.size]):
        if len(slot) == SLOT.size and zlib.crc32(slot[:-4]) == int.from_bytes(slot[-4:], "little"):
            serial, version, given_up, _ = SLOT.unpack(slot)
            found.append(LogEnd(serial, version, bool(given_up)))
    if not found:
        raise Damaged(f"{path}, which says how long the log is, is damaged")
    return max(found)


class LogReader:
    """Reads the records of one segment, in order, up to the first that is incomplete."""

    def __init__(self, folder: Path, number: int, serial: int) -> None:
        self.path = log_path(folder, number)
        self.seed = seed(folder, number)
        self.serial = serial
        """The serial number of the next record."""
        self.position = 0
        """Where the next record begins."""
        self.view = memoryview(b"")
        with self.path.open("rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            if self.size:
                # A private copy, page by page and only where somebody writes: gradients are used where they lie.
                self.view = memoryview(mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY))

    def __iter__(self) -> Iterator[LogEntry]:
        while (found := self._record(self.position)) is not None and found[0] == self.serial:
            self.serial, entry = self.serial + 1, found[1]
            self.position = entry.end
            yield entry

    def _record(self, at: int) -> tuple[int, LogEntry] | None:
        """Returns the record that begins here with its serial number; None if it is incomplete."""
        if at + HEAD.size > self.size:
            return None
        mark, length, nbytes, serial, checksum = HEAD.unpack_from(self.view, at)
        described = at + HEAD.size + length
        begin = described + (-described % ALIGNED if nbytes else 0)
        if mark != MARK or begin + nbytes > self.size:
            return None
        gradient = self.view[begin : begin + nbytes]
        text = self.view[at + HEAD.size : described]
        if zlib.crc32(gradient, zlib.crc32(text, head_checksum(self.seed, length, nbytes, serial))) != checksum:
            return None
        return serial, LogEntry(begin + nbytes, decode_record(text), gradient)


def write_snapshot(folder: Path, number: int, meta: SnapshotMeta, values: Tensor, learned: State) -> None:
    """Writes a snapshot atomically, and removes what came before it, but for one segment that is kept as a spare."""
    path = snapshot_path(folder, number)
    part = path.with_suffix(PART)
    described = torch.frombuffer(bytearray(encode(meta)), dtype=torch.uint8)
    held = {META: described, "values": values, **{f"state.{name}": each for name, each in learned.items()}}
    try:
        save_file({**held, CHECKSUM: torch.tensor([tensors_checksum(held)])}, part)
        sync(part)
        part.rename(path)
    except (OSError, SafetensorError):
        part.unlink(missing_ok=True)
        raise
    sync(folder)
    for old in sorted(folder.iterdir()):
        if old.suffix == LOG and int(old.stem) < number:
            old.replace(folder / SPARE)
        elif old.suffix in (SNAPSHOT, PART) and int(old.stem) < number:
            old.unlink(missing_ok=True)


def read_snapshot(path: Path) -> tuple[SnapshotMeta, Tensor, State]:
    """Reads a snapshot; raises `Damaged` if it is not what was written."""
    try:
        held = load_file(path)
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{path} cannot be read: {error}") from None
    try:
        checksum = held.pop(CHECKSUM, None)
        if META in held and checksum is None:
            raise Damaged(f"{path} was written by an older version of paceline, which this one does not read")
        if checksum is None or checksum.tolist() != [tensors_checksum(held)]:
            raise Damaged(f"{path} is damaged: its content does not match its checksum")
        meta = decode_meta(held.pop(META).numpy().tobytes())
        values = held.pop("values")
    except (KeyError, msgspec.MsgspecError) as error:
        raise Damaged(f"{path} is not a snapshot of this version of paceline: {error}") from None
    if path.parent.name != f"shard-{meta.shard}":
        raise Damaged(f"{path} is a snapshot of shard {meta.shard}")
    return meta, values, {name.removeprefix("state."): value for name, value in held.items()}


def raw(tensor: Tensor) -> memoryview:
    """Returns a view of the bytes of a flat tensor."""
    return memoryview(tensor.view(torch.uint8).numpy().data)
