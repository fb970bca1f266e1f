"""Who is given up by `--hang-timeout-s`: a worker that nobody has seen push although it could have been seen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline import policies
from paceline.runtime.live.driver import health
from paceline.runtime.live.driver.health import HealthMonitor
from paceline.runtime.live.driver.roster import Roster
from paceline.runtime.live.driver.run_state import Model, RunState
from paceline.runtime.live.driver.servers import Servers
from paceline.runtime.live.protocol import wire
from paceline.tensors import optimizers
from paceline.tensors.layout import Layout

LIMIT_S = 1.5


class Cluster:
    """Two servers that tell the driver about one worker, as time goes by in steps of a tenth of a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.killed, self.pushed = 100.0, False, 0
        monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        worker: Any = SimpleNamespace(rank=0, incarnation=0, kill=self.kill)
        model = Model(policies.parse("asp"), "", Layout((), "float32"), optimizers.parse("sgd:lr=0.1"), {})
        state, roster = RunState(None), Roster()
        state.configure(model)
        state.begin()
        roster.admit({0: 0})
        servers = Servers(2, lambda shard, life: True, lambda shard, message: None)
        self.health = HealthMonitor(
            LIMIT_S, state, roster, lambda: [worker], servers, set(), dict, lambda line: None
        )  # fmt: skip

    def kill(self) -> None:
        self.killed = True

    def pass_time(self, seconds: float, speaking: tuple[int, ...] = (0, 1), pushes: bool = False) -> None:
        for tenth in range(round(10 * seconds)):
            self.now_s += 0.1
            self.pushed += pushes
            if tenth % 5 == 0:
                for shard in speaking:
                    self.health.take_status(wire.Status(shard, {0: wire.WorkerStatus(self.pushed, "", 0)}, None))
            self.health.tick()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster(monkeypatch)
    made.pass_time(2.0, pushes=True)
    return made


def test_who_does_not_push_is_given_up(cluster: Cluster) -> None:
    cluster.pass_time(1.0)
    assert not cluster.killed
    cluster.pass_time(2.0)
    assert cluster.killed


@pytest.mark.parametrize("speaking", [(), (0,), (1,)])
def test_a_worker_is_not_given_up_for_a_server_that_is_stopped(cluster: Cluster, speaking: tuple[int, ...]) -> None:
    """It may wait for that server, and has its time again when the server is back."""
    cluster.pass_time(20.0, speaking)
    cluster.pass_time(0.5)
    assert not cluster.killed
    cluster.pass_time(5.0, pushes=True)
    assert not cluster.killed
    cluster.pass_time(3.0)
    assert cluster.killed


def test_a_worker_is_not_given_up_for_a_driver_that_was_stopped(cluster: Cluster) -> None:
    cluster.now_s += 20.0
    cluster.health.tick()  # before anything is heard that was said meanwhile
    cluster.pass_time(0.5)
    assert not cluster.killed
    cluster.pass_time(3.0)
    assert cluster.killed
