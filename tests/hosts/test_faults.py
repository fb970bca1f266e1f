"""What may happen to a run over several hosts: lines cut and healed, hosts lost, keys that are wrong."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from paceline.core.actions import Apply
from paceline.core.events import GradientReady
from paceline.run import Run
from tests.hosts.netns import Hosts
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
