"""Another number of servers while a run goes on: nothing lost, nothing twice, nobody left waiting."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline import cli, policies, run_folder, workloads
from paceline.api import Job, simulate_job
from paceline.cluster import Resize, load
from paceline.core.actions import Apply, Drop
from paceline.core.control.server_resizing import GiveParts, ResumeWorkers, SwitchServers
from paceline.core.events import GradientReady, ServersChanged
from paceline.core.messages import Members
from paceline.errors import ConfigError
from paceline.function_workers import function_starter
from paceline.run import Run
from paceline.runtime.live.driver.checkpointing import CheckpointOptions
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.runtime.live.protocol import resizing_messages, wire
from paceline.runtime.live.storage import checkpoint
from paceline.tensors import optimizers
from paceline.tensors.assignment import initial
from paceline.workload_training import train
from tests.reference import largest_difference, train_alone

MOMENTUM, ADAM = "sgd:lr=0.05,momentum=0.9", "adam:lr=0.002"
DIGITS_BYTES = 4 * (64 * 64 + 64 + 64 * 10 + 10)


def driver_of(
    policy: str, servers: list[int], optimizer: str = "sgd:lr=0.1", iterations: int = 60, **more
) -> tuple[Driver, list[str]]:
    """Digits on 3 workers; another number of servers at iterations 10, 20, ..."""
    work = partial(train, workloads.load("digits-mlp"), optimizers.parse(optimizer), 32, iterations, 0)
    resizes = tuple(Resize(count, at_iteration=10 * n) for n, count in enumerate(servers[1:], 1))
    scenario = replace(load(more.pop("cluster", "steady:compute_s=0.004")), resizes=resizes)
    given = {"care": FaultPolicy(timeout_s=60), **more}
    said: list[str] = []
    plan = RunPlan(Members(3, servers[0]), function_starter(work), policies.parse(policy), scenario, **given)
    return Driver(plan, say=said.append), said


@cache
def alone_for(iterations: int, optimizer: str) -> dict[str, torch.Tensor]:
    return train_alone("digits-mlp", 3, iterations, optimizer, torch.float32)


def before(driver: Driver, step: type, deed: Callable[[], None]) -> None:
    """Do `deed`, once, before this message is heard or this order is carried out."""
    rest = [deed]
    handlers, execute = driver.parts.mailbox.handlers, driver.parts.resizing.execute
    hear = handlers.get(step)

    def first_the_deed(what: Any) -> None:
        while rest and isinstance(what, step):
            rest.pop()()
        (hear or execute)(what)

    if hear is not None:
        handlers[step] = first_the_deed
    else:
        driver.parts.resizing.execute = first_the_deed  # type: ignore[method-assign]


def check(run: Run, servers: list[int]) -> None:
    assert run.failures == []
    assert run.replay() == []
    assert [(each.before, each.after) for each in run.server_changes] == list(pairwise(servers))


def used(run: Run, *kinds: type) -> Counter[tuple[int, int, int]]:
    """Of each gradient: the bytes that were applied (or dropped) on all shards together."""
    total: Counter[tuple[int, int, int]] = Counter()
    for record in run.trace:
        for action in record.actions:
            if isinstance(action, kinds):
                for handle in action.handles if isinstance(action, Apply) else (action.handle,):
                    total[handle.source, handle.incarnation, handle.iteration] += handle.nbytes
    return total


def last_iterations(run: Run) -> dict[tuple[int, int], int]:
    return {
        (record.node.rank, record.incarnation): record.event.iteration
        for record in run.trace
        if record.node.role == "worker" and isinstance(record.event, GradientReady)
    }


@pytest.mark.parametrize(
    ("servers", "optimizer"),
    [
        ([2, 3, 2], MOMENTUM),
        ([1, 4, 1], ADAM),
        ([3, 2], "adam:lr=0.002,ema=0.9,schedule=cosine(samples=4000),batch=32"),
    ],
    ids=str,
)
def test_bsp_is_still_single_process_training(servers: list[int], optimizer: str) -> None:
    run = driver_of("bsp", servers, optimizer)[0].run()
    check(run, servers)
    plain = driver_of("bsp", servers[:1], optimizer)[0].run() if "ema" in optimizer else None
    if plain is not None:
        assert largest_difference(run.average, plain.average) < 1e-5
    alone = plain.parameters if plain is not None else alone_for(60, optimizer)
    assert largest_difference(run.parameters, alone) < 1e-5
    assert set(used(run, Apply).values()) == {DIGITS_BYTES}, "every gradient, on every element, once"


@pytest.mark.parametrize(
    "policy",
    [
        "asp",
        "ssp:staleness=3,lazy=true",
        "dssp:low=1,high=4",
        "scheduled:base=ssp(staleness=1)",
        "ssp:staleness=1+backup:extra=1",
        "backup:extra=1",
        "deadline",
        "asp@0,bsp@15",
    ],
)
def test_under_every_policy_each_gradient_is_used_once_on_every_element(policy: str) -> None:
    servers = [2, 4, 2] if "+" in policy else [2, 4, 1]
    run = driver_of(policy, servers, cluster="random-slowdown:factor=6,compute_s=0.002")[0].run()
    check(run, servers)
    assert set(used(run, Apply, Drop).values()) == {DIGITS_BYTES}
    assert min(last_iterations(run).values()) >= 55, "late ones adopt the iteration of the others"


def test_whole_tensors_move_where_the_optimizer_needs_them() -> None:
    servers = [2, 4, 1]
    run = driver_of("bsp", servers, "lars:lr=2,trust=0.02")[0].run()
    check(run, servers)
    plain = driver_of("bsp", [2], "lars:lr=2,trust=0.02")[0].run()
    assert largest_difference(run.parameters, plain.parameters) < 1e-5


def test_schedulers_and_overlap_go_on_as_before() -> None:
    """One worker, so that it is plain torch training: a learning rate that changes, gradients sent in backward."""
    x, y = torch.randn(64, 8), torch.randn(64, 3)

    def make(wrap: bool):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, paceline.Optimizer(inner, model=model, overlap=True) if wrap else inner

    def work(wrap: bool = True) -> dict[str, torch.Tensor]:
        model, opt = make(wrap)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 4, 0.5)
        for _ in range(30):
            opt.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            opt.step()
            schedule.step()
        if wrap:
            assert len(opt.state_dict()["state"]) == 4
        return {name: value.detach() for name, value in model.named_parameters()}

    scenario = replace(load("steady:compute_s=0.01"), resizes=(Resize(3, at_iteration=9), Resize(1, at_iteration=19)))
    run = paceline.launch(work, workers=1, servers=2, cluster=scenario, timeout_s=60)
    assert [each.after for each in run.server_changes] == [3, 1]
    assert largest_difference(run.parameters, work(wrap=False)) < 1e-6


@pytest.mark.parametrize("step", [resizing_messages.Held, SwitchServers, ResumeWorkers])
def test_a_worker_killed_during_the_change_holds_nobody_up_and_may_come_back(step: type) -> None:
    driver, said = driver_of("bsp", [2, 3], iterations=250, care=FaultPolicy(restarts=1, timeout_s=60))
    before(driver, step, lambda: next(child for child in driver.parts.workers.live() if child.rank == 1).kill())
    run = driver.run()
    check(run, [2, 3])
    assert any("worker 1 was killed by SIGKILL; starting it again" in line for line in said)
    lasts = last_iterations(run)
    assert lasts[0, 0] == lasts[2, 0] == lasts[1, 1] == 249
    whole = {gradient: nbytes for gradient, nbytes in used(run, Apply).items() if gradient[:2] != (1, 0)}
    assert set(whole.values()) == {DIGITS_BYTES}
    assert max(used(run, Apply).values()) == DIGITS_BYTES, "half of what it sent last may have come"


def test_a_worker_that_comes_during_the_change_is_let_in_afterwards() -> None:
    driver, said = driver_of("bsp", [2, 3], iterations=250)

    def join() -> None:
        driver.parts.workers.start(3)
        while (3, 0) not in driver.parts.beginning.admission.described:
            driver.parts.mailbox.waiter.wait(0.01)
            driver.parts.mailbox.hear_all()

    before(driver, GiveParts, join)
    run = driver.run()
    check(run, [2, 3])
    assert said.index("worker 3 joined") == 1, "after the line about the servers"
    assert last_iterations(run)[3, 0] == 249
    assert set(used(run, Apply).values()) == {DIGITS_BYTES}


def test_a_gradient_of_a_worker_that_died_counts_before_anything_moves() -> None:
    """It is held on the shards when the others are to stand still: they go on until it is used."""
    driver, _ = driver_of("bsp", [2, 3], iterations=25, cluster="one-slow:factor=10,compute_s=0.01")
    take_standing, killed = driver.parts.mailbox.handlers[resizing_messages.Standing], []
    waits_on: set[int] = set()

    def kill_one_that_waits(message: resizing_messages.Standing) -> None:
        if 1 in message.waiting:
            waits_on.add(message.shard)
        if len(waits_on) == 2 and not killed:
            killed.append(message.next[1] - 1)
            next(child for child in driver.parts.workers.live() if child.rank == 1).kill()
        take_standing(message)

    driver.parts.mailbox.handlers[resizing_messages.Standing] = kill_one_that_waits
    run = driver.run()
    assert killed
    check(run, [2, 3])
    assert used(run, Apply)[1, 0, killed[0]] == DIGITS_BYTES
    assert set(used(run, Apply).values()) == {DIGITS_BYTES}


@pytest.mark.parametrize("step", [GiveParts, resizing_messages.Gave])
def test_a_server_that_dies_before_all_have_given_is_restarted_and_the_change_begun_again(
    tmp_path: Path, step: type
) -> None:
    driver, said = driver_of(
        "ssp:staleness=2", [2, 3], iterations=80, checkpointing=CheckpointOptions(tmp_path, every_updates=5)
    )
    before(driver, step, lambda: next(c for c in driver.parts.children.values() if str(c) == "server 1").kill())
    run = driver.run()
    check(run, [2, 3])
    given_up = any("the change to 3 servers is given up: server 1 died" in line for line in said)
    assert given_up or step is resizing_messages.Gave, "it may have given its part before it died"
    assert any("server 1 was killed by SIGKILL; restarting it from" in line for line in said)
    assert min(last_iterations(run).values()) == 79


def test_a_new_server_that_dies_at_once_starts_again_from_what_it_was_given() -> None:
    """Without any checkpoint: what others gave is still there."""
    driver, said = driver_of("bsp", [2, 3], MOMENTUM)
    ready, killed = driver.parts.mailbox.handlers[wire.Ready], []

    def kill_once(message: wire.Ready) -> None:
        if message.shard == 2 and not killed:
            killed.append(True)
            next(child for child in driver.parts.children.values() if str(child) == "server 2").kill()
        else:
            ready(message)

    driver.parts.mailbox.handlers[wire.Ready] = kill_once
    run = driver.run()
    check(run, [2, 3])
    assert any("server 2 was killed by SIGKILL; restarting it from what others gave it" in line for line in said)
    assert largest_difference(run.parameters, alone_for(60, MOMENTUM)) < 1e-5


def test_a_server_that_dies_after_the_change_is_restarted_with_its_new_part(tmp_path: Path) -> None:
    driver, said = driver_of("ssp:staleness=2", [2, 3], iterations=150, checkpointing=CheckpointOptions(tmp_path))
    turn, killed = driver.turn, []

    def kill_later() -> None:
        turn()
        if (
            driver.parts.resizing.changes
            and driver.parts.checkpointer.last is not None
            and driver.parts.checkpointer.last.name != "000000"
            and not killed
        ):
            killed.append(True)
            assert checkpoint.read(driver.parts.checkpointer.last).assignment == driver.parts.servers.assignment
            next(child for child in driver.parts.children.values() if str(child) == "server 2").kill()

    driver.turn = kill_later  # type: ignore[method-assign]
    run = driver.run()
    check(run, [2, 3])
    assert any("server 2 was killed by SIGKILL; restarting it from" in line for line in said)
    assert min(last_iterations(run).values()) == 149
    assert run.history[-1].accuracy > 0.8


def test_a_run_is_resumed_after_a_change(tmp_path: Path) -> None:
    driver_of("bsp", [2, 3], ADAM, 60, checkpointing=CheckpointOptions(tmp_path))[0].run()
    manifest = checkpoint.latest(tmp_path / "checkpoints")[1]
    assert len(manifest.assignment) == 3
    assert manifest.assignment != initial(manifest.layout, 3), "the least movement leaves ranges"
    run = driver_of("bsp", [2], ADAM, 75, checkpointing=CheckpointOptions(tmp_path, resume=True))[0].run()
    check(run, [2])
    assert largest_difference(run.parameters, alone_for(75, ADAM)) < 1e-5


def test_a_person_asks_for_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    driver, _ = driver_of("asp", [2], iterations=100_000, checkpointing=CheckpointOptions(tmp_path))
    run_folder.write_config(tmp_path, {})
    codes: list[int] = []

    def ask() -> None:
        while len(driver.parts.logged.history) < 10:
            time.sleep(0.01)
        codes.extend(cli.run(["servers", str(tmp_path), count]) for count in ("3", "3", "0", "65"))
        driver.parts.workers.stop("asked enough", "stopped")

    thread = threading.Thread(target=ask)
    thread.start()
    run = driver.run()
    thread.join()
    assert codes == [0, 0, 2, 2]
    check(run, [2, 3])
    said = capfd.readouterr()
    assert "3 servers instead of 2: 33.1% of the parameters moved, training was held for" in said.out
    assert "there are 3 servers already" in said.out
    assert said.err.splitlines() == [
        "paceline: count=0 is out of range: 1 or more",
        "paceline: servers=65 is out of range: 1 to 64",
    ]
    assert cli.run(["servers", str(tmp_path), "2"]) == 2
    assert capfd.readouterr().err == f"paceline: the run in {str(tmp_path)!r} is not going on\n"


def test_what_cannot_change_says_so_and_goes_on() -> None:
    driver, said = driver_of("bsp", [2, 3], iterations=20, slicing="key-range")
    check(driver.run(), [2])
    assert [line for line in said if "stays 2: the number of servers cannot change with slicing=key-range" in line]
    driver, said = driver_of("ssp:staleness=1+backup:extra=1", [2, 1], iterations=20)
    check(driver.run(), [2])
    assert [line for line in said if "names 2 policies for 1 servers" in line]


def test_in_virtual_time_it_is_refused() -> None:
    scenario = replace(load("steady"), resizes=(Resize(3, at_s=1.0),))
    with pytest.raises(ConfigError, match=r"\[\[servers\]\] is for live runs"):
        simulate_job(Job("quadratic", "bsp", 2, 2, scenario, 5, None, None, None, 0))


def test_traces_and_reports_cope_with_it(tmp_path: Path) -> None:
    run = driver_of("ssp:staleness=2", [2, 4, 1])[0].run()
    run_folder.write_config(tmp_path, {"servers": 2})
    run_folder.save(tmp_path, run)
    again = run_folder.load(tmp_path)
    assert again.server_changes == run.server_changes
    assert run.metrics.bytes["push"] == DIGITS_BYTES * 3 * 60
    assert run.metrics.bytes["pull"] == DIGITS_BYTES * 3 * 61
    assert "the number of servers changes" in run.metrics.waiting_by_reason
    text = again.report(tmp_path / "report.html").read_text()
    assert "4 servers from" in text
    assert "1 server from" in text
    assert "server 3" in run.chrome_trace(tmp_path / "trace.json").read_text()
    changes = [record for record in run.trace if isinstance(record.event, ServersChanged)]
    assert Counter(record.node.role for record in changes) == {"worker": 6, "server": 4 + 1}
