"""Runs that once hung, servers that crashed and settings that were lost, each with the case that showed it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

import paceline
from paceline.core.messages import Members
from paceline.policies import CentralPolicy
from paceline.runtime.live.driver.checkpointing import CheckpointOptions
from paceline.runtime.live.driver.driver import Driver
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.runtime.live.storage import checkpoint
from tests.live.test_recovery import digits, driver_of, meanwhile


def small(lr: float = 0.001) -> tuple[nn.Linear, paceline.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=lr), model=model)


def step(model: nn.Module, opt: paceline.Optimizer) -> None:
    opt.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    opt.step()


def life() -> int:
    world = paceline.init()
    assert world.run is not None
    return world.run.incarnation


def kill_server(driver: Driver) -> None:
    """Kill the last server, and return when it is back."""
    lives = driver.parts.servers.incarnations[-1]
    server = next(
        c for c in driver.parts.children.values() if c.role == "server" and c.rank == driver.plan.members.servers - 1
    )
    server.kill()
    while driver.parts.servers.incarnations[-1] == lives or not driver.parts.servers.all_configured:
        time.sleep(0.005)


def test_the_only_worker_may_die_and_come_back() -> None:
    def work() -> None:
        model, opt = small()
        for number in range(20):
            step(model, opt)
            if number == 5 and life() == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    driver, _ = driver_of(work, members=Members(1, 2), care=FaultPolicy(restarts=1, timeout_s=60))
    assert driver.run().failures == []


def test_a_server_that_dies_twice_while_workers_compute_hangs_nobody(tmp_path: Path) -> None:
    asleep, killed = tmp_path / "asleep", tmp_path / "killed"

    def work() -> None:
        model, opt = small()
        for number in range(40):
            paceline.log(loss=0.0)
            if number == 25:
                asleep.touch()
                while not killed.exists():
                    time.sleep(0.01)
            step(model, opt)

    def kill_twice() -> None:
        while not asleep.exists() or driver.parts.checkpointer is None or driver.parts.checkpointer.last is None:
            time.sleep(0.01)
        kill_server(driver)
        kill_server(driver)
        killed.touch()

    driver, _ = driver_of(
        work, "asp", members=Members(2, 2), checkpointing=CheckpointOptions(tmp_path / "kept", every_updates=5)
    )
    assert meanwhile(driver, kill_twice).failures == []


def test_checkpoints_go_on_after_a_server_was_restarted(tmp_path: Path) -> None:
    driver, said = driver_of(digits(150), "asp", checkpointing=CheckpointOptions(tmp_path, every_s=0.02))

    def kill() -> None:
        while driver.parts.checkpointer is None or driver.parts.checkpointer.last is None:
            time.sleep(0.005)
        kill_server(driver)

    run = meanwhile(driver, kill)
    last, manifest = checkpoint.latest(tmp_path / "checkpoints")
    assert not list((tmp_path / "checkpoints").glob("*.part"))
    updates = max(shard.version for shard in manifest.shards)
    assert updates >= max(point.updates for point in run.history), (said, last)


def test_when_the_one_voice_leaves_the_next_ones_learning_rate_holds() -> None:
    def work() -> None:
        rank = paceline.init().rank
        model, opt = small(lr=1.0)
        for number in range(6 if rank == 0 else 40):
            opt.param_groups[0]["lr"] = 0.0 if rank and number >= 3 else 1.0
            before = model.weight.detach().clone()
            step(model, opt)
            paceline.log(loss=float((model.weight - before).abs().max()))
            if rank:
                time.sleep(0.005)

    driver, _ = driver_of(work, "asp", members=Members(2, 1), cluster=None)
    run = driver.run()
    assert run.history[-1].loss == 0.0


def test_worker_0_that_fails_before_the_run_begins_is_started_again() -> None:
    def work() -> None:
        if paceline.init().rank == 0 and life() == 0:
            raise OSError("the data is not there yet")
        model, opt = small()
        for _ in range(5):
            step(model, opt)

    driver, _ = driver_of(work, members=Members(2, 1), care=FaultPolicy(restarts=1, timeout_s=60))
    assert driver.run().failures == []


def test_segments_of_the_dead_are_given_back() -> None:
    def work() -> None:
        model, opt = small()
        world = paceline.init()
        assert world.run is not None
        folder = world.run.folder
        for number in range(60):
            step(model, opt)
            time.sleep(0.002)
            if number == 5 and world.rank == 1 and life() < 2:
                os.kill(os.getpid(), signal.SIGKILL)
        paceline.log(loss=len(list(folder.glob("worker-*"))))

    driver, _ = driver_of(work, "asp", members=Members(2, 1), care=FaultPolicy(restarts=2, timeout_s=60), cluster=None)
    run = driver.run()
    assert run.history[0].loss is not None
    assert run.history[0].loss <= 2


def test_what_is_not_trained_survives_a_resume(tmp_path: Path) -> None:
    def work() -> None:
        torch.manual_seed(time.monotonic_ns() % 1_000_000)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        for parameter in model[0].parameters():
            parameter.requires_grad = False
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
        paceline.log(loss=float(model[0].weight.sum()), accuracy=float(model[1].num_batches_tracked))
        while opt.global_step < goal:
            opt.zero_grad()
            model(torch.randn(8, 4)).sum().backward()
            opt.step()

    goal = 5
    first = driver_of(work, "bsp", checkpointing=CheckpointOptions(tmp_path))[0].run()
    goal = 8
    second = driver_of(work, "bsp", checkpointing=CheckpointOptions(tmp_path, resume=True))[0].run()
    assert {point.loss for point in first.history} == {point.loss for point in second.history}
    assert {point.accuracy for point in second.history} == {5.0}


def test_a_buffer_whose_elements_share_memory_starts_as_worker_0_has_it() -> None:
    def work() -> None:
        model = nn.Linear(4, 2)
        model.register_buffer("mask", torch.ones(1, 1).expand(3, 4))
        model.register_buffer("rows", torch.full((1, 2), float(paceline.init().rank)).expand(3, 2))
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
        paceline.log(loss=float(model.rows.sum()), accuracy=float(model.mask.sum()))
        step(model, opt)

    run = paceline.launch(work, workers=2, servers=1, policy="bsp")
    assert run.failures == []
    assert [(point.loss, point.accuracy) for point in run.history] == [(0.0, 12.0)] * 2


@dataclass(frozen=True)
class Ahead(CentralPolicy):
    """Means of iterations, but nobody waits for the one before."""

    name: ClassVar[str] = "ahead"
    on_arrival: ClassVar[bool] = False

    def may_pull(self, i: int, V: int) -> bool:
        return i < V + 2

    def freed_at(self, i: int, V: int) -> int:
        return i - 1


def test_gradients_that_wait_for_their_mean_while_their_worker_goes_on() -> None:
    """Each step's gradient is its number, so the result says whether one was written over."""

    def work() -> None:
        rank = paceline.init().rank
        parameter = nn.Parameter(torch.zeros(3))
        opt = paceline.Optimizer(torch.optim.SGD([parameter], lr=1.0))
        for number in range(12):
            parameter.grad = torch.full((3,), float(number))
            if rank:
                time.sleep(0.01)
            opt.step()

    run = paceline.launch(work, workers=2, policy=Ahead())
    assert run.replay() == []
    (values,) = run.parameters.values()
    assert values.tolist() == pytest.approx([-sum(range(12))] * 3)
