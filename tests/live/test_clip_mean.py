"""Clipping of the mean on live servers: the same training as in one process, whatever happens to the servers."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline import policies, workloads
from paceline.cluster import Resize, load
from paceline.core.actions import Apply, Measure
from paceline.core.events import Restored
from paceline.core.messages import Members
from paceline.errors import PacelineError
from paceline.function_workers import function_starter
from paceline.run import Run
from paceline.runtime.live.driver.checkpointing import CheckpointOptions
from paceline.runtime.live.driver.children import Child
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.durability import joined, replay
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.runtime.live.protocol.configuration import MultihostOptions
from paceline.runtime.live.protocol.records import DurabilityOptions
from paceline.tensors import optimizers
from paceline.workload_training import train
from tests.reference import largest_difference, train_alone

CLIPPED = "sgd:lr=0.5,momentum=0.9,clip_mean=0.4"
ITERATIONS = 40


def driver_of(policy: str, servers: int, optimizer: str = CLIPPED, **more) -> tuple[Driver, list[str]]:
    """Digits on 3 workers."""
    work = partial(train, workloads.load("digits-mlp"), optimizers.parse(optimizer), 32, ITERATIONS, 0)
    given = {"cluster": load("steady:compute_s=0.002"), "care": FaultPolicy(timeout_s=60), **more}
    said: list[str] = []
    plan = RunPlan(Members(3, servers), function_starter(work), policies.parse(policy), **given)
    return Driver(plan, say=said.append), said


def norms(run: Run) -> list[set[float | None]]:
    """The norms that the shards' steps on each iteration were told, by iteration."""
    told: dict[int, set[float | None]] = {}
    for record in run.trace:
        for action in record.actions:
            if isinstance(action, Apply):
                told.setdefault(action.handles[0].iteration, set()).add(action.norm)
    return [told[iteration] for iteration in sorted(told)]


def check(run: Run, optimizer: str = CLIPPED) -> None:
    assert run.failures == []
    assert run.replay() == []
    alone = train_alone("digits-mlp", 3, ITERATIONS, optimizer, torch.float32)
    assert largest_difference(run.parameters, alone) < 1e-5


@pytest.mark.parametrize(
    ("servers", "policy", "optimizer"),
    [
        (1, "bsp", CLIPPED),
        (1, "bsp", "sgd:lr=0.5,clip_mean=0.4"),
        (3, "bsp", "sgd:lr=0.5,clip_mean=0.4"),
        (2, "bsp", "adam:lr=0.002,clip_mean=0.4,ema=0.9"),
        (2, "scheduled", CLIPPED),
        (2, "bsp@0,backup:extra=0@20", CLIPPED),
    ],
)
def test_it_is_single_process_training(servers: int, policy: str, optimizer: str) -> None:
    run = driver_of(policy, servers, optimizer)[0].run()
    check(run, optimizer)
    told = norms(run)
    assert len(told) == ITERATIONS
    if servers == 1:
        assert told == [{None}] * ITERATIONS, "one shard has the whole gradient: it asks nobody"
    else:
        found = [norm for (norm,) in told if norm is not None]
        assert len(found) == ITERATIONS, "all shards are told the same"
        assert min(found) < 0.4 < max(found), "some are clipped and some are not"


@pytest.mark.parametrize("keys", [False, True])
def test_over_tcp_too(keys: bool) -> None:
    check(driver_of("bsp", 2, multihost=MultihostOptions("127.0.0.1", "", keys=keys, shared_memory=False))[0].run())


def test_others_wait_for_nobody_who_is_late() -> None:
    run = driver_of("backup:extra=1", 3, cluster=load("one-slow:factor=6,compute_s=0.004"))[0].run()
    assert run.failures == []
    assert run.replay() == []
    assert run.metrics.dropped > 0
    assert all(norm is not None for told in norms(run) for norm in told)


class Killer:
    """Kills a server each time somebody has got so much further."""

    def __init__(self, driver: Driver, every: int) -> None:
        self.driver, self.every, self.kills = driver, every, 0
        self.turn = driver.turn
        driver.turn = self.turn_and_kill

    def server(self, rank: int) -> Child | None:
        return next((c for c in self.driver.parts.children.values() if (c.role, c.rank) == ("server", rank)), None)

    def turn_and_kill(self) -> None:
        self.turn()
        driver = self.driver
        kept = (
            driver.parts.checkpointer is None
            or driver.parts.checkpointer.last is not None
            or driver.parts.durability.how is not None
        )
        if (
            kept
            and len(driver.parts.logged.history) >= self.every * (self.kills + 1)
            and not driver.parts.state.finishing
        ):
            victim = self.server(self.kills % driver.parts.servers.count)
            if victim is not None:
                self.kills += 1
                victim.kill()


def test_durable_servers_that_are_killed_lose_no_step(tmp_path: Path) -> None:
    driver, _ = driver_of("bsp", 2, checkpointing=CheckpointOptions(tmp_path, durable=DurabilityOptions(events=30)))
    killer = Killer(driver, 7)
    run = driver.run()
    assert killer.kills >= 4
    check(run)
    replayed = joined(replay(tmp_path))
    assert all(torch.equal(replayed[name], value) for name, value in run.parameters.items())


def test_a_server_that_starts_from_a_checkpoint_keeps_nobody_waiting(tmp_path: Path) -> None:
    driver, _ = driver_of("bsp", 3, checkpointing=CheckpointOptions(tmp_path, every_updates=5))
    killer = Killer(driver, 9)
    run = driver.run()
    assert killer.kills >= 3
    assert run.failures == []
    assert any(isinstance(record.event, Restored) for record in run.trace)
    steps = [action for record in run.trace for action in record.actions if isinstance(action, Apply)]
    assert max(handle.iteration for step in steps for handle in step.handles) == ITERATIONS - 1


def test_the_number_of_servers_may_change() -> None:
    resizes = tuple(Resize(count, at_iteration=10 * n) for n, count in enumerate((3, 1, 2), 1))
    scenario = replace(load("steady:compute_s=0.004"), resizes=resizes)
    run = driver_of("bsp", 1, cluster=scenario)[0].run()
    check(run)
    assert [(each.before, each.after) for each in run.server_changes] == [(1, 3), (3, 1), (1, 2)]
    measured = {a.iteration for record in run.trace for a in record.actions if isinstance(a, Measure)}
    assert 0 < len(measured) < ITERATIONS


def test_a_worker_that_is_killed_and_one_that_joins_hold_up_nobody() -> None:
    driver, said = driver_of("bsp", 3, care=FaultPolicy(restarts=2, timeout_s=60))
    turn, left = driver.turn, [8, 16]

    def turn_and_kill() -> None:
        turn()
        while left and len(driver.parts.logged.history) >= left[0]:
            left.pop(0)
            with contextlib.suppress(StopIteration):
                next(child for child in driver.parts.workers.live() if child.rank == 1).kill()

    driver.turn = turn_and_kill
    run = driver.run()
    assert run.failures == []
    assert run.replay() == []
    assert any("starting it again" in line for line in said)


def test_tensors_without_a_gradient_and_overlap() -> None:
    def model_of() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def losses(model: nn.Sequential, step: int, ranks: range) -> torch.Tensor:
        parts = [torch.randn(6, 3, generator=torch.Generator().manual_seed(100 * step + rank)) for rank in ranks]
        x = torch.cat(parts).double()
        return 5 * (model[0](x) if step % 2 else model(x)).pow(2).mean()

    def work() -> None:
        model = model_of()
        inner = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.1)
        opt = paceline.Optimizer(inner, model=model, overlap=True, options="clip_mean=1")
        rank = paceline.init().rank
        for step in range(8):
            opt.zero_grad()
            losses(model, step, range(rank, rank + 1)).backward()
            opt.step()

    run = paceline.launch(work, workers=2, servers=2, policy="bsp")
    assert run.failures == []
    alone = model_of()
    opt = torch.optim.Adam(alone.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(8):
        opt.zero_grad()
        losses(alone, step, range(2)).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        opt.step()
    assert largest_difference(run.parameters, dict(alone.named_parameters())) < 1e-9


@pytest.mark.parametrize("policy", ["ssp:staleness=2", "hop"])
def test_a_policy_without_a_mean_is_refused(policy: str) -> None:
    def work() -> None:
        model = nn.Linear(2, 2)
        paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), options="clip_mean=1")

    with pytest.raises(PacelineError, match=r"clip_mean=1 needs a policy that steps on the mean .* use clip=1"):
        paceline.launch(work, workers=2, policy=policy)
