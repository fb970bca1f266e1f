"""A live run has one clock, and it starts when servers and workers are ready."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline import policies
from paceline.commands.live_table import LiveTable
from paceline.core.actions import Send
from paceline.core.events import PullArrived
from paceline.core.messages import Members, Pull
from paceline.function_workers import function_starter
from paceline.run import Run
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.run_state import Begun, Model
from paceline.runtime.live.server.server import LiveServer
from paceline.tensors import optimizers
from paceline.tensors.layout import Layout

SLOW_S = 0.3


def work() -> None:
    world = paceline.init()
    model = nn.Linear(3, 2)
    opt = paceline.Optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for _ in range(3):
        opt.zero_grad()
        model(torch.ones(2, 3)).square().mean().backward()
        opt.step()
        if world.rank == 0:
            paceline.log(loss=0.0)


@pytest.fixture
def ready_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Servers take their time to be configured, and leave in this folder when they were."""
    say_ready = LiveServer.say_ready

    def slowly(server: LiveServer) -> None:
        time.sleep(SLOW_S)
        (tmp_path / f"ready-{server.run.shard}").write_text(repr(time.monotonic()))
        say_ready(server)

    monkeypatch.setattr(LiveServer, "say_ready", slowly)
    return tmp_path


def driver_of(policy: str, servers: int) -> Driver:
    return Driver(RunPlan(Members(2, servers), function_starter(work), policies.parse(policy)))


def check_causes(run: Run) -> None:
    """A server hears a pull after it was sent, on the clock that both write down."""
    sent = {}
    for record in run.trace:
        for action in record.actions:
            if isinstance(action, Send) and isinstance(action.message, Pull):
                sent[action.to, action.message] = record.event.at
    heard = [record for record in run.trace if isinstance(record.event, PullArrived)]
    assert len(heard) >= 6
    for record in heard:
        assert 0 <= sent[record.node, record.event.pull] <= record.event.at


@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_second_0_is_when_the_servers_are_configured(policy: str, ready_s: Path) -> None:
    driver = driver_of(policy, 2)
    began_s = time.monotonic()
    run = driver.run()
    said = [float(path.read_text()) for path in ready_s.glob("ready-*")]
    assert len(said) == 2
    assert driver.parts.state.epoch_s > max(said) > began_s + SLOW_S
    assert run.history[0].time_s <= run.time_s <= time.monotonic() - driver.parts.state.epoch_s
    check_causes(run)
    assert run.replay() == []


def test_the_live_table_has_the_same_clock() -> None:
    table = LiveTable("bsp", None)
    driver = driver_of("bsp", 1)
    state, table.parts = driver.parts.state, driver.parts
    assert state.now() == 0.0
    assert table.headline() == "bsp: starting"
    model = Model(policies.parse("bsp"), "", Layout((), "float32"), optimizers.parse("sgd:lr=0.1"), {})
    state.stage = Begun(model, time.monotonic() - 40.2)
    assert table.headline() == "bsp: 40 s"
    driver.close()
