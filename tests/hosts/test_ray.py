"""Runs on a real Ray cluster of three nodes, all of this machine."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from paceline import cli, run_folder
from paceline.run import Run
from tests.reference import largest_difference, train_alone

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(300)
HERE = Path(__file__).parent
ON_THIS_MACHINE = True
"""No namespaces are needed."""
ITERATIONS = 30
FAILING = """
import paceline, torch
world = paceline.init()
model = torch.nn.Linear(2, 1)
opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
def closure():
    opt.zero_grad()
    loss = model(torch.ones(4, 2)).square().mean()
    loss.backward()
    return loss
while opt.global_step < 100:
    opt.step(closure)
    if world.rank == 1 and opt.global_step > 5:
        raise ZeroDivisionError("a bug of the script")
"""


class Nodes:
    """Three nodes with places for four processes each: if one is lost, there is room for eight on the others."""

    def __init__(self) -> None:
        command = [sys.executable, str(HERE / "ray_nodes.py"), "3", "4"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self.read()

    def read(self) -> str:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith(">"):
                return line.removeprefix(">").strip()
        raise AssertionError("the cluster has ended")

    def ask(self, question: str) -> str:
        assert self.process.stdin is not None
        print(question, file=self.process.stdin, flush=True)
        return self.read()

    def remove(self) -> set[int]:
        """Take away a node with a server; the numbers of the bundles it had."""
        return set(map(int, self.ask("remove").split()))

    def end(self) -> None:
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.end()


@pytest.fixture
def nodes(cluster: Nodes) -> Iterator[Nodes]:
    """The cluster, which has nothing of the run when it is over."""
    yield cluster
    until = time.monotonic() + 10
    while left := cluster.ask("left"):
        assert time.monotonic() < until, f"left in the cluster: {left}"
        time.sleep(0.1)


class OnRay:
    """`paceline run --on ray`; what it says is in `said`."""

    def __init__(self, nodes: Nodes, folder: Path, *options: str, size: tuple[int, int] = (6, 2)) -> None:
        self.folder = folder / "run"
        self.log = folder / "log"
        where = ["--on", "ray", "--ray-address", nodes.address, "--dir", str(self.folder)]
        how_many = ["--workers", str(size[0]), "--servers", str(size[1])]
        command = [sys.executable, "-m", "paceline", "run", *where, *how_many, *options]
        with self.log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def __enter__(self) -> OnRay:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def said(self) -> str:
        return self.log.read_text()

    def until(self, happened: Callable[[], object]) -> None:
        until = time.monotonic() + 150
        while not happened():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < until, self.said
            time.sleep(0.05)

    def ended(self, code: int = 0) -> str:
        """Wait for the end; what was said."""
        assert self.process.wait(timeout=240) == code, self.said
        return self.said

    def left(self) -> Run:
        return run_folder.load(self.folder)


@pytest.mark.ci
def test_bsp_over_tcp_equals_single_process(nodes: Nodes, tmp_path: Path) -> None:
    script = [str(HERE / "remote_job.py"), "digits-mlp", "sgd:lr=0.1", "32", str(ITERATIONS)]
    with OnRay(nodes, tmp_path, "--policy", "bsp", *script, size=(2, 2)) as on_ray:
        said = on_ray.ended()
    run = on_ray.left()
    alone = train_alone("digits-mlp", 2, ITERATIONS, "sgd:lr=0.1", torch.float32)
    assert largest_difference(run.parameters, alone) < 1e-5
    assert {record.node.rank for record in run.trace if record.node.role == "worker"} == set(range(2))
    assert "over TCP to tcp://" in said
    assert "placed on 3 nodes" in said


@pytest.mark.long
def test_a_script_that_fails_is_seen_in_ray_and_the_other_goes_on(nodes: Nodes, tmp_path: Path) -> None:
    """The script is brought to the nodes."""
    (tmp_path / "its").mkdir()
    script = tmp_path / "its" / "failing.py"
    script.write_text(FAILING)
    options = ["--policy", "asp", "--cluster", "steady:compute_s=0.05", "--working-dir", str(script.parent)]
    with OnRay(nodes, tmp_path, *options, str(script), size=(2, 1)) as on_ray:
        said = on_ray.ended(code=1)
    assert re.search(r"Ray shows why worker 1 failed: the call of paceline-\w+-worker-1", said), said
    assert said.index("Ray shows why worker 1") < said.index("the run is in"), "while the other goes on"
    assert "ZeroDivisionError: a bug of the script" in said
    assert "worker 1 failed with exit code 1; 1 other goes on" in said
    assert "_ray_pkg" in said, "it ran in the folder that Ray has brought"


@pytest.mark.long
def test_an_interrupted_run_leaves_nothing(nodes: Nodes, tmp_path: Path) -> None:
    with OnRay(nodes, tmp_path, str(HERE / "job.py"), "digits-mlp", "sgd:lr=0.1", "32", "1000", size=(2, 1)) as on_ray:
        on_ray.until(lambda: "placed on" in on_ray.said)
        assert nodes.ask("left")
        on_ray.process.send_signal(signal.SIGINT)
        assert "paceline: interrupted" in on_ray.ended(code=130)


@pytest.mark.ci
def test_no_room(nodes: Nodes, tmp_path: Path) -> None:
    options = ["--cpus-per-worker", "3", "--place-timeout-s", "1"]
    with OnRay(nodes, tmp_path, *options, str(HERE / "job.py")) as on_ray:
        said = on_ray.ended(code=2)
    assert said.splitlines()[-1] == (
        "paceline: Ray found no place for 6 workers and 2 servers within 1 s: 20 CPUs asked (3 CPUs for each worker, "
        "1 CPU for each server), the cluster has 12 CPUs, 12 CPUs free now"
    )
    assert not on_ray.folder.exists()


@pytest.mark.long
def test_a_node_is_lost_and_the_run_ends_at_its_target(nodes: Nodes, tmp_path: Path) -> None:
    """The last with this cluster, which has two nodes from then on."""
    options = ["--policy", "ssp:staleness=3", "--cluster", "steady:compute_s=0.1", "--target", "accuracy=0.85"]
    script = [str(HERE / "job.py"), "digits-mlp", "sgd:lr=0.1", "32", "100000"]
    with OnRay(nodes, tmp_path, *options, "--timeout-s", "200", *script) as on_ray:
        on_ray.until(lambda: list(on_ray.folder.glob("checkpoints/*/manifest.json")))
        lost = nodes.remove()
        said = on_ray.ended()
    run = on_ray.left()
    assert run.time_to_target_s is not None
    assert run.failures == []
    workers, servers = {bundle for bundle in lost if bundle < 6}, {bundle - 6 for bundle in lost if bundle >= 6}
    assert workers
    assert servers
    for rank in servers:
        assert f"server {rank} was killed by SIGKILL; restarting it from" in said, said
    again = {record.node.rank for record in run.trace if record.node.role == "worker" and record.incarnation > 0}
    assert again >= workers, said


REFUSED = [
    (["--on", "ray", "--ray-address", "127.0.0.1:1"], "no Ray cluster (127.0.0.1:1)"),
    (["--on", "ray", "--ray-address", "nowhere"], "--ray-address nowhere is neither auto nor local nor HOST:PORT"),
    (["--on", "ray", "--cpus-per-worker", "0"], "cpus_per_worker=0 is out of range: more than 0"),
    (["--on", "ray", "--gpus-per-worker", "-1"], "gpus_per_worker=-1 is out of range: 0 or more"),
    (["--on", "ray", "--working-dir", "/nowhere"], "--working-dir /nowhere is no folder"),
    (["--on", "ray", "--durable"], "--durable keeps its logs on one machine's disk"),
    (["--gpus-per-worker", "1"], "--gpus-per-worker is for a run with --on ray"),
]


@pytest.mark.parametrize(("options", "line"), REFUSED)
def test_refusals(options: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["run", *options, str(HERE / "job.py")]) == 2
    assert capsys.readouterr().err.startswith(f"paceline: {line}")


def test_a_node_without_the_script() -> None:
    from paceline.errors import ConfigError
    from paceline.runtime.live.launchers.ray_cluster import AgentActor, WorkerScript

    with pytest.raises(ConfigError, match=r"there is no script 'nowhere.py' on .*--working-dir"):
        AgentActor().run("tcp://127.0.0.1:1", "", "worker", 0, WorkerScript("nowhere.py", (), ""))


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "paceline.runtime.live.launchers.ray_cluster", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.run(["run", "--on", "ray", str(HERE / "job.py")]) == 2
    assert capsys.readouterr().err == "paceline: ray is not installed: pip install 'paceline[ray]'\n"
