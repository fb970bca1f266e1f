"""Crash, restart, checkpoint, resume: the faults a live run on one machine survives."""

from __future__ import annotations

import shutil
import signal
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
from paceline.function_workers import function_starter
from paceline.run import Run
from paceline.runtime.live.driver.checkpointing import CheckpointOptions
from paceline.runtime.live.driver.children import Child
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.runtime.live.protocol.records import DurabilityOptions
from paceline.runtime.live.storage import checkpoint
from paceline.runtime.live.storage.checksums import with_checksum
from paceline.tensors import optimizers
from paceline.workload_training import train
from tests.live.meanwhile import meanwhile
from tests.reference import largest_difference, train_alone


def digits(iterations: int, optimizer: str = "sgd:lr=0.1") -> Callable[[], None]:
    return partial(train, workloads.load("digits-mlp"), optimizers.parse(optimizer), 32, iterations, 0)


def driver_of(work: Callable[[], None], policy: str = "ssp:staleness=3", **more) -> tuple[Driver, list[str]]:
    said: list[str] = []
    given = {"cluster": load("steady:compute_s=0.005"), "care": FaultPolicy(timeout_s=90), **more}
    members = given.pop("members", Members(3, 2))
    plan = RunPlan(members, function_starter(work), policies.parse(policy), **given)
    return Driver(plan, say=said.append), said


def machine_of(node, header):
    return policies.parse(header.policy).machine(node.role, node.rank, header.members, header.seed)


def last_iterations(run: Run) -> dict[tuple[int, int], int]:
    return {
        (record.node.rank, record.incarnation): record.event.iteration
        for record in run.trace
        if record.node.role == "worker" and isinstance(record.event, GradientReady)
    }


def test_a_killed_worker_is_started_again_within_its_budget() -> None:
    driver, said = driver_of(digits(200), care=FaultPolicy(restarts=1, timeout_s=90))

    def kill() -> None:
        next(child for child in driver.parts.workers.live() if child.rank == 1).kill()

    run = meanwhile(driver, kill)
    assert any("worker 1 was killed by SIGKILL; starting it again in 0.5 s (0 restarts left)" in line for line in said)
    assert last_iterations(run)[1, 1] == 199
    assert run.failures == []


def test_a_failing_worker_ends_the_run_if_so_asked() -> None:
    def work() -> None:
        raise ValueError("no")

    driver, _ = driver_of(work, care=FaultPolicy(abort=True))
    with pytest.raises(RunFailed, match="the run is to end then"):
        driver.run()


def test_a_stopped_worker_is_given_up_after_the_hang_timeout() -> None:
    driver, said = driver_of(digits(300), care=FaultPolicy(hang_timeout_s=1.5, restarts=1, timeout_s=90))

    def stop() -> None:
        next(child for child in driver.parts.workers.live() if child.rank == 2).signal(signal.SIGSTOP)

    run = meanwhile(driver, stop)
    assert any(line.startswith("worker 2 has not pushed for") for line in said)
    assert last_iterations(run)[0, 0] == 299
    assert last_iterations(run)[2, 1] == 299


@pytest.mark.parametrize("optimizer", ["sgd:lr=0.05,momentum=0.9", "adam:lr=0.002"])
def test_a_resumed_bsp_run_is_the_run_that_was_not_interrupted(tmp_path: Path, optimizer: str) -> None:
    steady = load("steady:compute_s=0")
    first, _ = driver_of(digits(30, optimizer), "bsp", checkpointing=CheckpointOptions(tmp_path), cluster=steady)
    first.run()
    assert [path.name for path in checkpoint.whole(tmp_path / "checkpoints")] == ["000000", "000001"]
    for servers in (2, 3):
        checkpointing = CheckpointOptions(tmp_path, resume=True)
        second, _ = driver_of(
            digits(50, optimizer), "bsp", checkpointing=checkpointing, members=Members(3, servers), cluster=steady
        )
        run = second.run()
        assert largest_difference(run.parameters, train_alone("digits-mlp", 3, 50, optimizer, torch.float32)) < 1e-5
        first_of_2 = next(r.event.iteration for r in run.trace if isinstance(r.event, GradientReady))
        assert first_of_2 == 30
        assert replay(run.trace, machine_of) == []
        shutil.rmtree(tmp_path / "checkpoints/000002")


def test_checkpoints_by_updates_and_by_time_and_only_the_last_two_stay(tmp_path: Path) -> None:
    driver, _ = driver_of(digits(60), checkpointing=CheckpointOptions(tmp_path, every_updates=30))
    driver.run()
    kept = checkpoint.whole(tmp_path / "checkpoints")
    assert len(kept) == 2
    assert int(kept[-1].name) >= 4
    path, manifest = checkpoint.latest(tmp_path / "checkpoints")
    assert path == kept[-1]
    assert [shard.iteration for shard in manifest.shards] == [60, 60]
    assert set(load_file(path / "shard-0.safetensors")) >= {"values"}

    timed = tmp_path / "timed"
    driver, _ = driver_of(digits(150), checkpointing=CheckpointOptions(timed, every_s=0.3))
    driver.run()
    assert int(checkpoint.whole(timed / "checkpoints")[-1].name) >= 3


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    driver, _ = driver_of(digits(60), checkpointing=CheckpointOptions(tmp_path, every_updates=30))
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
    driver, _ = driver_of(digits(10), checkpointing=CheckpointOptions(tmp_path))
    driver.run()
    path, manifest = checkpoint.latest(tmp_path / "checkpoints")
    first, *entries = manifest.layout.entries
    named = (msgspec.structs.replace(first, name="another"), *entries)
    other = msgspec.structs.replace(manifest, layout=msgspec.structs.replace(manifest.layout, entries=named))
    (path / checkpoint.MANIFEST).write_bytes(with_checksum(other))
    driver, _ = driver_of(digits(10), checkpointing=CheckpointOptions(tmp_path, resume=True))
    with pytest.raises(RunFailed, match="it cannot be resumed"):
        driver.run()


def test_a_disk_that_is_full_is_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    driver, said = driver_of(digits(40), checkpointing=CheckpointOptions(tmp_path, every_updates=20))
    run = driver.run()
    assert last_iterations(run)[0, 0] == 39
    assert any(line.startswith("WARNING: cannot checkpoint") for line in said)


@pytest.mark.parametrize("policy", ["bsp", "ssp:staleness=3", "backup:extra=1", "asp", "scheduled", "elastic"])
def test_a_killed_server_is_restarted_from_the_last_checkpoint(tmp_path: Path, policy: str) -> None:
    driver, said = driver_of(digits(150), policy, checkpointing=CheckpointOptions(tmp_path, every_updates=20))

    def kill() -> None:
        checkpointer = driver.parts.checkpointer
        while checkpointer is None or checkpointer.last is None:
            time.sleep(0.001)
        next(c for c in driver.parts.children.values() if c.role == "server" and c.rank == 1).kill()

    run = meanwhile(driver, kill)
    assert any("server 1 was killed by SIGKILL; restarting it from" in line for line in said), said
    restored = [record for record in run.trace if isinstance(record.event, Restored)]
    assert [(record.node.rank, record.incarnation) for record in restored] == [(1, 1)]
    last = sorted(last_iterations(run).values())
    assert last[-1] == 149
    assert last[0] == 149 or policy.startswith("backup"), "whose last gradient nobody waits for may pass over it"
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

    driver, said = driver_of(work, "bsp", checkpointing=CheckpointOptions(tmp_path, every_updates=20))

    def kill() -> None:
        while (
            driver.parts.checkpointer is None
            or driver.parts.checkpointer.last is None
            or driver.parts.health.hyper is None
        ):
            time.sleep(0.001)
        next(c for c in driver.parts.children.values() if c.role == "server" and c.rank == 1).kill()

    run = meanwhile(driver, kill)
    assert any("restarting it from" in line for line in said)
    assert run.failures == []


STAGES: dict[str, Callable[[Driver], bool]] = {
    "started": lambda driver: True,
    "there": lambda driver: 1 in driver.parts.servers.there,
    "told what it holds": lambda driver: bool(driver.parts.servers.assignment),
    "configured": lambda driver: 1 in driver.parts.servers.configured,
    "begun": lambda driver: driver.parts.state.begun,
    "at work": lambda driver: len(driver.parts.logged.history) > 5,
}


def kill_server_at(driver: Driver, stage: Callable[[Driver], bool]) -> list[bool]:
    """Kill server 1 as soon as this holds; the list gets whether the run had begun when that was noticed."""
    killed: list[Child] = []
    noticed: list[bool] = []
    look = driver.parts.beginning.consider
    turn, ended = driver.turn, driver.parts.server_restarts.ended

    def note(child: Child, code: int) -> None:
        noticed.extend([driver.parts.state.begun] if killed == [child] else [])
        ended(child, code)

    def kill() -> None:
        server = next((c for c in driver.parts.children.values() if (c.role, c.rank) == ("server", 1)), None)
        if not killed and server is not None and stage(driver):
            killed.append(server)
            server.kill()

    def consider() -> None:
        look()
        kill()

    def turn_and_kill() -> None:
        kill()
        turn()
        kill()

    driver.turn = turn_and_kill
    driver.parts.beginning.consider = consider
    driver.parts.server_restarts.ended = note
    return noticed


@pytest.mark.parametrize("durable", [None, DurabilityOptions()])
@pytest.mark.parametrize("stage", STAGES)
def test_a_server_killed_before_the_first_checkpoint_is_started_again(
    tmp_path: Path, stage: str, durable: DurabilityOptions | None
) -> None:
    driver, said = driver_of(digits(40), checkpointing=CheckpointOptions(tmp_path, durable=durable))
    killed = kill_server_at(driver, STAGES[stage])
    run = driver.run()
    assert killed
    assert set(last_iterations(run).values()) == {39}
    assert run.failures == []
    assert replay(run.trace, machine_of) == []
    lost = [line for line in said if "updates since then are lost" in line or "ALL its updates are lost" in line]
    if durable is None and killed == [True]:
        assert len(lost) == 2  # when it happened, and at the end
    else:
        assert lost == []
        assert any("starting it again" in line or "restarting it from its log" in line for line in said)


def test_there_is_a_checkpoint_of_update_0_and_a_server_goes_on_from_it(tmp_path: Path) -> None:
    driver, said = driver_of(digits(40), checkpointing=CheckpointOptions(tmp_path))
    first: list[checkpoint.Manifest] = []

    def is_kept(driver: Driver) -> bool:
        if not first and driver.parts.checkpointer is not None and driver.parts.checkpointer.last is not None:
            first.append(checkpoint.check(driver.parts.checkpointer.last))
        return bool(first) and len(driver.parts.logged.history) > 5

    killed = kill_server_at(driver, is_kept)
    run = driver.run()
    assert killed == [True]
    assert [(shard.iteration, shard.version) for shard in first[0].shards] == [(0, 0), (0, 0)]
    place = tmp_path / "checkpoints" / "000000"
    assert sum(f"restarting it from {place}, at iteration 0, update 0: its updates" in line for line in said) == 2
    restored = [record.event for record in run.trace if isinstance(record.event, Restored)]
    assert [(event.iteration, event.version) for event in restored] == [(0, 0)]
    assert set(last_iterations(run).values()) == {39}
    assert replay(run.trace, machine_of) == []


def test_the_first_checkpoint_is_tried_again_if_a_server_dies_that_was_to_write_it(tmp_path: Path) -> None:
    driver, said = driver_of(digits(40), checkpointing=CheckpointOptions(tmp_path))
    there: list[bool] = []
    finish = driver.parts.finishing.finish

    def look_and_finish() -> None:
        there.append(driver.parts.checkpointer is not None and driver.parts.checkpointer.last is not None)
        finish()

    driver.parts.finishing.finish = look_and_finish
    killed = kill_server_at(driver, STAGES["begun"])
    driver.run()
    assert killed == [True]
    assert any("the checkpoint failed (server 1 died)" in line for line in said)
    assert there[0]


@pytest.mark.parametrize("policy", ["bsp", "asp", "backup:extra=1", "dssp", "scheduled", "elastic", "specsync"])
def test_without_any_checkpoint_a_killed_server_begins_anew(policy: str) -> None:
    driver, said = driver_of(digits(60), policy)
    killed = kill_server_at(driver, STAGES["at work"])
    run = driver.run()
    assert killed
    assert max(last_iterations(run).values()) == 59
    assert run.failures == []
    assert "restarting it from the beginning: ALL its updates are lost" in said[-1]
    assert replay(run.trace, machine_of) == []


def test_a_server_that_is_killed_again_and_again_ends_the_run() -> None:
    driver, said = driver_of(digits(10))
    turn = driver.turn

    def turn_and_kill() -> None:
        for child in driver.parts.children.values():
            if child.role == "server":
                child.kill()
        turn()

    driver.turn = turn_and_kill
    with pytest.raises(RunFailed, match="was killed by SIGKILL before the run began: it is not started again"):
        driver.run()
    assert sum("starting it again" in line for line in said) >= 10


@pytest.mark.parametrize("has_checkpoints", [True, False])
def test_a_server_that_fails_from_the_same_state_again_and_again_ends_the_run(
    tmp_path: Path, has_checkpoints: bool
) -> None:
    """Its policy answers no question, so it fails at the first pull, whatever it is started from."""
    own = tmp_path / "own.py"
    own.write_text(
        "from dataclasses import dataclass\n"
        "from paceline.policies import CentralPolicy\n"
        "@dataclass(frozen=True)\n"
        "class Mute(CentralPolicy):\n"
        "    on_arrival = True\n"
    )
    checkpointing = CheckpointOptions(tmp_path / "run") if has_checkpoints else None
    driver, said = driver_of(digits(10), f"{own}:Mute", members=Members(2, 1), checkpointing=checkpointing)
    with pytest.raises(RunFailed, match=r"server 0 failed with exit code 1 for the 3rd time from the same state"):
        driver.run()
    assert sum("restarting it from" in line for line in said) == 2


def test_a_server_killed_when_the_run_ends_goes_on_from_the_checkpoint_at_the_end(tmp_path: Path) -> None:
    driver, said = driver_of(
        digits(40), "bsp", checkpointing=CheckpointOptions(tmp_path), cluster=load("steady:compute_s=0")
    )
    killed = kill_server_at(
        driver, lambda driver: driver.parts.state.finishing and 1 not in driver.parts.servers.finished
    )
    finish = driver.parts.finishing.finish

    def finish_and_kill() -> None:
        server = next(c for c in driver.parts.children.values() if (c.role, c.rank) == ("server", 1))
        server.signal(signal.SIGSTOP)  # so that it has not heard it yet
        finish()
        if not driver.parts.state.finishing:
            server.signal(signal.SIGCONT)

    driver.parts.finishing.finish = finish_and_kill
    run = driver.run()
    assert killed
    assert any("restarting it from" in line and "checkpoints/000001" in line for line in said)
    assert largest_difference(run.parameters, train_alone("digits-mlp", 3, 40, "sgd:lr=0.1", torch.float32)) < 1e-5
