"""Runs on a real Ray cluster of three nodes, all of this machine."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline import rundir
from paceline.run import Run
from tests.reference import largest_difference, train_alone

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(300)
HERE = Path(__file__).parent
ON_THIS_MACHINE = True
"""No namespaces are needed."""
ITERATIONS = 30


class Nodes:
    """Three nodes with places for four processes each: if one is lost, there is room for eight on the others."""

    def __init__(self) -> None:
        command = [sys.executable, str(HERE / "ray_nodes.py"), "3", "4"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self.read()

    def read(self) -> str:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if re.fullmatch(r"[\d.]+:\d+\n|[\d ]+\n", line):
                return line.strip()
        raise AssertionError("the cluster has ended")

    def remove(self) -> set[int]:
        """Take away a node with a server; the numbers of the bundles it had."""
        assert self.process.stdin is not None
        print("remove", file=self.process.stdin, flush=True)
        return set(map(int, self.read().split()))

    def end(self) -> None:
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.end()


def paceline(address: str, *options: str, log: Path) -> subprocess.Popen[str]:
    """`paceline run --on ray` with six workers and two servers; what it says goes into the log."""
    command = [sys.executable, "-m", "paceline", "run", "--on", "ray", "--ray-address", address]
    size = ["--workers", "6", "--servers", "2"]
    with log.open("w") as file:
        return subprocess.Popen([*command, *size, *options], stdout=file, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen[str], folder: Path, log: Path) -> Run:
    assert process.wait(timeout=240) == 0, log.read_text()
    return rundir.load(folder)


def test_bsp_over_tcp_equals_single_process(nodes: Nodes, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    script = [str(HERE / "far_job.py"), "digits-mlp", "sgd:lr=0.1", "32", str(ITERATIONS)]
    run = ended(paceline(nodes.address, "--policy", "bsp", "--dir", str(folder), *script, log=log), folder, log)
    alone = train_alone("digits-mlp", 6, ITERATIONS, "sgd:lr=0.1", torch.float32)
    assert largest_difference(run.parameters, alone) < 1e-5
    assert {record.node.rank for record in run.trace if record.node.role == "worker"} == set(range(6))
    assert "over TCP to tcp://" in log.read_text()
    assert "placed on 3 nodes" in log.read_text()


def test_a_node_is_lost_and_the_run_ends_at_its_target(nodes: Nodes, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    options = ["--policy", "ssp:staleness=3", "--cluster", "steady:compute_s=0.1", "--target", "accuracy=0.93"]
    script = [str(HERE / "job.py"), "digits-mlp", "sgd:lr=0.05", "32", "100000"]
    process = paceline(nodes.address, *options, "--timeout-s", "200", "--dir", str(folder), *script, log=log)
    try:
        wait_for(process, log, lambda: list(folder.glob("checkpoints/*/manifest.json")))
        lost = nodes.remove()
        run = ended(process, folder, log)
    finally:
        process.kill()
        process.wait()
    said = log.read_text()
    assert run.reached_s is not None
    assert run.failures == []
    workers = {bundle for bundle in lost if bundle < 6}
    servers = {bundle - 6 for bundle in lost if bundle >= 6}
    assert workers
    assert servers
    for rank in servers:
        assert re.search(rf"server {rank} was killed by SIGKILL; restarting it from", said), said
    again = {record.node.rank for record in run.trace if record.node.role == "worker" and record.incarnation > 0}
    assert again >= workers, said


def wait_for(process: subprocess.Popen[str], log: Path, happened) -> None:
    until = time.monotonic() + 120
    while not happened():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)
