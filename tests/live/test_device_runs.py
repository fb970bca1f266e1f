"""Servers that step in the memory of a device, on a stand-in for a GPU: the same runs as on the CPU."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline import policies, session
from paceline.core.messages import Members
from paceline.errors import PacelineError
from paceline.function_workers import function_starter
from paceline.run import Run
from paceline.runtime.live.driver.checkpointing import CheckpointOptions
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.runtime.live.protocol.records import DurabilityOptions
from paceline.runtime.live.server import device_steps
from paceline.runtime.live.storage import device_segments
from paceline.runtime.live.worker.shared_device_memory import SharedDeviceMemory
from tests.live.standin_device import StandinDevice, stand_in

STEPS = 12


@pytest.fixture(autouse=True)
def _standin(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


def model_of(rank: int) -> nn.Sequential:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4), nn.Linear(4, 4))


def training(optimizer: str = "AdamW", at: Callable[[int, int], None] = lambda rank, step: None) -> Callable[[], None]:
    """Some steps in every way a gradient may come: fresh, in its place, set by the script, absent, not finite, none."""

    def work() -> None:
        rank = session.init().rank
        model = model_of(rank)
        opt = paceline.Optimizer(getattr(torch.optim, optimizer)(model.parameters(), lr=0.01), model=model)
        live = session.world().live
        if live.steps_here:
            on_device = live.neighbours.slot_pool.device is not None
        else:
            on_device = isinstance(live.memory, SharedDeviceMemory)
        while opt.global_step < STEPS:
            step = opt.global_step
            at(rank, step)
            opt.zero_grad(set_to_none=step % 2 == 0)
            data = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
            loss = model[:3](data).pow(2).mean()  # the last layer has no gradient
            (loss * float("nan") if step == 7 and rank == 1 else loss).backward()
            if step == 3:
                model[0].weight.grad = model[0].weight.grad * 2.0
            if step == 5:
                model[0].weight.grad = None
            opt.skip_step() if step == 4 else opt.step()
        paceline.log(loss=float(on_device), accuracy=float(rank))

    return work


def run_of(work: Callable[[], None], policy: str, workers: int = 2, servers: int = 1, **more) -> tuple[Run, list[str]]:
    said: list[str] = []
    given = {"care": FaultPolicy(timeout_s=60), **more}
    plan = RunPlan(Members(workers, servers), function_starter(work), policies.parse(policy), **given)
    return Driver(plan, said.append).run(), said


def on_device(run: Run) -> set[float | None]:
    return {point.loss for point in run.history}


@pytest.mark.parametrize(("policy", "servers"), [("bsp", 1), ("bsp", 2), ("ssp:staleness=0", 1)])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_run_on_the_device_is_the_run_on_the_cpu(policy: str, servers: int, optimizer: str) -> None:
    """Under ssp with staleness 0 steps on arrival are in an order of their own, hence one worker."""
    workers = 2 if policy == "bsp" else 1
    there, said = run_of(training(optimizer), policy, workers, servers)
    here, _ = run_of(training(optimizer), policy, workers, servers, servers_on="cpu")
    assert (on_device(there), on_device(here)) == ({1.0}, {0.0})
    assert any("servers on standin:0" in line for line in said), said
    for name, value in here.parameters.items():
        torch.testing.assert_close(there.parameters[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["asp", "backup:extra=1", "dssp:low=1,high=3", "deadline"])
def test_other_policies_come_to_their_end(policy: str) -> None:
    run, _ = run_of(training(), policy, 3)
    assert on_device(run) == {1.0}
    assert all(value.isfinite().all() for value in run.parameters.values())


def test_a_killed_worker_leaves_the_others_training() -> None:
    def kill(rank: int, step: int) -> None:
        if rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    for policy in ("asp", "bsp"):
        run, said = run_of(training(at=kill), policy, 3)
        assert any("worker 1 was killed by SIGKILL" in line for line in said), said
        assert {point.accuracy for point in run.history} == {0.0, 2.0}


def test_a_killed_server_is_restarted_on_the_device(tmp_path: Path) -> None:
    """Under BSP the vector that all models were views of goes with it; what they have mapped stays."""
    checkpointing = CheckpointOptions(tmp_path, every_updates=3)
    plan = RunPlan(
        Members(2, 1), function_starter(training(at=lambda rank, step: time.sleep(0.1))), policies.parse("bsp"),
        care=FaultPolicy(timeout_s=60), checkpointing=checkpointing,
    )  # fmt: skip
    said: list[str] = []
    driver = Driver(plan, said.append)

    def kill() -> None:
        while not list((tmp_path / "checkpoints").glob("[0-9]*/manifest.json")):
            time.sleep(0.01)
        next(child for child in driver.parts.children.values() if child.role == "server").kill()

    thread = threading.Thread(target=kill)
    thread.start()
    run = driver.run()
    thread.join()
    assert any("server 0 was killed" in line for line in said), said
    assert run.failures == []
    assert on_device(run) == {1.0}


def test_models_on_the_cpu_beside_servers_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's model is elsewhere: auto takes the CPU, gpu has it copied."""

    def device_of(tensors) -> StandinDevice | None:
        return StandinDevice() if session.init().rank == 0 else None

    monkeypatch.setattr(device_segments, "device_of", device_of)
    here, said = run_of(training(), "bsp")
    assert on_device(here) == {0.0}
    assert "servers on the CPU: the model of worker 1 is not on one GPU" in said
    mixed, _ = run_of(training(), "bsp", servers_on="gpu")
    assert on_device(mixed) == {0.0, 1.0}
    for name, value in here.parameters.items():
        torch.testing.assert_close(mixed.parameters[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", ["parallel", "serial"])
def test_peers_on_the_device_are_peers_on_the_cpu(order: str) -> None:
    policy = f"hop:graph=complete,order={order}"
    there, said = run_of(training(), policy, 3, 0)
    here, _ = run_of(training(), policy, 3, 0, servers_on="cpu")
    assert (on_device(there), on_device(here)) == ({1.0}, {0.0})
    assert any("peers on standin:0" in line for line in said), said
    for name, value in here.parameters.items():
        torch.testing.assert_close(there.parameters[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("policy", ["adpsgd:graph=complete", "hop:graph=ring"])
def test_peers_that_answer_meanwhile_or_lose_one_come_to_their_end(policy: str) -> None:
    def kill(rank: int, step: int) -> None:
        if policy.startswith("hop") and rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    run, _ = run_of(training(at=kill), policy, 4, 0)
    assert on_device(run) == {1.0}
    assert len(run.history) == (3 if policy.startswith("hop") else 4)
    assert all(value.isfinite().all() for value in run.parameters.values())


def refuse(*given: object) -> None:
    raise PacelineError("no")


def test_what_cannot_be_is_on_the_cpu_and_one_line_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    durable = CheckpointOptions(tmp_path, durable=DurabilityOptions())
    _, said = run_of(training(), "asp", checkpointing=durable)
    assert said.count("servers on the CPU: a durable server logs what it has in memory of its own") == 0
    with monkeypatch.context() as patch:
        patch.setattr(StandinDevice, "free_bytes", lambda self: 1000)
        run, said = run_of(training(), "asp")
        assert on_device(run) == {0.0}
        assert any(line.startswith("server 0 on the CPU: 0.00 GB are free") for line in said), said
    with monkeypatch.context() as patch:
        patch.setattr(device_segments, "check_probe", refuse)
        assert device_steps.device_segments is device_segments
        run, said = run_of(training(), "bsp", servers=2)
        assert on_device(run) == {0.0}
        assert {"server 0 on the CPU: no", "server 1 on the CPU: no"} <= set(said)
    with monkeypatch.context() as patch:
        patch.setattr(device_segments, "device_of", refuse)
        run, said = run_of(training(), "bsp")
        assert "servers on the CPU: the memory of worker 0's device cannot be shared: no" in said
