"""Checkpoints: what the servers hold, on disk, whole or not at all.

A checkpoint is a folder with a safetensors file for each shard (its values, its optimizer's state), one for what
is not trained, and a manifest that names them with their hashes. The servers write into a folder with a
temporary name; when all have, the driver writes the manifest, syncs and renames. A reader therefore sees whole
checkpoints only, and one whose hashes do not match is passed over for the one before it.

The shards of a checkpoint need not stand at the same iteration: they disagree for a moment at any time, and the
rules that keep that harmless hold after a restart too. The number of servers may change between a checkpoint and
its use: vectors are joined and cut again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import msgspec
from msgspec import Struct
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import PacelineError
from paceline.tensors import assignment, state
from paceline.tensors.assignment import Assignment, Ranges, overlap
from paceline.tensors.layout import Layout
from paceline.tensors.steppers import State

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
KEEP = 2
PART = ".part"


class Shard(Struct, frozen=True):
    """One shard's file in a manifest."""

    file: str
    sha256: str
    iteration: int
    version: int


class Manifest(Struct, frozen=True):
    number: int
    policy: str
    layout: Layout
    shards: tuple[Shard, ...]
    others: str
    """The file of what is not trained."""
    epochs: dict[int, int] = {}
    """Of each sampler, by number: the epoch it deals first when the run is resumed."""
    assignment: Assignment = ()
    """Which shard has which part of the parameters; equal slices if that is not said."""


def others_of(folder: Path) -> Path:
    """The file of what is not trained."""
    return folder / read(folder).others


def write_shard(folder: Path, shard: int, values: Tensor, learned: State, iteration: int, version: int) -> Shard:
    """Write one shard's file; what the manifest is to say of it. Raises `OSError` when the disk is full."""
    path = folder / f"shard-{shard}.safetensors"
    save_file({"values": values, **{f"state.{name}": value for name, value in learned.items()}}, path)
    _sync(path)
    return Shard(path.name, _hash(path), iteration, version)


def commit(part: Path, manifest: Manifest) -> Path:
    """Make a folder that is complete a checkpoint; older ones than the last `KEEP` are removed."""
    path = part / MANIFEST
    path.write_bytes(msgspec.json.encode(manifest))
    _sync(path)
    final = part.with_name(part.name.removesuffix(PART))
    shutil.rmtree(final, ignore_errors=True)
    part.rename(final)
    _sync(final.parent)
    for old in whole(final.parent)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def whole(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(path.parent for path in folder.glob(f"*/{MANIFEST}") if not path.parent.name.endswith(PART))


def read(path: Path) -> Manifest:
    return msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)


def latest(folder: Path) -> tuple[Path, Manifest]:
    """The newest checkpoint whose files are what its manifest says."""
    for path in reversed(whole(folder)):
        try:
            manifest = read(path)
            if all(_hash(path / shard.file) == shard.sha256 for shard in manifest.shards):
                return path, manifest
        except (OSError, msgspec.MsgspecError):
            continue
    raise PacelineError(f"there is no whole checkpoint in {str(folder)!r}")


def assignment_of(manifest: Manifest) -> Assignment:
    """Which shard has which part of the parameters."""
    return manifest.assignment or assignment.initial(manifest.layout, len(manifest.shards))


def load_part(path: Path, manifest: Manifest, part: Ranges) -> tuple[Tensor, State]:
    """The values and the optimizer's state of one part, whatever parts the checkpoint was written in."""
    layout = manifest.layout
    parts: list[tuple[Ranges, State]] = []
    for theirs, shard in zip(assignment_of(manifest), manifest.shards, strict=True):
        if overlap(theirs, part):
            held = {name.removeprefix("state."): value for name, value in load_file(path / shard.file).items()}
            parts.append((theirs, state.by_tensor(held, layout, theirs)))
    learned = state.gather(parts, layout, part)
    values = learned.pop("values", layout.empty()[:0])
    return values, state.by_piece(learned, layout, part)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
