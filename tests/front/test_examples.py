"""The examples: alone, together, and without their data."""

from __future__ import annotations

import gzip
import json
import os
import re
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests import forked

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(*command: object, data: Path | None = None, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PACELINE_DATA", None)
    if data is not None:
        environment["PACELINE_DATA"] = str(data)
    return forked.run(command, folder, environment)


def losses(output: str) -> dict[int, float]:
    """Step -> loss, as printed."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", output)}


def write_idx(path: Path, values: np.ndarray) -> None:
    """The idx format: two zero bytes, the type (8: unsigned byte), how many dimensions, their sizes, the values."""
    sizes = struct.pack(f">{values.ndim}i", *values.shape)
    raw = bytes([0, 0, 8, values.ndim]) + sizes + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def write_stripes(folder: Path, suffix: str) -> None:
    """Ten classes that a small network learns at once: class k is a bright band at row 2k + 4, in some noise."""
    random = np.random.default_rng(0)
    for part, count in (("train", 400), ("t10k", 100)):
        labels = random.integers(0, 10, count)
        images = random.integers(0, 40, (count, 28, 28))
        for image, label in zip(images, labels, strict=True):
            image[2 * label + 4 : 2 * label + 6] = 250
        write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", labels)


@pytest.mark.parametrize("name", ["digits", "fashion", "characters", "gan"])
def test_an_example_is_short_enough_to_read(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 80


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_fashion_learns_alone_from_idx_files(suffix: str, tmp_path) -> None:
    write_stripes(tmp_path, suffix)
    done = run("examples/fashion.py", "--steps", 40, "--batch", 20, "--lr", 0.05, data=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert list(losses(done.stdout)) == [1, 40]
    assert float(done.stdout.split()[-1]) > 0.8


def test_fashion_takes_the_folder_from_the_command_line_first(tmp_path) -> None:
    done = run("examples/fashion.py", "--data", tmp_path / "here", data=tmp_path / "there")
    assert done.returncode == 2
    assert f"there is no train-images-idx3-ubyte.gz in {tmp_path / 'here'}" in done.stderr


def test_fashion_without_its_data_says_what_to_install_in_one_line(tmp_path) -> None:
    done = run("examples/fashion.py", "--data", tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert str(tmp_path) in done.stderr
    assert "apt-get install dataset-fashion-mnist" in done.stderr
    assert "PACELINE_DATA" in done.stderr


def test_characters_learn_alone_and_write_something() -> None:
    done = run("examples/characters.py", "--steps", 25, "--batch", 8)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = losses(done.stdout)
    assert list(found) == [1, 25]
    assert found[25] < found[1] - 0.5
    assert len(done.stdout) > 300


@pytest.mark.ci
def test_characters_learn_on_two_workers(tmp_path) -> None:
    result = tmp_path / "out.json"
    done = run(
        *("-m", "paceline", "run", "--workers", 2, "--policy", "ssp:staleness=2", "--json", result),
        *(EXAMPLES / "characters.py", "--steps", 25, "--batch", 8),
        folder=tmp_path,  # the run leaves a folder of its own there
    )
    assert done.returncode == 0, done.stderr
    found = losses(done.stdout)
    assert list(found) == [1, 25], "only worker 0 prints"
    assert found[25] < found[1] - 0.5
    (outcome,) = json.loads(result.read_text())["runs"]
    assert outcome["iterations"] == 25
    assert outcome["updates"] == 50
    assert outcome["final"]["loss"] == pytest.approx(found[25], abs=0.01)
