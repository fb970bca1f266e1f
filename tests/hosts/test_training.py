"""Three hosts, two servers, six workers over TCP with keys: the same training as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.hosts.netns import Hosts
from tests.hosts.running import Serving, job
from tests.reference import largest_difference, train_alone

ITERATIONS = 50


@pytest.mark.timeout(240)
def test_bsp_over_three_hosts_equals_single_process(tmp_path: Path) -> None:
    with (
        Hosts(3, share=tmp_path) as hosts,
        Serving(hosts[0], tmp_path, "--servers", "2", "--workers", "6", "--policy", "bsp") as serving,
    ):
        script = job("digits-mlp", "sgd:lr=0.1", 32, ITERATIONS)
        for number, host in enumerate(hosts):
            serving.join(host, f"join{number}", 2, script)
        run = serving.end()
    alone = train_alone("digits-mlp", 6, ITERATIONS, "sgd:lr=0.1", torch.float32)
    assert largest_difference(run.parameters, alone) < 1e-5
    assert {record.node.rank for record in run.trace if record.node.role == "worker"} == set(range(6))
