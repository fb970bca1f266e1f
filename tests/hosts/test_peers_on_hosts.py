"""Peers on three hosts, without servers: parameters over TCP with keys, the graph laid out by host, hosts lost."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from paceline import run_folder
from paceline.bench.hosts.netns import Host, Hosts, Process, children
from paceline.core.events import GradientReady
from paceline.run import Run
from tests.hosts.running import Serving
from tests.reference import largest_difference, train_alone

ITERATIONS = 50
DETECTED_S = 3.0


def homes(host: Host) -> list[str]:
    """What peers of one launcher have left for those of another on the same host."""
    return [path.name for path in host.path("/dev/shm").glob("paceline-*/folder-*")]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_complete_standard_serial_equals_single_process_and_two_launchers_share_a_host(tmp_path: Path) -> None:
    policy = ("--policy", "hop:graph=complete,order=serial", "--cluster", "steady:compute_s=0.02")
    with Hosts(3, share=tmp_path) as hosts, Serving(hosts[0], tmp_path, "--workers", "6", *policy) as serving:
        for number, (host, peers) in enumerate([(hosts[0], 1), (hosts[0], 1), (hosts[1], 2), (hosts[2], 2)]):
            serving.fork(host, f"host{number}", peers, ITERATIONS)
        serving.until(lambda: len(homes(hosts[0])) == 2, "the two of the first host meet in shared memory", 120)
        assert homes(hosts[1]) == homes(hosts[2]) == []
        run = serving.end()
    alone = train_alone("digits-mlp", 6, ITERATIONS, "sgd:lr=0.1", torch.float32)
    assert largest_difference(run.parameters, alone) < 1e-5
    assert run.replay() == []
    assert run.evaluated.endswith("the average of 6 peers")


POLICIES = ["hop:graph=hierarchical", "hop:graph=hierarchical-spread,backup=1,max_gap=4", "adpsgd:graph=complete"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_peers_on_three_hosts_train_digits_to_their_target(tmp_path: Path) -> None:
    series = [sys.executable, "-m", "tests.hosts.series"]
    with Hosts(3, share=tmp_path) as hosts, (tmp_path / "log").open("w") as log:
        drive = hosts[0].popen(
            [*series, "drive", tmp_path, hosts[0].address, "6", "0", *POLICIES], stdout=log, stderr=log
        )
        for host in hosts:
            host.popen([*series, "take-part", tmp_path, "2", *POLICIES], stdout=log, stderr=log)
        code = drive.wait(timeout=280)
    said = (tmp_path / "log").read_text()
    assert code == 0, said
    for number, policy in enumerate(POLICIES):
        run = run_folder.load(tmp_path / str(number))
        assert run.time_to_target_s is not None, f"{policy} missed its target:\n{said}"
        assert run.replay() == []
        if "hierarchical" in policy:
            assert run.policy.endswith("machines=2:2:2"), run.policy


def workers_of(agent: Process) -> set[int]:
    """The processes of a host's agent, by their numbers on this machine."""
    inside = agent.inside()
    assert inside is not None
    return children(inside)


def ranks_of(serving: Serving, number: int) -> list[int]:
    """The peers of a host, as the driver has numbered them."""
    found = re.search(rf"host host{number}/\S+ is there: worker (\d+), worker (\d+)", serving.log("serve"))
    assert found is not None
    return [int(rank) for rank in found.groups()]


def gradients(run: Run, rank: int) -> list[float]:
    """When a peer's gradients were ready, over all its incarnations."""
    mine = (record for record in run.trace if record.node == ("peer", rank))
    return [record.event.at for record in mine if isinstance(record.event, GradientReady)]


def incarnations(run: Run, rank: int) -> set[int]:
    return {record.incarnation for record in run.trace if record.node == ("peer", rank)}


def said_until(serving: Serving, line: str) -> None:
    """Wait until the driver has said this."""
    serving.until(lambda: line in serving.log("serve"), f"it says {line!r}", 120)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", ["hop:graph=hierarchical,staleness=2,max_gap=4", "adpsgd:graph=complete"])
def test_a_peer_is_killed_and_a_host_cut_off_and_both_come_back(tmp_path: Path, policy: str) -> None:
    options = ("--workers", "6", "--restarts", "3", "--policy", policy, "--cluster", "steady:compute_s=0.02")
    with Hosts(3, share=tmp_path) as hosts, Serving(hosts[0], tmp_path, *options) as serving:
        agents = [serving.fork(host, f"host{number}", 2, 100_000) for number, host in enumerate(hosts)]
        said_until(serving, "updates")
        ranks = [ranks_of(serving, number) for number in range(3)]
        too_late = serving.fork(hosts[0], "late", 1, 100)
        os.kill(min(workers_of(agents[1])), signal.SIGKILL)
        said_until(serving, "joined")
        assert too_late.wait(timeout=60) == 1
        assert "the graph has places for 6 peers, and all are taken" in serving.log("late")
        serving.processes.pop()
        hosts[2].cut()
        cut_s = time.monotonic()
        said_until(serving, "given up")
        assert time.monotonic() - cut_s < DETECTED_S + 1.0
        time.sleep(max(0.0, 6.0 - (time.monotonic() - cut_s)))
        hosts[2].heal()
        for rank in ranks[2]:
            said_until(serving, f"worker {rank} joined")
        time.sleep(0.5)
        serving.server.send_signal(signal.SIGINT)
        run = serving.end()
    assert run.replay() == []
    assert run.evaluated.endswith("the average of 6 peers")
    assert sum(len(incarnations(run, rank)) for rank in ranks[1]) == 3
    assert all(1 in incarnations(run, rank) for rank in ranks[2])
    for rank in ranks[0]:
        pauses = [later - earlier for earlier, later in pairwise(gradients(run, rank))]
        assert max(pauses) < DETECTED_S + 1.0, "the others go on after the detection time"
