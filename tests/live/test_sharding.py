"""How the parameters are cut, and who decides, in real processes."""

from __future__ import annotations

import pytest
import torch

from paceline.api import Job, train_job_live
from paceline.core.actions import Send
from paceline.core.messages import Release
from paceline.errors import ConfigError
from paceline.run import Run
from tests.reference import largest_difference, train_alone

OPTIMIZER = "sgd:lr=0.1,momentum=0.9"


def train(policy: str, slicing: str, servers: int = 3) -> Run:
    cluster = "random-slowdown:factor=6,compute_s=0.002"
    job = Job("digits-mlp", policy, 3, servers, cluster, 40, None, OPTIMIZER, None, 0, False, slicing)
    return train_job_live(job)


@pytest.mark.parametrize(
    ("policy", "slicing"), [("bsp", "key-range"), ("scheduled", "eps"), ("scheduled", "key-range")]
)
def test_bsp_is_single_process_training_however_it_is_cut_and_whoever_decides(policy: str, slicing: str) -> None:
    run = train(policy, slicing)
    alone = train_alone("digits-mlp", 3, 40, OPTIMIZER, torch.float32)
    assert largest_difference(run.parameters, alone) < 1e-5
    assert run.failures == []
    assert run.replay() == []
    assert (run.imbalance > 1.3) == (slicing == "key-range")
    assert sum(run.trace.header.slice_bytes) == sum(value.nbytes for value in run.parameters.values())
    released = [
        action.message
        for record in run.trace
        for action in record.actions
        if isinstance(action, Send) and isinstance(action.message, Release)
    ]
    assert len(released) == (3 * 40 if policy == "scheduled" else 0)


def test_more_servers_than_tensors_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="servers=5 is out of range: 1 to 4, since slicing=key-range"):
        train("bsp", "key-range", servers=5)


def test_an_unknown_slicing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown slicing 'keys' \(known: eps, key-range\)"):
        train("bsp", "keys")
