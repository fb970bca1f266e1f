"""Workers on one GPU are killed again and again. Nothing else may use the GPU meanwhile: its memory is looked at."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.scripts import run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")]


@pytest.mark.timeout(420)
@pytest.mark.parametrize(("policy", "count"), [("asp", 50), ("bsp", 5)])
def test_killed_workers_leave_the_others_training_and_nothing_on_the_gpu(policy: str, count: int) -> None:
    found = run("kills.py", str(count), policy, timeout=400)
    assert len(found["killed"]) == count, found
    assert found["stuck"] == []
    assert found["used"][1] <= found["used"][0] + 64, "the GPU's memory grows"
    assert found["idle"][1] <= found["idle"][0] + 8, "something is left on the GPU"
