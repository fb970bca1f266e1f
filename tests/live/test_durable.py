"""Durable servers: an acknowledged push survives `kill -9` of its server, and the log gives everything back."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import paceline
from paceline import policies, run_folder, workloads
from paceline.cluster import load
from paceline.commands.replay import Replay
from paceline.core.actions import Apply, Drop
from paceline.core.events import GradientReady, PullRepeated, Restored, TimerFired
from paceline.core.messages import Handle, Members
from paceline.errors import ConfigError, PacelineError
from paceline.function_workers import function_starter
from paceline.run import Run
from paceline.runtime.live.driver.checkpointing import CheckpointOptions
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.durability import joined, replay, salvage
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.runtime.live.driver.run_state import Model
from paceline.runtime.live.protocol.records import DurabilityOptions
from paceline.runtime.live.storage import update_log
from paceline.runtime.live.storage.update_log import HeldGradient, LogEnd, LoggedEvent, LogReader, LogSegment
from paceline.tensors import optimizers
from paceline.tensors.layout import Layout
from paceline.workload_training import train
from tests.reference import largest_difference, train_alone


def digits(iterations: int, optimizer: str) -> Callable[[], None]:
    return partial(train, workloads.load("digits-mlp"), optimizers.parse(optimizer), 32, iterations, 0)


def ones(iterations: int) -> None:
    """Every gradient is 1 and the rate is 1: under BSP the parameters count the updates. The rate halves once."""
    model = nn.Linear(40, 40)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
    schedule = torch.optim.lr_scheduler.StepLR(opt, iterations // 2, 0.5)
    while opt.global_step < iterations:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        opt.step()
        schedule.step()
        if paceline.init().rank == 0:
            paceline.log(loss=0.0)


class Killer:
    """Kills servers by turns, each time somebody has got so much further."""

    def __init__(self, driver: Driver, every: int) -> None:
        self.driver, self.every = driver, every
        self.kills = 0
        self.turn = driver.turn
        driver.turn = self.turn_and_kill

    def turn_and_kill(self) -> None:
        self.turn()
        driver = self.driver
        if len(driver.parts.logged.history) >= self.every * (self.kills + 1) and not driver.parts.state.finishing:
            rank = self.kills % driver.parts.servers.count
            self.kills += 1
            next(
                child for child in driver.parts.children.values() if (child.role, child.rank) == ("server", rank)
            ).kill()


def driver_of(
    work: Callable[[], None], policy: str, folder: Path, how: DurabilityOptions, **more
) -> tuple[Driver, list[str]]:
    said: list[str] = []
    checkpointing = more.pop("checkpointing", None) or CheckpointOptions(folder, durable=how)
    plan = RunPlan(
        Members(3, 2), function_starter(work), policies.parse(policy), load("steady:compute_s=0.002"),
        care=FaultPolicy(timeout_s=60), checkpointing=checkpointing, **more,
    )  # fmt: skip
    return Driver(plan, say=said.append), said


def check(run: Run, folder: Path, iterations: int) -> None:
    """Every gradient of every worker was used once on each shard, the trace replays, and so do the logs."""
    assert run.replay() == []
    used: Counter[tuple[int, int, int]] = Counter()
    for record in run.trace:
        for action in record.actions if record.node.role == "server" else ():
            if isinstance(action, Apply | Drop):
                for handle in action.handles if isinstance(action, Apply) else (action.handle,):
                    used[record.node.rank, handle.source, handle.iteration] += 1
    assert set(used) == {(shard, w, i) for shard in range(2) for w in range(3) for i in range(iterations)}
    assert set(used.values()) == {1}
    replayed = joined(replay(folder))
    assert all(torch.equal(replayed[name], value) for name, value in run.parameters.items())


def test_nothing_is_lost_or_done_twice_and_the_parameters_count_it(tmp_path: Path) -> None:
    driver, said = driver_of(partial(ones, 80), "bsp", tmp_path, DurabilityOptions(events=30))
    killer = Killer(driver, 10)
    run = driver.run()
    assert killer.kills >= 6
    assert sum("restarting it from its log: nothing acknowledged is lost" in line for line in said) == killer.kills
    check(run, tmp_path, 80)
    for value in run.parameters.values():  # 40 steps of 1, and 40 of 1/2
        assert value.unique().tolist() == [-60.0]
    assert any(isinstance(record.event, PullRepeated) for record in run.trace)
    assert all(update_log.numbers(update_log.folder_of(tmp_path, shard), update_log.LOG)[0] > 0 for shard in range(2))
    (line,) = (line for line in said if line.startswith("durable: "))
    assert "MB logged for" in line
    assert "ms a push" in line


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [("bsp", "adam:lr=0.002"), ("ssp:staleness=3,lazy=true", "sgd:lr=0.05,momentum=0.9,ema=0.9")],
)
def test_training_goes_on_as_if_nobody_had_been_killed(tmp_path: Path, policy: str, optimizer: str) -> None:
    driver, _ = driver_of(digits(60, optimizer), policy, tmp_path, DurabilityOptions(events=50))
    killer = Killer(driver, 12)
    run = driver.run()
    assert killer.kills >= 4
    check(run, tmp_path, 60)
    if policy == "bsp":
        assert largest_difference(run.parameters, train_alone("digits-mlp", 3, 60, optimizer, torch.float32)) < 1e-5


@pytest.mark.parametrize("policy", ["scheduled", "elastic:lookahead=3"])
def test_a_scheduler_is_told_again_where_a_shard_stands(tmp_path: Path, policy: str) -> None:
    driver, _ = driver_of(partial(ones, 50), policy, tmp_path, DurabilityOptions())
    killer = Killer(driver, 10)
    run = driver.run()
    assert killer.kills >= 4
    check(run, tmp_path, 50)
    if policy == "scheduled":
        told = [server.rise for server in replay(tmp_path)]
        assert [(rise.shard, rise.V) for rise in told if rise is not None] == [(0, 50), (1, 50)]


def test_with_fsync_it_is_the_same(tmp_path: Path) -> None:
    driver, _ = driver_of(partial(ones, 20), "bsp", tmp_path, DurabilityOptions(fsync=True))
    killer = Killer(driver, 5)
    run = driver.run()
    assert killer.kills >= 3
    check(run, tmp_path, 20)


def test_a_full_disk_is_said_loudly_and_training_goes_on(tmp_path: Path) -> None:
    checkpointing = CheckpointOptions(tmp_path, every_updates=10, durable=DurabilityOptions())
    driver, said = driver_of(partial(ones, 120), "bsp", tmp_path, DurabilityOptions(), checkpointing=checkpointing)
    turn = driver.turn
    full: list[int] = []
    killed: list[int] = []

    def fill_the_disk() -> None:
        turn()
        server = next((c for c in driver.parts.children.values() if (c.role, c.rank) == ("server", 0)), None)
        if server is None:
            return
        if len(driver.parts.logged.history) > 10 and not full:
            full.append(update_log.log_path(update_log.folder_of(tmp_path, 0), 0).stat().st_size + 30_000)
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (full[0], resource.RLIM_INFINITY))
        if any("NOT durable" in line for line in said) and not killed and len(driver.parts.logged.history) > 60:
            killed.append(server.pid)
            server.kill()

    driver.turn = fill_the_disk
    run = driver.run()
    (warning,) = (line for line in said if "NOT durable" in line)
    assert warning.startswith("WARNING: server 0 cannot log (File too large)")
    assert any("server 0 was killed" in line and "its updates since then are lost" in line for line in said)
    assert [record.event.iteration for record in run.trace if isinstance(record.event, GradientReady)][-1] == 119
    assert run.failures == []


def noting(iterations: int, file: Path) -> None:
    """As `ones`; each acknowledged step is a byte in the file, and each takes its time."""
    model = nn.Linear(20, 20)
    opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
    while opt.global_step < iterations:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        opt.step()
        with file.open("ab") as noted:
            noted.write(b".")


def test_a_run_whose_driver_was_killed_goes_on_from_the_logs(tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    noted.touch()
    work = partial(noting, 100_000, noted)
    pid = os.fork()
    if pid == 0:
        driver_of(work, "asp", tmp_path, DurabilityOptions(events=40))[0].run()
        os._exit(1)
    while len(noted.read_bytes()) < 150:
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    until = time.monotonic() + 10
    while True:  # the kernel ends the servers with it; until then they hold their logs
        try:
            made = salvage(tmp_path)
            break
        except PacelineError:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert made is not None
    logged = replay(tmp_path)
    assert all(server.machine.version >= len(noted.read_bytes()) for server in logged)
    assert salvage(tmp_path) is None  # the checkpoint it has made knows as much
    at = min(server.machine.progress.V for server in logged)

    checkpointing = CheckpointOptions(tmp_path, resume=True, durable=DurabilityOptions())
    driver, _ = driver_of(
        partial(noting, at + 30, noted), "bsp", tmp_path, DurabilityOptions(), checkpointing=checkpointing
    )
    run = driver.run()
    restored = {record.node.rank: record.event.version for record in run.trace if isinstance(record.event, Restored)}
    assert restored == {rank: server.machine.version for rank, server in enumerate(logged)}
    run_folder.save(tmp_path, run)
    assert Replay(dir=str(tmp_path)).main() == 0
    parameters = {name: value + 1 for name, value in run.parameters.items()}
    run_folder.save(tmp_path, replace(run, parameters=parameters))
    assert Replay(dir=str(tmp_path)).main() == 1


def test_a_record_that_is_not_whole_was_never_written(tmp_path: Path) -> None:
    path = tmp_path / "000000.log"
    log = LogSegment(tmp_path, 0)
    gradient = torch.arange(100.0)
    log.append(LoggedEvent(TimerFired(1.0, 2), 3))
    log.append(
        HeldGradient(Handle(0, 0, 1, 2, 400), (5,)), [update_log.raw(gradient[:30]), update_log.raw(gradient[30:])]
    )
    before = log.position
    log.append(HeldGradient(Handle(1, 0, 1, 2, 400), ()), [update_log.raw(gradient)])
    log.close()
    whole = path.read_bytes()
    entries = list(LogReader(tmp_path, 0, 0))
    assert [entry.said for entry in entries][:2] == [
        LoggedEvent(TimerFired(1.0, 2), 3),
        HeldGradient(Handle(0, 0, 1, 2, 400), (5,)),
    ]
    assert torch.equal(torch.frombuffer(entries[1].gradient, dtype=torch.float32), gradient)
    assert [entry.end for entry in entries][1:] == [before, len(whole)]
    for length in range(before, len(whole)):
        path.write_bytes(whole[:length])
        assert len(list(LogReader(tmp_path, 0, 0))) == 2
    for damaged in (before + 1, before + 10, before + 30, len(whole) - 1):
        path.write_bytes(whole[:damaged] + bytes([whole[damaged] ^ 1]) + whole[damaged + 1 :])
        assert len(list(LogReader(tmp_path, 0, 0))) == 2
    path.write_bytes(whole[: before + 50])
    log = LogSegment(tmp_path, 0, before, LogEnd(2, 3))
    log.append(LoggedEvent(TimerFired(4.0, 5), 6))
    log.close()
    assert [type(entry.said) for entry in LogReader(tmp_path, 0, 0)] == [LoggedEvent, HeldGradient, LoggedEvent]


def test_what_a_segment_leaves_in_a_later_one_is_not_read(tmp_path: Path) -> None:
    old = LogSegment(tmp_path, 3)
    for number in range(5):
        old.append(LoggedEvent(TimerFired(1.0, number), 3))
    old.close()
    update_log.log_path(tmp_path, 3).rename(tmp_path / update_log.SPARE)
    new = LogSegment(tmp_path, 4)
    new.append(LoggedEvent(TimerFired(1.0, 7), 3))
    assert len(update_log.log_path(tmp_path, 4).read_bytes()) > new.position
    assert [entry.said for entry in LogReader(tmp_path, 4, 0)] == [LoggedEvent(TimerFired(1.0, 7), 3)]
    new.close()
    assert len(update_log.log_path(tmp_path, 4).read_bytes()) == new.position


def test_two_processes_never_write_one_log(tmp_path: Path) -> None:
    holder = update_log.hold(tmp_path)
    with pytest.raises(PacelineError, match="another process writes the log"):
        update_log.hold(tmp_path)
    os.close(holder)
    os.close(update_log.hold(tmp_path))


def test_a_snapshot_names_the_incarnation_as_older_versions_did() -> None:
    layout, members = Layout((), "float32"), Members(1, 1)
    parts = ("bsp", members, 0, layout, (), optimizers.parse("sgd:lr=0.1"), None, None, 0, (), 0)
    written = update_log.encode(update_log.SnapshotMeta(0, 3, *parts))
    assert msgspec.msgpack.decode(written)["life"] == 3
    assert update_log.decode_meta(written).incarnation == 3


def test_what_cannot_be_durable_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hop.* has no servers that could be durable"):
        CheckpointOptions(tmp_path, durable=DurabilityOptions()).check(policies.parse("hop"))
    with pytest.raises(ConfigError, match="it was not run with --durable"):
        replay(tmp_path)
    driver, _ = driver_of(partial(ones, 1), "bsp", tmp_path, DurabilityOptions())
    model = Model(policies.parse("bsp"), "", Layout((), "float32"), optimizers.parse("sgd:lr=0.1"), {})
    driver.parts.state.configure(model)
    assert "of a durable run" in driver.parts.resizing.limits.refusal(3)
    driver.close()
