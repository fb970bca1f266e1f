"""What a durable server writes: a log of everything its machine is told, and snapshots that keep it short.

In `<the run's folder>/durable/shard-N/`:

    000003.snapshot    values, optimizer's state and machine as they were before segment 3 (safetensors)
    000003.log         what happened since, record by record

A machine is deterministic, so the snapshot and the log give back everything the server knew (`replaying.py`). A record
is written after the machine has decided and before anything of that is done or said: what a worker or the driver has
been told is in the log. Gradients lie in it as raw bytes, behind the record of the push that brought them, if they
count. A segment begins with those that the machine held when its snapshot was taken.

`write` hands the bytes to the kernel: they survive `kill -9` of any process, not a power failure. With `fsync` they are
on the disk before an answer leaves.

A record: a head of 20 bytes (mark, length of the description, checksum, length of the gradient), the description in
msgpack, zeros up to a multiple of 64 bytes of the file, the gradient. A record that is not whole ends the log: its
writer was killed, and nobody was told of it.

A segment that is not needed any more becomes the file of a later one: writing over what is in memory already is
several times faster than growing a file. What is left of its old records ends the log like one that is not whole, since
the number of the segment is part of each checksum.
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
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.events import Event
from paceline.core.messages import Handle, Members
from paceline.errors import PacelineError
from paceline.tensors.assignment import Assignment
from paceline.tensors.layout import Layout
from paceline.tensors.optimizers import OptimizerSpec
from paceline.tensors.steppers import Hyper, State

FOLDER = "durable"
LOG, SNAPSHOT, PART = ".log", ".snapshot", ".part"
SPARE = "spare"
"""A segment that is not needed any more."""
HEAD = Packed("<4sIIQ")
MARK = b"plog"
ALIGNED = 64
"""Gradients begin at multiples of so many bytes."""
PADDING = bytes(ALIGNED)
MANY = 512
"""Buffers in one system call at most: the kernel takes 1024."""
META = "meta"
"""Among a snapshot's tensors: the bytes of its `Meta`."""


class Durable(Struct, frozen=True):
    """How durable a run is to be, and how long its logs may become."""

    fsync: bool = False
    """Survive a power failure too: wait for the disk before each answer."""
    least_bytes: int = 64 << 20
    times: int = 4
    """A snapshot is taken when a segment is longer than the larger of `least_bytes` and so many times the shard,"""
    events: int = 10_000
    """or has so many records: the time to replay them is what recovery takes."""

    def longest(self, shard_bytes: int) -> int:
        return max(self.least_bytes, self.times * shard_bytes)


class Logged(Struct, frozen=True, array_like=True, tag=True):
    """The machine was told this. If it was a push that counts, its gradient follows."""

    event: Event
    version: int
    """Of the slice, by then: a machine that comes to another one is not the one that wrote this."""
    absent: tuple[int, ...] = ()
    """Tensors that the gradient does not have."""


class Rated(Struct, frozen=True, array_like=True, tag=True):
    """The hyper-parameters are these from now on."""

    hyper: tuple[Hyper, ...]


class Kept(Struct, frozen=True, array_like=True, tag=True):
    """A gradient that the machine held when the segment began. It follows."""

    handle: Handle
    absent: tuple[int, ...]


class Meta(Struct, frozen=True):
    """What a snapshot holds besides tensors; enough to make machine and optimizer again, wherever it is read."""

    shard: int
    life: int
    """Of the server, when its machine began: the machine's trace has that number."""
    policy: str
    members: Members
    seed: int
    layout: Layout
    assignment: Assignment
    optimizer: OptimizerSpec
    """With the hyper-parameters as they were."""
    hyper: tuple[Hyper, ...] | None
    machine: Any
    """Its state (`core/freezing.py`); None of one that has been told nothing."""
    told: int
    """How many events that machine has been told."""
    timers: tuple[tuple[float, int], ...]


class Entry(NamedTuple):
    """One record as it is read: where the next begins, what it says, the gradient behind it."""

    end: int
    said: Logged | Rated | Kept
    gradient: memoryview


encode = msgspec.msgpack.Encoder().encode
decode_record = msgspec.msgpack.Decoder(Logged | Rated | Kept).decode
decode_meta = msgspec.msgpack.Decoder(Meta).decode


def folder_of(run: Path, shard: int) -> Path:
    return run / FOLDER / f"shard-{shard}"


def log_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}{LOG}"


def snapshot_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}{SNAPSHOT}"


def numbers(folder: Path, suffix: str) -> list[int]:
    """Of the segments, or of the whole snapshots, the oldest first."""
    return sorted(int(path.stem) for path in folder.glob(f"*{suffix}"))


def hold(folder: Path) -> int:
    """Be the one who uses the log in this folder; the kernel lets go of the descriptor with the process."""
    descriptor = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise PacelineError(f"another process writes the log in {folder}: is the run still going on?") from None
    return descriptor


class Log:
    """One segment, being written. Whatever fails raises `OSError`."""

    def __init__(self, folder: Path, number: int, end: int = 0) -> None:
        path = log_path(folder, number)
        spare = folder / SPARE
        if not path.exists() and spare.exists():
            spare.rename(path)
        else:
            path.touch(0o600)
            os.truncate(path, end)
        self.descriptor = os.open(path, os.O_WRONLY)
        os.lseek(self.descriptor, end, os.SEEK_SET)
        sync(folder)
        self.number = number
        self.position = end

    def append(self, said: Logged | Rated | Kept, gradient: Sequence[memoryview] = ()) -> int:
        """Write a record; how many bytes that was."""
        described = encode(said)
        nbytes = sum(len(part) for part in gradient)
        checksum = zlib.crc32(described, seed(self.number, nbytes))
        for part in gradient:
            checksum = zlib.crc32(part, checksum)
        head = HEAD.pack(MARK, len(described), checksum, nbytes)
        gap = -(self.position + len(head) + len(described)) % ALIGNED if nbytes else 0
        self._write([head + described + PADDING[:gap], *gradient])
        written = len(head) + len(described) + gap + nbytes
        self.position += written
        return written

    def _write(self, parts: list[bytes | memoryview]) -> None:
        while parts:
            written = os.writev(self.descriptor, parts[:MANY])
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if written:
                parts[0] = memoryview(parts[0])[written:]

    def sync(self) -> None:
        os.fdatasync(self.descriptor)

    def close(self) -> None:
        """No more comes: what an older segment left behind its end goes."""
        os.ftruncate(self.descriptor, self.position)
        os.close(self.descriptor)


def sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seed(number: int, nbytes: int) -> int:
    """What the checksum of a record begins with: its segment, and the length of its gradient."""
    return (number * 0x9E3779B1 + nbytes) & 0xFFFFFFFF


def read(folder: Path, number: int) -> Iterator[Entry]:
    """The whole records of a segment."""
    with log_path(folder, number).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return
        # A private copy, page by page and only where somebody writes: gradients are used where they lie.
        view = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY))
    at = 0
    while at + HEAD.size <= size:
        mark, length, checksum, nbytes = HEAD.unpack_from(view, at)
        described = at + HEAD.size + length
        begin = described + (-described % ALIGNED if nbytes else 0)
        if mark != MARK or begin + nbytes > size:
            return
        gradient = view[begin : begin + nbytes]
        text = view[at + HEAD.size : described]
        if zlib.crc32(gradient, zlib.crc32(text, seed(number, nbytes))) != checksum:
            return
        at = begin + nbytes
        yield Entry(at, decode_record(text), gradient)


def write_snapshot(folder: Path, number: int, meta: Meta, values: Tensor, learned: State) -> None:
    """Write a snapshot, whole or not at all. What came before it is not needed any more: one segment is kept spare."""
    path = snapshot_path(folder, number)
    part = path.with_suffix(PART)
    described = torch.frombuffer(bytearray(encode(meta)), dtype=torch.uint8)
    save_file({META: described, "values": values, **{f"state.{name}": each for name, each in learned.items()}}, part)
    sync(part)
    part.rename(path)
    sync(folder)
    for old in sorted(folder.iterdir()):
        if old.suffix == LOG and int(old.stem) < number:
            old.replace(folder / SPARE)
        elif old.suffix in (SNAPSHOT, PART) and int(old.stem) < number:
            old.unlink(missing_ok=True)


def read_snapshot(path: Path) -> tuple[Meta, Tensor, State]:
    held = load_file(path)
    try:
        meta = decode_meta(held.pop(META).numpy().tobytes())
    except (KeyError, msgspec.MsgspecError) as error:
        raise PacelineError(f"{path} is not a snapshot of this version of paceline: {error}") from None
    return meta, held.pop("values"), {name.removeprefix("state."): value for name, value in held.items()}


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a flat tensor, where they are."""
    return memoryview(tensor.view(torch.uint8).numpy().data)
