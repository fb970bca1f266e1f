"""Files that travel with messages between hosts: who reads a message finds in its folder what it names.

A host's folder is a mirror of the run's as far as its processes look. Before a message leaves a host, the files that
were written for its reader go; they come over the same connection, so they are there first. Paths in messages are
those of the host they are read on: the agent, and of checkpoints the driver, change them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from msgspec import structs

from paceline.errors import PacelineError
from paceline.runtime.live import memory, wire
from paceline.runtime.live.across.posting import FRAME
from paceline.runtime.live.driver.peers import final_path

CHECKPOINT_IN, CHECKPOINT_OUT = "checkpoint-in", "checkpoint-out"
"""In a host's folder: the checkpoint a server of it starts from, and what its servers write for one."""
OF_SHARD = "of-{shard}-{name}"
"""In the driver's folder: the vectors as a server on another host has left them, of which its part counts."""
OTHERS = "others"


class Refused(PacelineError):
    """A message of another host that is not as it must be."""


def from_worker(message: wire.ToDriver, folder: Path) -> list[Path]:
    """What a worker has left for the reader of this message."""
    match message:
        case wire.Describe(layout=layout) if layout is not None:
            return existing(folder, memory.WHOLE, memory.AVERAGE, memory.INITIAL_STATE, OTHERS)
        case wire.Leave(rank, incarnation):
            return [
                *existing(folder, f"buffers-{rank}.{incarnation}"),
                *existing_path(final_path(folder, rank, incarnation)),
            ]
        case _:
            return []


def for_worker(message: wire.ToWorker, folder: Path, with_values: bool) -> list[Path]:
    """What a worker that reads this message will look for. Peers begin with the values themselves."""
    if not isinstance(message, wire.Begin):
        return []
    values = (memory.WHOLE, memory.INITIAL_STATE) if with_values and message.view.number == 1 else ()
    return existing(folder, OTHERS, *values)


def for_server(message: wire.ToServer, folder: Path, shard: int) -> list[tuple[Path, str]]:
    """(file, name on the other host) of what a server that reads this message will look for."""
    match message:
        case wire.Configure(reslice=reslice) if reslice is not None:
            return [*_moved(folder, reslice.give, shard), *_vectors(folder)]
        case wire.Configure(checkpoint=checkpoint) if checkpoint is not None:
            kept = [(path, f"{CHECKPOINT_IN}/{path.name}") for path in sorted(Path(checkpoint).iterdir())]
            return [*kept, *_vectors(folder)]
        case wire.Configure():
            return [*_vectors(folder), *named(existing(folder, memory.INITIAL_STATE))]
        case wire.Reslice(give=give):
            return _moved(folder, give, shard)
        case _:
            return []


def _vectors(folder: Path) -> list[tuple[Path, str]]:
    return named(existing(folder, memory.WHOLE, memory.AVERAGE))


def _moved(folder: Path, give: wire.Give, shard: int) -> list[tuple[Path, str]]:
    return named(sorted(folder.glob(f"moved-{give.number}-*-{shard}")))


def from_server(message: wire.ToDriver, folder: Path) -> list[tuple[Path, str]]:
    """(file, name on the driver's host) of what a server has left for the reader of this message."""
    match message:
        case wire.Gave(shard, number):
            return named(sorted(folder.glob(f"moved-{number}-{shard}-*")))
        case wire.Saved(shard=shard, entry=entry) if entry is not None:
            return [(folder / CHECKPOINT_OUT / entry.file, f"{CHECKPOINT_OUT}/{entry.file}")]
        case wire.Finished(shard):
            left = existing(folder, memory.WHOLE, memory.AVERAGE)
            return [(path, OF_SHARD.format(shard=shard, name=path.name)) for path in left]
        case _:
            return []


def localized(message: wire.ToServer, folder: Path) -> wire.ToServer:
    """The message as a server of another host is to read it: paths are those of its own folder."""
    match message:
        case wire.Configure(checkpoint=checkpoint) if checkpoint is not None:
            return structs.replace(message, checkpoint=str(folder / CHECKPOINT_IN))
        case wire.Checkpoint():
            (folder / CHECKPOINT_OUT).mkdir(exist_ok=True)
            return wire.Checkpoint(str(folder / CHECKPOINT_OUT))
        case _:
            return message


def unpack_checkpoint(message: wire.Saved, folder: Path, into: Path) -> wire.Saved:
    """A part of a checkpoint came from another host: put it where the driver wants it."""
    if message.entry is not None:
        if message.entry.file != f"shard-{message.shard}.safetensors":
            raise Refused(f"a part of a checkpoint is not named {message.entry.file!r}")
        try:
            shutil.move(folder / CHECKPOINT_OUT / message.entry.file, into / message.entry.file)
        except OSError as error:
            return wire.Saved(str(into), message.shard, None, str(error))
    return structs.replace(message, folder=str(into))


def existing(folder: Path, *names: str) -> list[Path]:
    return [folder / name for name in names if (folder / name).exists()]


def existing_path(path: Path) -> list[Path]:
    return [path] if path.exists() else []


def named(paths: list[Path]) -> list[tuple[Path, str]]:
    """Under their own names."""
    return [(path, path.name) for path in paths]


def pieces(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(offset, size of the whole, content): a file cut for the journey. An empty one is one empty piece."""
    with path.open("rb") as file:
        size = path.stat().st_size
        offset = 0
        while True:
            content = file.read(FRAME)
            yield offset, size, content
            offset += len(content)
            if offset >= size or not content:
                return


def unpack(folder: Path, name: str, offset: int, size: int, content: bytes | memoryview) -> None:
    """Put a piece of a file where it belongs in the folder, and nowhere else. A file appears when it is whole."""
    parts = PurePosixPath(name).parts
    if not parts or len(parts) > 2 or any(part in ("..", "/", "") for part in parts) or len(name) > 200:
        raise Refused(f"a file named {name!r} has no place in a run's folder")
    if offset < 0 or offset + len(content) > size:
        raise Refused(f"a piece of {name!r} does not fit: {len(content)} bytes at {offset} of {size}")
    path = folder.joinpath(*parts)
    path.parent.mkdir(exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("ab" if offset else "wb") as file:
            if file.tell() != offset:
                raise Refused(f"a piece of {name!r} is missing")
            file.write(content)
    except (OSError, Refused) as error:
        part.unlink(missing_ok=True)
        raise Refused(f"{name!r} cannot be written: {error}") from None
    if offset + len(content) == size:
        part.replace(path)
