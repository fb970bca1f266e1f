"""A loop with Accelerate, with one changed line, as it is released."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.trainers.running import alone, difference, needs, together

SCRIPT = "accelerate_script.py"
pytestmark = [pytest.mark.ci, pytest.mark.timeout(300), needs("accelerate")]


@pytest.mark.parametrize("kind", [(), ("--accumulate", 2)])
def test_under_bsp_it_equals_one_process_on_the_joined_batch(kind: tuple[object, ...], tmp_path: Path) -> None:
    """The last batches of an epoch are smaller: they weigh less."""
    alone(SCRIPT, tmp_path / "one", "--batch", 12, *kind)
    together(SCRIPT, tmp_path / "two", "bsp", *kind)
    one, two = (load_file(tmp_path / each / "end" / "model.safetensors") for each in ("one", "two"))
    assert difference(one, two) < 1e-5


@pytest.mark.parametrize("policy", ["ssp:staleness=2", "hop:graph=complete"])
def test_it_learns_under_other_policies(policy: str, tmp_path: Path) -> None:
    printed = together(SCRIPT, tmp_path / "run", policy)
    found = [float(line.rpartition(" ")[2]) for line in printed.splitlines() if "held-out loss" in line]
    assert len(found) == 1, "the main process prints"
    assert found[0] < 0.5, "it was 0.75 before"
