"""A script for Hugging Face's Trainer, with one changed line, as it is released."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainers.running import alone, difference, needs, together

SCRIPT = "transformers_script.py"
STEPS = 20
pytestmark = [pytest.mark.ci, pytest.mark.timeout(300), needs("transformers", "accelerate")]


@pytest.mark.parametrize("kind", [(), ("--padded",), ("--accumulate", 2)])
def test_under_bsp_it_equals_one_process_on_the_joined_batch(kind: tuple[object, ...], tmp_path: Path) -> None:
    """Gradients are clipped, and with texts of unequal length each token counts the same."""
    alone(SCRIPT, tmp_path / "one", "--double", "--batch", 12, *kind)
    printed = together(SCRIPT, tmp_path / "two", "bsp", "--double", *kind)
    one, two = (load_file(tmp_path / each / "end" / "model.safetensors") for each in ("one", "two"))
    assert difference(one, two) < 1e-5
    checkpoint = f"out/checkpoint-{STEPS // 2 if '--accumulate' in kind else STEPS}"
    states = [torch.load(tmp_path / each / checkpoint / "optimizer.pt") for each in ("one", "two")]
    assert difference(states[0]["state"], states[1]["state"]) < 1e-5
    assert printed.count("steps, eval_loss") == 1
    assert "eval_loss" in printed.partition("last logged")[2], "the run's history has the metrics of evaluation"


@pytest.mark.parametrize("policy", ["ssp:staleness=2", "hop:graph=complete", "adpsgd:graph=complete"])
def test_it_learns_under_other_policies(policy: str, tmp_path: Path) -> None:
    printed = together(SCRIPT, tmp_path / "run", policy, "--padded")
    found = [float(line.rpartition(" ")[2]) for line in printed.splitlines() if "steps, eval_loss" in line]
    assert len(found) == 1
    assert found[0] < 2.4, "it was 3.0 before"


def test_it_goes_on_from_a_checkpoint_of_theirs(tmp_path: Path) -> None:
    alone(SCRIPT, tmp_path / "one", "--batch", 12)
    checkpoint = tmp_path / "one" / "out" / f"checkpoint-{STEPS // 2}"
    together(SCRIPT, tmp_path / "two", "bsp", "--resume", checkpoint)
    state = torch.load(tmp_path / "two" / "out" / f"checkpoint-{STEPS}" / "optimizer.pt")["state"]
    assert {each["step"].item() for each in state.values()} == {float(STEPS)}
