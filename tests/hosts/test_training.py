"""Three hosts, two servers, workers on each over TCP with keys: the same training as in one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from paceline import run_folder
from paceline.bench.hosts.netns import Hosts
from tests.hosts.running import Serving, job
from tests.reference import largest_difference, train_alone

ITERATIONS = 50


@pytest.mark.timeout(240)
@pytest.mark.parametrize("batch", [(32, 32, 32), pytest.param((40, 24, 7), marks=pytest.mark.ci)], ids=str)
def test_bsp_over_three_hosts_equals_single_process(tmp_path: Path, batch: tuple[int, ...]) -> None:
    with (
        Hosts(3, share=tmp_path) as hosts,
        Serving(hosts[0], tmp_path, "--servers", "2", "--workers", "3", "--policy", "bsp") as serving,
    ):
        script = job(batch=",".join(map(str, batch)), iterations=ITERATIONS)
        for number, host in enumerate(hosts):
            serving.join(host, f"join{number}", 1, script)
        run = serving.end()
        said = serving.log("serve")
    assert "still to come)" in said
    alone = train_alone("digits-mlp", 3, ITERATIONS, "sgd:lr=0.1", torch.float32, batch=batch)
    assert largest_difference(run.parameters, alone) < 1e-5
    assert {record.node.rank for record in run.trace if record.node.role == "worker"} == set(range(3))


POLICIES = [
    "bsp",
    "asp",
    "ssp:staleness=3",
    "dssp:low=1,high=5",
    "pssp:staleness=3,probability=0.3",
    "backup:extra=1",
    "deadline",
    "elastic:lookahead=15",
    "waiting:delay_s=0.002",
    "specsync:base=asp",
    "scheduled:base=bsp",
    "ssp:staleness=3+backup:extra=1",
    "bsp@0,ssp:staleness=3@20",
]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_each_policy_trains_digits_over_three_hosts(tmp_path: Path) -> None:
    series = [sys.executable, "-m", "tests.hosts.series"]
    with Hosts(3, share=tmp_path) as hosts, (tmp_path / "log").open("w") as log:
        drive = hosts[0].popen(
            [*series, "drive", tmp_path, hosts[0].address, "6", "2", *POLICIES], stdout=log, stderr=log
        )
        for host in hosts:
            host.popen([*series, "take-part", tmp_path, "2", *POLICIES], stdout=log, stderr=log)
        code = drive.wait(timeout=280)
    said = (tmp_path / "log").read_text()
    assert code == 0, said
    for number, policy in enumerate(POLICIES):
        run = run_folder.load(tmp_path / str(number))
        assert run.time_to_target_s is not None, f"{policy} missed its target:\n{said}"
