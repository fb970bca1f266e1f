"""Checkpoints: what the servers hold, on disk, whole or not at all.

A checkpoint is a folder with a safetensors file for each shard (its values, its optimizer's state), one for what
is not trained, and a manifest that names them with their hashes and has a checksum of its own. The servers write into a
folder with a temporary name; when all have, the driver writes the manifest, syncs and renames. A reader therefore sees
whole checkpoints only. If one was damaged since, the one before it is used, with a warning.

The shards of a checkpoint need not be at the same iteration: they differ for a moment at any time, and the rules that
keep that harmless hold after a restart too. The number of servers may change between a checkpoint and its use: vectors
are joined and cut again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import private_files
from paceline.errors import ConfigError, Damaged, PacelineError
from paceline.runtime.live.protocol.records import ShardEntry
from paceline.runtime.live.storage.checksums import check_file, file_hash, read_with_checksum, sync, with_checksum
from paceline.tensors import assignment, state
from paceline.tensors.assignment import MOST_SERVERS, Assignment, Ranges, overlap, size
from paceline.tensors.layout import BORDERS, DTYPES, SLICINGS, Layout
from paceline.tensors.piece_optimizers import State

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
KEEP = 2
PART = ".part"
OTHERS = "others.safetensors"
MOST = 1 << 48
"""No count in a manifest is larger: iterations, updates, elements."""
MOST_EPOCHS = 1 << 32
MOST_NUMBERED = 1 << 16
"""Of samplers, of an optimizer's groups, and of a policy's characters."""


class Manifest(Struct, frozen=True):
    number: int
    policy: str
    layout: Layout
    shards: tuple[ShardEntry, ...]
    others_sha256: str
    """The hash of the file of what is not trained."""
    epochs: dict[int, int] = {}
    """The epoch that each sampler, by number, begins with when the run is resumed."""
    assignment: Assignment = ()
    """Which shard has which part of the parameters; if empty, equal slices."""
    schedulers: bytes = b""
    """The states of the script's LR schedulers (`paceline.lr_schedulers.States`, encoded)."""


def others_of(folder: Path) -> Path:
    """Returns the checked file of what is not trained."""
    check_file(folder / OTHERS, read(folder).others_sha256)
    return folder / OTHERS


def write_shard(folder: Path, shard: int, values: Tensor, learned: State, iteration: int, version: int) -> ShardEntry:
    """Writes one shard's file, and returns its entry of the manifest. Raises `OSError` when the disk is full."""
    path = folder / f"shard-{shard}.safetensors"
    save_file({"values": values, **{f"state.{name}": value for name, value in learned.items()}}, path)
    sync(path)
    return ShardEntry(path.name, file_hash(path), iteration, version)


def commit(part: Path, manifest: Manifest) -> Path:
    """Makes a complete folder a checkpoint, and removes all but the last `KEEP`."""
    path = part / MANIFEST
    private_files.write(path, with_checksum(manifest))
    sync(path)
    sync(part / OTHERS)
    final = part.with_name(part.name.removesuffix(PART))
    shutil.rmtree(final, ignore_errors=True)
    part.rename(final)
    sync(final.parent)
    for old in whole(final.parent)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def discard(part: Path) -> None:
    """Removes an incomplete checkpoint. A server that still writes may create its file there meanwhile, once."""
    for _ in range(MOST_SERVERS + 1):
        shutil.rmtree(part, ignore_errors=True)
        if not part.exists():
            return


def whole(folder: Path) -> list[Path]:
    """Returns the checkpoints in a folder, oldest first."""
    return sorted(path for path in folder.glob("[0-9]*") if path.name.isdigit())


def next_number(folder: Path) -> int:
    """Returns the number of the next checkpoint: larger than any in the folder, damaged ones included."""
    return max((int(path.name) for path in whole(folder)), default=-1) + 1


def read(path: Path) -> Manifest:
    """Reads the manifest of a checkpoint; raises `Damaged` if it is not what was written, or is impossible."""
    manifest = read_with_checksum(path / MANIFEST, Manifest)
    if (problem := _impossibility(manifest)) is not None:
        raise Damaged(f"{path / MANIFEST} cannot be: {problem}")
    return manifest


def _impossibility(manifest: Manifest) -> str | None:
    """Returns what in a manifest no run can have written, if anything."""
    layout = manifest.layout
    shapes = [length for entry in layout.entries for length in entry.shape]
    counts = [
        manifest.number,
        *shapes,
        *(each for shard in manifest.shards for each in (shard.iteration, shard.version)),
    ]
    if not 1 <= len(manifest.shards) <= MOST_SERVERS:
        return f"it has {len(manifest.shards)} shards"
    if not all(0 <= count <= MOST for count in counts):
        return f"it has a number that is not from 0 to {MOST}"
    if not all(0 <= key < MOST_NUMBERED and 0 <= epoch <= MOST_EPOCHS for key, epoch in manifest.epochs.items()):
        return f"its samplers are at the epochs {str(manifest.epochs)[:80]}"
    if len(manifest.policy) > MOST_NUMBERED:
        return f"its policy has {len(manifest.policy)} characters"
    if len({entry.name for entry in layout.entries}) < len(layout.entries):
        return "two of its tensors have the same name"
    if not all(0 <= entry.group < MOST_NUMBERED for entry in layout.entries):
        return f"it has a group of parameters that is not from 0 to {MOST_NUMBERED - 1}"
    known = layout.dtype in DTYPES and layout.slicing in SLICINGS and layout.borders in BORDERS
    if not known or not 0 <= layout.numel <= MOST:
        cut = f"cut {layout.borders!r:.40} by {layout.slicing!r:.40}"
        return f"its layout is of {layout.numel} elements of {layout.dtype!r:.40}, {cut}"
    if any(shard.file != f"shard-{index}.safetensors" for index, shard in enumerate(manifest.shards)):
        return f"its files are {', '.join(shard.file for shard in manifest.shards)}"
    try:
        parts = assignment_of(manifest)
    except (ConfigError, ArithmeticError, ValueError) as error:
        return str(error)
    ranges = sorted(each for part in parts for each in part)
    ends = [0, *(stop for _, stop in ranges)]
    if len(parts) != len(manifest.shards) or [start for start, _ in ranges] != ends[:-1] or ends[-1] != layout.numel:
        return f"its {len(manifest.shards)} shards do not hold the {layout.numel} parameters once each"
    return None


def check(path: Path, wanted: Ranges | None = None) -> Manifest:
    """Returns the manifest of a checkpoint after checking its files; raises `Damaged` for one that does not match.

    If only a part of the parameters is `wanted`, files that have nothing of it are not checked.
    """
    manifest = read(path)
    for part, shard in zip(assignment_of(manifest), manifest.shards, strict=True):
        if wanted is None or overlap(part, wanted):
            check_file(path / shard.file, shard.sha256)
            _check_values(path / shard.file, manifest.layout, part)
    check_file(path / OTHERS, manifest.others_sha256)
    return manifest


def _check_values(path: Path, layout: Layout, part: Ranges) -> None:
    """Raises `Damaged` unless a shard's file has as many values as its part, of the right type."""
    try:
        with safe_open(path, "pt") as file:
            values = file.get_slice("values")
            found = f"{values.get_shape()} {values.get_dtype()}"
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{path} cannot be read: {error}") from None
    if found != f"{[size(part)]} F{8 * layout.itemsize}":
        raise Damaged(f"{path} does not fit its manifest: it holds {found}, not {size(part)} of {layout.dtype}")


def find(folder: Path, number: int) -> tuple[Path, Manifest]:
    """Returns the checkpoint with this number; raises `ConfigError` with a list of all, if it cannot be used."""
    path = next((each for each in whole(folder) if int(each.name) == number), None)
    if path is None:
        there = describe_all(folder) or "none that can be used"
        raise ConfigError(f"there is no checkpoint {number} in {str(folder)!r} (there are: {there})")
    try:
        return path, check(path)
    except Damaged as problem:
        there = describe_all(folder) or "none that can be used"
        raise Damaged(f"checkpoint {number} cannot be used: {problem} (there are: {there})") from None


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """Returns the newest checkpoint that is not damaged, and what is wrong with those after it."""
    problems: list[str] = []
    for path in reversed(whole(folder)):
        try:
            check(path)
        except Damaged as problem:
            problems.append(f"checkpoint {int(path.name)} is passed over: {problem}")
        else:
            return path, problems
    return None, problems


def repeat(path: Path) -> Path:
    """Copies a checkpoint to the next number, as the newest one: a run that goes on from it begins with that."""
    folder = path.parent
    number = next_number(folder)
    part = folder / f"{number:06d}{PART}"
    try:
        discard(part)
        shutil.copytree(path, part)
        return commit(part, replace(read(path), number=number))
    except OSError as error:
        discard(part)
        raise PacelineError(f"{path} cannot be copied to {part}: {error}") from None


def latest(folder: Path, say: Callable[[str], None] = lambda line: None) -> tuple[Path, Manifest]:
    """Returns the newest usable checkpoint, and says which were passed over. Raises `Damaged` if there is none."""
    path, problems = newest(folder)
    if path is None:
        raise Damaged("; ".join([f"there is no whole checkpoint in {str(folder)!r}", *problems]))
    manifest = read(path)
    for problem in problems:
        say(f"WARNING: {problem}; going on from checkpoint {manifest.number}, at {describe(manifest)}")
    return path, manifest


def describe(manifest: Manifest) -> str:
    """Returns the progress of a checkpoint, in words."""
    iterations = sorted({shard.iteration for shard in manifest.shards})
    versions = sorted({shard.version for shard in manifest.shards})
    return f"iteration {_span(iterations)}, update {_span(versions)}"


def _span(numbers: list[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"


def describe_all(folder: Path) -> str:
    """Lists the checkpoints that can be used, in words; "" if none can."""
    usable = []
    for path in whole(folder):
        try:
            usable.append(f"{int(path.name)}, at {describe(check(path))}")
        except Damaged:
            continue
    return "; ".join(usable)


def assignment_of(manifest: Manifest) -> Assignment:
    """Returns which shard has which part of the parameters."""
    return manifest.assignment or assignment.initial(manifest.layout, len(manifest.shards))


def load_part(path: Path, manifest: Manifest, part: Ranges) -> tuple[Tensor, State]:
    """Loads the values and the optimizer's state of a part, whatever parts the checkpoint was written in."""
    layout = manifest.layout
    parts: list[tuple[Ranges, State]] = []
    for theirs, shard in zip(assignment_of(manifest), manifest.shards, strict=True):
        if overlap(theirs, part):
            check_file(path / shard.file, shard.sha256)
            held = {name.removeprefix("state."): value for name, value in load_file(path / shard.file).items()}
            parts.append((theirs, state.by_tensor(held, layout, theirs)))
    learned = state.gather(parts, layout, part)
    values = learned.pop("values", layout.empty()[:0])
    return values, state.by_piece(learned, layout, part)
