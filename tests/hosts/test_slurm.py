"""Slurm's variables, set by hand: the example's job script, both ways, with real processes on two "nodes"."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from paceline import run_folder
from tests.hosts.launching import Launched
from tests.hosts.running import job

pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).parents[2]
SRUN = Path(__file__).parent / "srun.py"


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script, in which srun is the stand-in."""
    for name, started in (("srun", f"{sys.executable} {SRUN}"), ("python", sys.executable)):
        (tmp_path / name).write_text(f'#!/bin/sh\nexec {started} "$@"\n')
        (tmp_path / name).chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(random.randrange(1 << 20)),
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "0",
        "SCRIPT": str(ROOT / "examples" / "digits.py"),
    }


@pytest.mark.parametrize(
    "way", [pytest.param("host", marks=pytest.mark.ci), pytest.param("ranks", marks=pytest.mark.long)]
)
def test_the_job_script_trains_on_two_nodes(way: str, slurm: dict[str, str], tmp_path: Path) -> None:
    script = [ROOT / "examples" / "slurm.sh", "--steps", "100000", "--lr", "0.5"]
    with Launched(script, tmp_path, {**slurm, "WAY": way, "WORKERS": "1"}) as launched:
        assert launched.end() == 0, launched.log()
        launched.leaves_nothing()
    run = run_folder.load(tmp_path / "runs" / f"slurm-{slurm['SLURM_JOB_ID']}.0-digits")
    assert run.time_to_target_s is not None
    assert run.failures == []
    assert {record.node.rank for record in run.trace if record.node.role == "worker"} == {0, 1}


@pytest.mark.long
def test_without_rank_0_all_end(slurm: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, SRUN, "--nodes=2", "--ntasks-per-node=1", sys.executable, *job(iterations=100_000)]
    with Launched(command, tmp_path, slurm) as launched:
        launched.until(lambda: "updates" in launched.log(), "it trains")
        ranks = {e["SLURM_PROCID"]: n for n, e in launched.processes().items() if "PACELINE_DRIVER" not in e}
        os.kill(ranks["0"], signal.SIGKILL)
        began = time.monotonic()
        assert launched.end(30) != 0
        launched.leaves_nothing()
        assert time.monotonic() - began < 20


def test_the_batch_script_itself_is_a_world_of_one(slurm: dict[str, str], tmp_path: Path) -> None:
    code = "import paceline; print(paceline.init())"
    with Launched([sys.executable, "-c", code], tmp_path, slurm) as launched:
        assert launched.end() == 0
    assert launched.log() == "World(rank=0, size=1)\n"
