"""Files that travel with messages between hosts: whole, and only where they belong."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.runtime.live.storage import file_transfer


@pytest.mark.parametrize("size", [0, 1, file_transfer.PIECE, file_transfer.PIECE + 1, 3 * file_transfer.PIECE])
def test_a_file_arrives_as_it_left(size: int, tmp_path: Path) -> None:
    source, there = tmp_path / "source", tmp_path / "there"
    there.mkdir()
    source.write_bytes(bytes(index % 251 for index in range(size)))
    for offset, whole, content in file_transfer.pieces(source):
        assert not (there / "trace" / "x").exists(), "a file appears when it is whole"
        file_transfer.unpack(there, "trace/x", offset, whole, content)
    assert (there / "trace" / "x").read_bytes() == source.read_bytes()
    assert [path.name for path in (there / "trace").iterdir()] == ["x"]


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../x", "a/b/c", "..", "x" * 201])
def test_no_file_outside_the_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(file_transfer.MessageRefused):
        file_transfer.unpack(tmp_path, name, 0, 1, b"x")
    assert list(tmp_path.iterdir()) == []


def test_a_piece_must_fit(tmp_path: Path) -> None:
    for offset, size in ((-1, 4), (3, 4), (0, 1)):
        with pytest.raises(file_transfer.MessageRefused):
            file_transfer.unpack(tmp_path, "x", offset, size, b"ab")


def test_a_file_with_a_missing_piece_never_appears(tmp_path: Path) -> None:
    file_transfer.unpack(tmp_path, "x", 0, 9, b"aaa")
    with pytest.raises(file_transfer.MessageRefused):
        file_transfer.unpack(tmp_path, "x", 6, 9, b"ccc")
    assert list(tmp_path.iterdir()) == []
