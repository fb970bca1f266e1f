"""Files of a user's: what they import from their own folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline import cli, policies, user_code, workloads
from paceline.errors import ConfigError

WORKLOAD = """
import torch
from torch import nn
import other


class Mine:
    batch = 4

    def __init__(self):
        import later

        self.train = torch.arange(8.0).reshape(8, 1), torch.arange(8.0).reshape(8, 1) * other.SLOPE * later.SIGN

    def make_module(self):
        return nn.Linear(1, 1)

    def loss(self, output, target):
        return nn.functional.mse_loss(output, target)
"""
POLICY = """
from dataclasses import dataclass

from other import STALENESS
from paceline.policies import SSP


@dataclass(frozen=True)
class Mine(SSP):
    staleness: int = STALENESS
"""


@pytest.fixture(autouse=True)
def nothing_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("other", "later"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_a_workload_imports_its_neighbours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "a", mine=WORKLOAD, other="SLOPE = 3", later="SIGN = -1")
    path = list(sys.path)
    assert cli.run(["simulate", "--workload", f"{folder}/mine.py:Mine", "--iterations", "2"]) == 0
    assert "2 iterations" in capsys.readouterr().out
    assert sys.path == [*path, str(folder)], "what is looked up later comes from elsewhere first"


def test_a_policy_imports_its_neighbours(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", mine=POLICY, other="STALENESS = 7")
    policy = policies.parse(f"{folder}/mine.py:Mine")
    assert policy.staleness == 7


def test_neighbours_of_the_same_name_in_another_folder_are_others(tmp_path: Path) -> None:
    for name, slope in (("a", 3), ("b", 5)):
        folder = write(tmp_path / name, mine=WORKLOAD, other=f"SLOPE = {slope}", later="SIGN = 1")
        assert workloads.load(f"{folder}/mine.py:Mine").train[1][1] == slope


def test_a_folder_that_is_looked_in_already_keeps_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "a", mine="import other\nimport sys\nsys.path.insert(1, '/elsewhere')", other="")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    before = list(sys.path)
    user_code.run(folder / "mine.py", "workload")
    assert sys.path == ["/elsewhere", *before]


def test_a_neighbour_that_fails_is_one_line(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", mine=WORKLOAD, other="1 / 0")
    with pytest.raises(ConfigError, match=r"mine\.py:4 failed: ZeroDivisionError: division by zero$"):
        workloads.load(f"{folder}/mine.py:Mine")
