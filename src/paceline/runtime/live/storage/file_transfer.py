"""Files that travel with messages between hosts: the reader of a message finds in its folder what the message names.

A host's folder mirrors the run's, as far as its processes need it. The files that were written for the reader of a
message are sent before it over the same connection, so they are there first. Paths in messages are those of the host
they are read on: the agent, and for checkpoints the driver, translate them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from msgspec import structs

from paceline.errors import PacelineError
from paceline.runtime.live.protocol import resizing_messages, wire
from paceline.runtime.live.storage import shared_memory
from paceline.runtime.live.storage.final_parameters import final_name

CHECKPOINT_IN, CHECKPOINT_OUT = "checkpoint-in", "checkpoint-out"
"""Folders in a host's folder: the checkpoint a server starts from, and what its servers write for one."""
OF_SHARD = "of-{shard}-{name}"
"""Files in the driver's folder: the vectors as a server of another host has written them, of which its part counts."""
OTHERS = "others"
PIECE = 1 << 17
"""Bytes that travel together: other messages pass between, and what a broken connection has to repeat is less."""
LARGEST = 1 << 38
"""Bytes of a file that is taken from another host."""
FROM_DRIVER = re.compile(
    r"whole|average|initial-state|others|moved(?:-\d{1,9}){3}"
    r"|checkpoint-in/(?:manifest\.json|others\.safetensors|shard-\d{1,9}\.safetensors)"
)
"""Files of a host's folder that a driver of another host may write: not its configuration, keys and sockets."""


class MessageRefused(PacelineError):
    """Another host said or sent what it may not. It is logged; the host is not told."""


def from_worker(message: wire.ToDriver, folder: Path) -> list[Path]:
    """Lists the files that a worker has written for the reader of this message."""
    match message:
        case wire.Describe(layout=layout) if layout is not None:
            return existing(folder, shared_memory.WHOLE, shared_memory.AVERAGE, shared_memory.INITIAL_STATE, OTHERS)
        case wire.Leave(rank, incarnation):
            return existing(folder, f"buffers-{rank}.{incarnation}", final_name(f"{rank}.{incarnation}"))
        case _:
            return []


def for_worker(message: wire.ToWorker, folder: Path, with_values: bool) -> list[Path]:
    """Lists the files that a worker needs when it reads this message. Peers, `with_values`, begin with the model."""
    if not isinstance(message, wire.Begin):
        return []
    values = (shared_memory.WHOLE, shared_memory.INITIAL_STATE) if with_values and message.view.number == 1 else ()
    return existing(folder, OTHERS, *values)


def for_server(message: wire.ToServer, folder: Path, shard: int) -> list[tuple[Path, str]]:
    """Lists (file, name on the other host) of what a server needs when it reads this message."""
    match message:
        case wire.Configure(reslice=reslice) if reslice is not None:
            return [*_moved(folder, reslice.give, shard), *_vectors(folder)]
        case wire.Configure(checkpoint=checkpoint) if checkpoint is not None:
            kept = [(path, f"{CHECKPOINT_IN}/{path.name}") for path in sorted(Path(checkpoint).iterdir())]
            return [*kept, *_vectors(folder)]
        case wire.Configure():
            return [*_vectors(folder), *named(existing(folder, shared_memory.INITIAL_STATE))]
        case resizing_messages.Reslice(give=give):
            return _moved(folder, give, shard)
        case _:
            return []


def _vectors(folder: Path) -> list[tuple[Path, str]]:
    return named(existing(folder, shared_memory.WHOLE, shared_memory.AVERAGE))


def _moved(folder: Path, give: resizing_messages.Give, shard: int) -> list[tuple[Path, str]]:
    return named(sorted(folder.glob(f"moved-{give.number}-*-{shard}")))


def from_server(message: wire.ToDriver, folder: Path) -> list[tuple[Path, str]]:
    """Lists (file, name on the driver's host) of what a server has written for the reader of this message."""
    match message:
        case resizing_messages.Gave(shard, number):
            return named(sorted(folder.glob(f"moved-{number}-{shard}-*")))
        case wire.Saved(shard=shard, entry=entry) if entry is not None:
            return [(folder / CHECKPOINT_OUT / entry.file, f"{CHECKPOINT_OUT}/{entry.file}")]
        case wire.Finished(shard):
            left = existing(folder, shared_memory.WHOLE, shared_memory.AVERAGE)
            return [(path, OF_SHARD.format(shard=shard, name=path.name)) for path in left]
        case _:
            return []


def localized(message: wire.ToServer, folder: Path) -> wire.ToServer:
    """Returns the message with paths of the host that `folder` is on."""
    match message:
        case wire.Configure(journal=journal) if journal is not None:
            raise MessageRefused("a server of this host is to write a log: logs are only kept on the driver's host")
        case wire.Configure(checkpoint=checkpoint) if checkpoint is not None:
            return structs.replace(message, checkpoint=str(folder / CHECKPOINT_IN))
        case wire.Checkpoint():
            (folder / CHECKPOINT_OUT).mkdir(mode=0o700, exist_ok=True)
            return wire.Checkpoint(str(folder / CHECKPOINT_OUT))
        case _:
            return message


def unpack_checkpoint(message: wire.Saved, folder: Path, into: Path) -> wire.Saved:
    """Moves a part of a checkpoint that came from another host to where the driver wants it."""
    if message.entry is not None:
        if message.entry.file != f"shard-{message.shard}.safetensors":
            raise MessageRefused(f"a part of a checkpoint is not named {message.entry.file!r}")
        try:
            shutil.move(folder / CHECKPOINT_OUT / message.entry.file, into / message.entry.file)
        except OSError as error:
            return wire.Saved(str(into), message.shard, None, str(error))
    return structs.replace(message, folder=str(into))


def existing(folder: Path, *names: str) -> list[Path]:
    return [folder / name for name in names if (folder / name).exists()]


def named(paths: list[Path]) -> list[tuple[Path, str]]:
    """Pairs files with their own names."""
    return [(path, path.name) for path in paths]


def pieces(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Cuts a file in pieces: (offset, size of the whole, content). An empty file is one empty piece."""
    with path.open("rb") as file:
        size = path.stat().st_size
        offset = 0
        while True:
            content = file.read(PIECE)
            yield offset, size, content
            offset += len(content)
            if offset >= size or not content:
                return


def check_from_driver(name: str, size: int) -> None:
    """Refuses a file that no process of this host needs."""
    if FROM_DRIVER.fullmatch(name) is None or not 0 <= size <= LARGEST:
        raise MessageRefused(f"the driver may not write a file {name!r} of {size} bytes")


def unpack(folder: Path, name: str, offset: int, size: int, content: bytes | memoryview) -> None:
    """Writes a piece of a file in the folder, and nowhere else. The file appears when it is whole."""
    parts = PurePosixPath(name).parts
    if not parts or len(parts) > 2 or any(part in ("..", "/", "") for part in parts) or len(name) > 200:
        raise MessageRefused(f"a file named {name!r} has no place in a run's folder")
    if offset < 0 or offset + len(content) > size:
        raise MessageRefused(f"a piece of {name!r} does not fit: {len(content)} bytes at {offset} of {size}")
    path = folder.joinpath(*parts)
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        begin = os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | (os.O_APPEND if offset else os.O_TRUNC)
        with os.fdopen(os.open(part, begin, 0o600), "ab" if offset else "wb") as file:
            if file.tell() != offset:
                raise MessageRefused(f"a piece of {name!r} is missing")
            file.write(content)
        if offset + len(content) == size:
            part.replace(path)
    except (OSError, ValueError, MessageRefused) as error:
        with contextlib.suppress(OSError, ValueError):
            part.unlink()
        raise MessageRefused(f"{name!r} cannot be written: {error}") from None
