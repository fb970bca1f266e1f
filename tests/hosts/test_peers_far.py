"""Peers on three hosts, without servers: parameters over TCP with keys, and the graph laid out by host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.hosts.netns import Hosts
from tests.hosts.running import Serving
from tests.reference import largest_difference, train_alone

ITERATIONS = 50


@pytest.mark.timeout(240)
def test_complete_standard_serial_over_three_hosts_equals_single_process(tmp_path: Path) -> None:
    policy = ("--policy", "hop:graph=complete,order=serial")
    with Hosts(3, share=tmp_path) as hosts, Serving(hosts[0], tmp_path, "--workers", "6", *policy) as serving:
        for number, host in enumerate(hosts):
            serving.fork(host, f"host{number}", 2, ITERATIONS)
        run = serving.end()
    alone = train_alone("digits-mlp", 6, ITERATIONS, "sgd:lr=0.1", torch.float32)
    assert largest_difference(run.parameters, alone) < 1e-5
    assert run.replay() == []
