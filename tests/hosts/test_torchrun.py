"""The real torchrun: ranks that become workers by themselves, and one agent per node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from paceline import run_folder
from paceline.bench.hosts.netns import Host, Hosts
from paceline.runtime.live.storage import checkpoint
from tests.hosts.launching import TORCHRUN, Launched
from tests.hosts.running import JOB, job
from tests.reference import largest_difference, train_alone

pytestmark = pytest.mark.timeout(240)
DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
SLOW = "--cluster steady:compute_s=0.02"


def torchrun(folder: Path, ranks: int, options: str, script: list[str], *more: str) -> Launched:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks), *more, *script]
    return Launched(command, folder, {"PACELINE_OPTIONS": options})


@pytest.mark.ci
def test_three_ranks_under_bsp_equal_one_process(tmp_path: Path) -> None:
    with torchrun(tmp_path, 3, "--policy bsp --servers 2 --dir run", job(iterations=40)) as launched:
        assert launched.end() == 0, launched.log()
        launched.leaves_nothing()
    run = run_folder.load(tmp_path / "run")
    alone = train_alone("digits-mlp", 3, 40, "sgd:lr=0.1", torch.float32)
    assert largest_difference(run.parameters, alone) < 1e-5
    assert {record.node.rank for record in run.trace if record.node.role == "worker"} == set(range(3))
    assert launched.log().count("the run is in run") == 1


@pytest.mark.long
def test_the_target_ends_all_ranks(tmp_path: Path) -> None:
    options = "--servers 2 --policy ssp:staleness=3 --target accuracy=0.85 --dir run"
    with torchrun(tmp_path, 4, options, [str(DIGITS), "--steps", "100000", "--lr", "0.5"]) as launched:
        assert launched.end() == 0, launched.log()
        launched.leaves_nothing()
    run = run_folder.load(tmp_path / "run")
    assert run.time_to_target_s is not None
    assert run.failures == []


@pytest.mark.long
def test_when_a_rank_dies_torchrun_restarts_all_and_the_run_goes_on(tmp_path: Path) -> None:
    options = f"--policy bsp --checkpoint-updates 20 --dir run {SLOW}"
    checkpoints = tmp_path / "run" / checkpoint.FOLDER
    with torchrun(tmp_path, 2, options, job(iterations=200), "--max-restarts", "1") as launched:
        launched.until(lambda: checkpoint.next_number(checkpoints) > 1, "there is a checkpoint besides the first")
        os.kill(launched.rank(1, JOB.name), signal.SIGKILL)
        assert launched.end() == 0, launched.log()
        launched.leaves_nothing()
    assert "attempt 2: going on from" in launched.log()
    assert checkpoint.latest(checkpoints)[1].shards[0].iteration == 200
    assert run_folder.load(tmp_path / "run").metrics.iterations < 200, "the second attempt did not begin again"


@pytest.mark.long
def test_ending_torchrun_ends_everything(tmp_path: Path) -> None:
    with torchrun(tmp_path, 2, f"--policy bsp --dir run {SLOW}", job(iterations=100_000)) as launched:
        launched.until(lambda: "updates" in launched.log(), "it trains")
        assert len(launched.processes()) >= 6, "torchrun, two ranks, an agent, the driver, a server"
        launched.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        launched.end(10)
        launched.leaves_nothing(10 - (time.monotonic() - began))
    assert checkpoint.whole(tmp_path / "run" / checkpoint.FOLDER), "the driver has had time for a last checkpoint"


@pytest.mark.ci
def test_a_failing_script_fails_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import sys, paceline\nif paceline.init().rank == 1:\n    sys.exit(3)\nimport time; time.sleep(60)"
    )
    with torchrun(tmp_path, 2, "", [str(script)]) as launched:
        assert launched.end() == 1
        launched.leaves_nothing()
    assert "exitcode  : 3" in launched.log()


@pytest.mark.long
def test_wrong_options_are_one_line(tmp_path: Path) -> None:
    with torchrun(tmp_path, 2, "--polcy bsp", job()) as launched:
        assert launched.end() == 1
        launched.leaves_nothing()
    said = [line for line in launched.log().splitlines() if "PACELINE_OPTIONS" in line]
    assert len(said) == 1
    assert said[0].startswith("paceline: PACELINE_OPTIONS: ")
    assert "--polcy" in said[0]
    of_ranks = launched.log().partition("torch/distributed/elastic")[0]
    assert "worker 0: the run could not begin: see above" in of_ranks
    assert "Traceback" not in of_ranks


@pytest.mark.long
def test_on_two_hosts_a_worker_dies_alone(tmp_path: Path) -> None:
    with Hosts(2, share=tmp_path) as hosts:
        processes = []
        for number, host in enumerate(hosts):
            command = [
                *TORCHRUN, "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1",
                "--master-addr", hosts[0].address, "--master-port", "29500", "-m", "paceline", "host",
                "--workers", "2", "--servers", "2", "--spread-servers", "--policy", "bsp", "--restarts", "1",
                "--interface", "eth0", "--ports", "7000-7010", "--dir", str(tmp_path / "run"), *SLOW.split(),
                *job(iterations=150),
            ]  # fmt: skip
            with (tmp_path / f"{number}.log").open("w") as file:
                processes.append(host.popen(command, stdout=file, stderr=subprocess.STDOUT))

        def logs() -> str:
            return "\n".join((tmp_path / f"{number}.log").read_text() for number in range(2))

        until = time.monotonic() + 120
        while "updates" not in logs():
            assert time.monotonic() < until, logs()
            assert all(process.poll() is None for process in processes), logs()
            time.sleep(0.1)
        workers = {
            environment["PACELINE_RANK"]: number
            for number in hosts[1].processes()
            if "PACELINE_RANK" in (environment := environment_of(number))
        }
        assert set(workers) == {"2", "3"}
        os.kill(workers["3"], signal.SIGKILL)
        assert [process.wait(120) for process in processes] == [0, 0], logs()
        assert "worker 3 was killed by SIGKILL; starting it again" in logs()
        assert "worker 3 joined" in logs()
        for host in hosts:
            assert_nothing_runs(host)
            assert not list(host.path("/dev/shm").glob("*paceline*"))
    run = run_folder.load(tmp_path / "run")
    assert run.failures == []
    assert {(r.node.rank, r.incarnation) for r in run.trace if r.node.role == "worker"} >= {(3, 0), (3, 1), (2, 0)}


def assert_nothing_runs(host: Host) -> None:
    """But what makes it a host."""
    until = time.monotonic() + 10
    while left := {number for number in host.processes() if not command_of(number).startswith("unshare")}:
        assert time.monotonic() < until, [command_of(number) for number in left]
        time.sleep(0.1)


def command_of(number: int) -> str:
    try:
        return Path(f"/proc/{number}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def environment_of(number: int) -> dict[str, str]:
    pairs = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
    return dict(pair.decode().partition("=")[::2] for pair in pairs if pair)


def test_host_without_a_launcher_is_one_line() -> None:
    command = [sys.executable, "-m", "paceline", "host", str(JOB)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("paceline: paceline host is started by torchrun or srun")
    assert ended.stderr.count("\n") == 1
