"""Memory of a GPU that processes share: what is seen, who may write, and what the death of its maker leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.scripts import run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")]


def test_what_one_process_writes_another_reads_and_it_outlives_its_maker(tmp_path: Path) -> None:
    found = run("shared_memory_script.py", str(tmp_path))
    assert found["seen"] == [1.0, 1.0]
    assert (found["added"], found["owner"]) == (2.0, 2.0)
    assert "illegal memory access" in found["fault"], "who maps it for reading cannot write"
    assert found["orphan"] == pytest.approx(3.0)
    assert found["gone"], "nobody hands it out any more"
