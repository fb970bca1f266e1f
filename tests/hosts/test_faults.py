"""What may happen to a run over several hosts: lines cut and healed, hosts lost, keys that are wrong."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from paceline.bench.hosts.netns import Hosts, children
from paceline.core.actions import Apply
from paceline.core.events import GradientReady
from paceline.run import Run
from paceline.runtime.live.messaging.key_files import KeyFile, read_key_file, write_key_file
from paceline.runtime.live.messaging.remote_links import make_keys
from tests.hosts.running import Serving

PACED = ("--cluster", "steady:compute_s=0.02")
DETECTED_S = 3.0


def check_applied_once(run: Run) -> None:
    applied = [
        (record.node, handle)
        for record in run.trace
        for action in record.actions
        if isinstance(action, Apply)
        for handle in action.handles
    ]
    assert len(applied) == len(set(applied)), "an update was applied twice"


def pushed(run: Run, rank: int) -> list[float]:
    """When a worker's gradients were ready."""
    mine = (r for r in run.trace if r.node == ("worker", rank))
    return [record.event.at for record in mine if isinstance(record.event, GradientReady)]


def lives(run: Run, rank: int) -> set[int]:
    return {record.incarnation for record in run.trace if record.node == ("worker", rank)}


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_host_cut_off_for_ten_seconds_comes_back_by_itself(tmp_path: Path) -> None:
    with (
        Hosts(3, share=tmp_path) as hosts,
        Serving(
            hosts[0], tmp_path, "--servers", "2", "--workers", "6", "--policy", "ssp:staleness=3", *PACED
        ) as serving,
    ):
        serving.fork(hosts[1], "first", 5, 2000)
        serving.until(lambda: "worker 4" in serving.log("serve"), "the first five are there")
        serving.fork(hosts[2], "last", 1, 2000)
        serving.until(lambda: "updates" in serving.log("serve"), "it trains", 100)
        hosts[2].cut()
        cut_s = time.monotonic()
        serving.until(lambda: "given up" in serving.log("serve"), "the silence is noticed", 10)
        assert time.monotonic() - cut_s < DETECTED_S
        time.sleep(10.0 - (time.monotonic() - cut_s))
        hosts[2].heal()
        serving.until(lambda: "worker 5 joined" in serving.log("serve"), "it comes back")
        run = serving.end()
    check_applied_once(run)
    assert lives(run, 5) == {0, 1}
    pauses = [later - earlier for earlier, later in zip(pushed(run, 0), pushed(run, 0)[1:], strict=False)]
    assert max(pauses) < DETECTED_S + 1.0, "the others go on after the detection time"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_one_run_many_faults(tmp_path: Path) -> None:
    """A worker and a server killed, a slow and lossy line, a host lost for good: the run learns and ends."""
    options = ("--policy", "ssp:staleness=3", "--checkpoint-s", "1", "--restarts", "3")
    with (
        Hosts(3, share=tmp_path) as hosts,
        Serving(hosts[0], tmp_path, "--servers", "2", "--workers", "5", *options, *PACED) as serving,
    ):
        first = serving.fork(hosts[1], "first", 3, 1500)
        serving.until(lambda: "worker 2" in serving.log("serve"), "the first three are there")
        serving.fork(hosts[2], "last", 2, 1500)
        serving.until(lambda: (serving.out / "checkpoints").is_dir() and "updates" in serving.log("serve"), "it trains")

        agent = first.inside()
        assert agent is not None
        killed_s = time.monotonic()
        os.kill(min(children(agent)), signal.SIGKILL)
        serving.until(
            lambda: "was killed by SIGKILL; starting it again" in serving.log("serve"), "a worker's death is seen"
        )
        assert time.monotonic() - killed_s < DETECTED_S
        serving.until(lambda: re.search(r"worker \d joined", serving.log("serve")), "it is started again")

        serving.until(lambda: list((serving.out / "checkpoints").glob("*/manifest.json")), "there is a checkpoint")
        driver = serving.server.inside()
        assert driver is not None
        os.kill(min(children(driver)), signal.SIGKILL)
        serving.until(lambda: "restarting it from" in serving.log("serve"), "a server's death is seen")

        hosts[1].slow(delay_ms=10, loss=0.01)
        before = last_updates(serving.log("serve"))
        serving.until(lambda: last_updates(serving.log("serve")) > before + 50, "it trains over a bad line")
        hosts[1].fast()

        hosts[2].crash()
        serving.until(lambda: "given up" in serving.log("serve"), "the loss of a host is seen", 10)
        serving.processes = [each for each in serving.processes if each[0] != "last"]
        run = serving.end()
    check_applied_once_per_life(run)
    assert (run.history[-1].accuracy or 0.0) > 0.95


def last_updates(log: str) -> int:
    return int(re.findall(r"(\d+) updates", log)[-1])


def check_applied_once_per_life(run: Run) -> None:
    """A server that goes on from a checkpoint may apply again what it had forgotten, but not twice in one life."""
    for life in {(record.node, record.incarnation) for record in run.trace if record.node.role == "server"}:
        applied = [
            handle
            for record in run.trace
            if (record.node, record.incarnation) == life
            for action in record.actions
            if isinstance(action, Apply)
            for handle in action.handles
        ]
        assert len(applied) == len(set(applied)), "an update was applied twice"


@pytest.mark.long
@pytest.mark.timeout(200)
def test_who_has_no_good_key_is_not_let_in_and_the_driver_is_missed(tmp_path: Path) -> None:
    with Hosts(2, share=tmp_path) as hosts, Serving(hosts[0], tmp_path, "--policy", "asp", *PACED) as serving:
        here = serving.fork(hosts[1], "here", 1, 100_000)
        serving.until(lambda: "updates" in serving.log("serve"), "it trains", 100)
        other = tmp_path / "other.key"
        known = read_key_file(serving.key)
        write_key_file(other, KeyFile(known.address, known.server, make_keys()))
        join = [sys.executable, "-m", "paceline", "join", serving.address]
        script = str(Path(__file__).parent / "job.py")
        said = hosts[1].run([*join, script], check=False)
        assert "name the run's key file: --key-file" in said
        said = hosts[1].run([*join, "--insecure", script], check=False)
        assert "INSECURE" in said
        assert "was not let in" in said
        said = hosts[1].run([*join, "--key-file", other, script], check=False)
        assert "does not know this key" in said
        other.chmod(0o644)
        assert "chmod 600" in hosts[1].run([*join, "--key-file", other, script], check=False)
        before = last_updates(serving.log("serve"))
        serving.until(lambda: last_updates(serving.log("serve")) > before, "the run is undisturbed")

        serving.server.kill()
        killed_s = time.monotonic()
        code = here.wait(timeout=30)
        assert time.monotonic() - killed_s < 10.0
        assert code == 1
        assert "is gone" in serving.log("here")
        assert list(hosts[1].path("/dev/shm").glob("*paceline*")) == []
