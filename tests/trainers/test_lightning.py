"""A script for Lightning, with two changed lines, as it is released."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainers.running import alone, difference, needs, together

SCRIPT = "lightning_script.py"
pytestmark = [pytest.mark.ci, pytest.mark.timeout(300), needs("lightning")]


def checkpoint(folder: Path, name: str = "end.ckpt") -> Any:
    return torch.load(folder / name, weights_only=False)


def assert_equal(one: Path, other: Path) -> None:
    first, second = checkpoint(one), checkpoint(other)
    assert difference(first["state_dict"], second["state_dict"]) < 1e-5
    assert difference(first["optimizer_states"], second["optimizer_states"]) < 1e-5
    assert first["global_step"] == second["global_step"] > 0


@pytest.mark.parametrize(
    "kind", [("--clip", 0.1), ("--accumulate", 2), ("--gan",), ("--precision", "64-true", "--workers", 1)]
)
def test_under_bsp_it_equals_one_process_on_the_joined_batch(kind: tuple[object, ...], tmp_path: Path) -> None:
    alone(SCRIPT, tmp_path / "one", "--batch", 24, *kind)
    printed = together(SCRIPT, tmp_path / "two", "bsp", *kind)
    assert_equal(tmp_path / "one", tmp_path / "two")
    assert difference(*(checkpoint(tmp_path / each, "best/best.ckpt")["state_dict"] for each in ("one", "two"))) < 1e-5
    assert "val_loss" in printed, "the run's history has the metrics of validation"


@pytest.mark.parametrize("policy", ["ssp:staleness=2", "hop:graph=complete", "backup:extra=1"])
def test_it_learns_under_other_policies(policy: str, tmp_path: Path) -> None:
    printed = together(SCRIPT, tmp_path / "run", policy, "--precision", "bf16-mixed", "--clip", 0.5)
    found = [float(line.rpartition(" ")[2]) for line in printed.splitlines() if "steps, val_loss" in line]
    assert len(found) == 2
    assert all(loss < 0.47 for loss in found), "it was 0.51 before"


def test_it_goes_on_from_a_checkpoint_of_lightnings(tmp_path: Path) -> None:
    alone(SCRIPT, tmp_path / "half", "--batch", 24, "--epochs", 2)
    together(SCRIPT, tmp_path / "other", "bsp", "--epochs", 4, "--ckpt", tmp_path / "half" / "end.ckpt")
    kept, gone_on = checkpoint(tmp_path / "half"), checkpoint(tmp_path / "other")
    assert (kept["global_step"], gone_on["global_step"]) == (20, 40)
    steps = [state["step"].item() for state in gone_on["optimizer_states"][0]["state"].values()]
    assert steps == [40.0] * 4, "the optimizer's state has come along"
