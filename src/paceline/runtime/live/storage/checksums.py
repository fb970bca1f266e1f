"""Checksums of the files a run keeps, so that damage is noticed instead of trained on.

A small JSON file carries the SHA-256 of its content beside the content (`with_checksum`, `read_with_checksum`). A
set of tensors has a CRC-32 over names, types, shapes and bytes (`tensors_checksum`). Whatever does not match raises
`Damaged`.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from paceline.errors import Damaged

Content = TypeVar("Content", bound=Struct)


class ChecksummedFile(Struct, frozen=True):
    """A JSON file with the checksum of its content."""

    sha256: str
    content: msgspec.Raw


def with_checksum(content: object) -> bytes:
    """Encodes content together with its checksum, for a file that `read_with_checksum` reads."""
    encoded = msgspec.json.encode(content)
    return msgspec.json.encode(ChecksummedFile(hashlib.sha256(encoded).hexdigest(), msgspec.Raw(encoded)))


def read_with_checksum(path: Path, kind: type[Content]) -> Content:
    """Reads the content of a file with a checksum; raises `Damaged` if it is not what was written."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from None
    try:
        file = msgspec.json.decode(data, type=ChecksummedFile)
        encoded = bytes(file.content)
        if hashlib.sha256(encoded).hexdigest() != file.sha256:
            raise Damaged(f"{path} is damaged: its content does not match its checksum")
        return msgspec.json.decode(encoded, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if data.startswith(b'{"number":'):
            raise Damaged(f"{path} was written by an older version of paceline, without checksums") from None
        raise Damaged(f"{path} is damaged: {error}") from None


def file_hash(path: Path) -> str:
    """Computes the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_file(path: Path, sha256: str) -> None:
    """Raises `Damaged` unless the file has this SHA-256."""
    try:
        found = file_hash(path)
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from None
    if found != sha256:
        raise Damaged(f"{path} is damaged: it does not match its checksum")


def tensors_checksum(tensors: Mapping[str, Tensor]) -> int:
    """Computes a CRC-32 over names, types, shapes and bytes."""
    checksum = 0
    for name, tensor in sorted(tensors.items()):
        checksum = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode(), checksum)
        checksum = zlib.crc32(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data), checksum)
    return checksum


def sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
