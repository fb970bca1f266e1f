"""Crash, restart, checkpoint, resume: the faults a live run on one machine survives."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline import policies, workloads
from paceline.cluster import load
from paceline.core.events import GradientReady, Restored
from paceline.core.messages import Members
from paceline.core.trace import replay
from paceline.errors import PacelineError, RunFailed
from paceline.run import Run
from paceline.runtime.live import checkpoint
from paceline.runtime.live.driver.children import function_starter
from paceline.runtime.live.driver.keeping import Keeping
from paceline.runtime.live.driver.launch import Driver, LivePlan
from paceline.runtime.live.driver.watching import Care
from paceline.tensors import optimizers
from paceline.training import train
from tests.reference import largest_difference, train_alone


def digits(iterations: int, optimizer: str = "sgd:lr=0.1") -> Callable[[], None]:
    return partial(train, workloads.load("digits-mlp"), optimizers.parse(optimizer), 32, iterations, 0)


def driver_of(work: Callable[[], None], policy: str = "ssp:staleness=3", **more) -> tuple[Driver, list[str]]:
    said: list[str] = []
    given = {"cluster": load("steady:compute_s=0.005"), "care": Care(timeout_s=90), **more}
    members = given.pop("members", Members(3, 2))
    plan = LivePlan(members, function_starter(work), policies.parse(policy), **given)
    return Driver(plan, say=said.append), said


def meanwhile(driver: Driver, deed: Callable[[], None]) -> Run:
    """Run, and do `deed` once the run has got going; an error in it fails the test."""
    errors: list[BaseException] = []

    def wait_and_do() -> None:
        try:
            while len(driver.history) < 20:
                time.sleep(0.001)
            deed()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait_and_do)
    thread.start()
    try:
        return driver.run()
    finally:
        thread.join()
        assert not errors


def machine_of(node, header):
    return policies.parse(header.policy).machine(node.role, node.rank, header.members, header.seed)


def last_iterations(run: Run) -> dict[tuple[int, int], int]:
    return {
        (record.node.rank, record.incarnation): record.event.iteration
        for record in run.trace
        if record.node.role == "worker" and isinstance(record.event, GradientReady)
    }


def test_a_killed_worker_is_started_again_within_its_budget() -> None:
    driver, said = driver_of(digits(200), care=Care(restarts=1, timeout_s=90))

    def kill() -> None:
        next(child for child in driver.live_workers() if child.rank == 1).kill()

    run = meanwhile(driver, kill)
    assert any("worker 1 was killed by SIGKILL; starting it again in 0.5 s (0 restarts left)" in line for line in said)
    assert last_iterations(run)[1, 1] == 199
    assert run.failures == []


def test_a_failing_worker_ends_the_run_if_so_asked() -> None:
    def work() -> None:
        raise ValueError("no")

    driver, _ = driver_of(work, care=Care(abort=True))
    with pytest.raises(RunFailed, match="the run is to end then"):
        driver.run()


def test_a_stopped_worker_is_given_up_after_the_hang_timeout() -> None:
    driver, said = driver_of(digits(300), care=Care(hang_timeout_s=1.5, restarts=1, timeout_s=90))

    def stop() -> None:
        next(child for child in driver.live_workers() if child.rank == 2).signal(signal.SIGSTOP)

    run = meanwhile(driver, stop)
    assert any(line.startswith("worker 2 has not pushed for") for line in said)
    assert last_iterations(run)[0, 0] == 299
    assert last_iterations(run)[2, 1] == 299


@pytest.mark.parametrize("optimizer", ["sgd:lr=0.05,momentum=0.9", "adam:lr=0.002"])
def test_a_resumed_bsp_run_is_the_run_that_was_not_interrupted(tmp_path: Path, optimizer: str) -> None:
    steady = load("steady:compute_s=0")
    first, _ = driver_of(digits(30, optimizer), "bsp", keeping=Keeping(tmp_path), cluster=steady)
    first.run()
    assert [path.name for path in checkpoint.whole(tmp_path / "checkpoints")] == ["000001"]
    for servers in (2, 3):
        keeping = Keeping(tmp_path, resume=True)
        second, _ = driver_of(
            digits(50, optimizer), "bsp", keeping=keeping, members=Members(3, servers), cluster=steady
        )
        run = second.run()
        assert largest_difference(run.parameters, train_alone("digits-mlp", 3, 50, optimizer, torch.float32)) < 1e-5
        first_of_2 = next(r.event.iteration for r in run.trace if isinstance(r.event, GradientReady))
        assert first_of_2 == 30
        assert replay(run.trace, machine_of) == []
        shutil.rmtree(tmp_path / "checkpoints/000002")


def test_checkpoints_by_updates_and_by_time_and_only_the_last_two_stay(tmp_path: Path) -> None:
    driver, _ = driver_of(digits(60), keeping=Keeping(tmp_path, every_updates=30))
    driver.run()
    kept = checkpoint.whole(tmp_path / "checkpoints")
    assert len(kept) == 2
    assert int(kept[-1].name) >= 4
    path, manifest = checkpoint.latest(tmp_path / "checkpoints")
    assert path == kept[-1]
    assert [shard.iteration for shard in manifest.shards] == [60, 60]
    assert set(load_file(path / "shard-0.safetensors")) >= {"values"}

    timed = tmp_path / "timed"
    driver, _ = driver_of(digits(150), keeping=Keeping(timed, every_s=0.3))
    driver.run()
    assert int(checkpoint.whole(timed / "checkpoints")[-1].name) >= 3


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    driver, _ = driver_of(digits(60), keeping=Keeping(tmp_path, every_updates=30))
    driver.run()
    folder = tmp_path / "checkpoints"
    older, newest = checkpoint.whole(folder)
    data = bytearray((newest / "shard-1.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "shard-1.safetensors").write_bytes(data)
    assert checkpoint.latest(folder)[0] == older
    (older / checkpoint.MANIFEST).write_text("{")
    with pytest.raises(PacelineError, match="there is no whole checkpoint"):
        checkpoint.latest(folder)


def test_another_model_cannot_be_resumed(tmp_path: Path) -> None:
    driver, _ = driver_of(digits(10), keeping=Keeping(tmp_path))
    driver.run()
    path, manifest = checkpoint.latest(tmp_path / "checkpoints")
    other = msgspec.structs.replace(manifest, layout=msgspec.structs.replace(manifest.layout, dtype="float64"))
    (path / checkpoint.MANIFEST).write_bytes(msgspec.json.encode(other))
    driver, _ = driver_of(digits(10), keeping=Keeping(tmp_path, resume=True))
    with pytest.raises(RunFailed, match="it cannot be resumed"):
        driver.run()


def test_a_disk_that_is_full_is_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    driver, said = driver_of(digits(40), keeping=Keeping(tmp_path, every_updates=20))
    run = driver.run()
    assert last_iterations(run)[0, 0] == 39
    assert any(line.startswith("WARNING: cannot checkpoint") for line in said)


@pytest.mark.parametrize("policy", ["bsp", "ssp:staleness=3", "backup:extra=1", "asp", "scheduled", "elastic"])
def test_a_killed_server_is_restarted_from_the_last_checkpoint(tmp_path: Path, policy: str) -> None:
    driver, said = driver_of(digits(150), policy, keeping=Keeping(tmp_path, every_updates=20))

    def kill() -> None:
        keeper = driver.keeper
        while keeper is None or keeper.last is None:
            time.sleep(0.001)
        next(c for c in driver.children.values() if c.role == "server" and c.rank == 1).kill()

    run = meanwhile(driver, kill)
    assert any("server 1 was killed by SIGKILL; restarting it from" in line for line in said), said
    restored = [record for record in run.trace if isinstance(record.event, Restored)]
    assert [(record.node.rank, record.incarnation) for record in restored] == [(1, 1)]
    assert {last for (rank, life), last in last_iterations(run).items()} == {149}
    assert run.history[-1].accuracy > 0.75
    assert replay(run.trace, machine_of) == []


def test_a_restarted_server_goes_on_with_the_learning_rate_of_the_run(tmp_path: Path) -> None:
    """The scheduler sets the rate to 0 once, early: from then on nothing may move, a restarted shard included."""

    def work() -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 8)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: float(step < 10))
        still = None
        while opt.global_step < 300:
            opt.zero_grad()
            model(torch.ones(1, 64)).sum().backward()
            opt.step()
            scheduler.step()
            if opt.global_step == 30:
                still = [parameter.detach().clone() for parameter in model.parameters()]
            if paceline.init().rank == 0:
                paceline.log(loss=0.0)
        assert still is not None
        assert all(torch.equal(old, new) for old, new in zip(still, model.parameters(), strict=True))

    driver, said = driver_of(work, "bsp", keeping=Keeping(tmp_path, every_updates=20))

    def kill() -> None:
        while driver.keeper is None or driver.keeper.last is None or driver.watchman.hyper is None:
            time.sleep(0.001)
        next(c for c in driver.children.values() if c.role == "server" and c.rank == 1).kill()

    run = meanwhile(driver, kill)
    assert any("restarting it from" in line for line in said)
    assert run.failures == []


def test_without_a_checkpoint_a_killed_server_ends_the_run() -> None:
    driver, _ = driver_of(digits(100_000))

    def kill() -> None:
        next(c for c in driver.children.values() if c.role == "server" and c.rank == 0).kill()

    with pytest.raises(RunFailed, match="server 0 was killed by SIGKILL and there is no checkpoint"):
        meanwhile(driver, kill)
