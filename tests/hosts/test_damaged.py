"""Hosts behind a line that damages what it carries, on all connections of a run: the driver's, and those to servers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.bench.hosts.netns import Hosts
from tests.hosts.running import Serving
from tests.reference import train_alone

OPTIONS = ("--servers", "2", "--workers", "2", "--policy", "bsp")


@pytest.mark.ci
@pytest.mark.parametrize("insecure", [pytest.param(False, marks=pytest.mark.long), True], ids=["keys", "open"])
def test_a_run_behind_a_damaging_line_ends_with_the_parameters_of_one_process(insecure: bool, tmp_path: Path) -> None:
    with Hosts(3, share=tmp_path) as hosts, Serving(hosts[0], tmp_path, *OPTIONS, insecure=insecure) as serving:
        for number, host in enumerate(hosts[1:]):
            host.slow(damage=0.02, seed=number)
            serving.fork(host, f"host{number}", 1, 40)
        run = serving.end()
    alone = train_alone("digits-mlp", 2, 40, "sgd:lr=0.1", torch.float32)
    assert max(float((run.parameters[name] - alone[name]).abs().max()) for name in alone) < 1e-5
    assert ("damaged on its way" in serving.logs()) == insecure
