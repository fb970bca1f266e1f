"""Live runs in real processes: parity, replay, loss and join, and what is left behind (nothing)."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

import paceline
from paceline import policies, workloads
from paceline.api import Job, train_job_live
from paceline.cluster import Fault, load
from paceline.core.actions import Answer
from paceline.core.events import GradientReady, PushArrived, ViewChanged
from paceline.core.messages import Members
from paceline.core.trace import Trace, replay
from paceline.errors import RunFailed
from paceline.function_workers import function_starter
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.tensors import optimizers
from paceline.workload_training import train
from tests.reference import largest_difference, train_alone

POLICIES = ["bsp", "ssp:staleness=3", "backup:extra=1", "asp"]
MOMENTUM = "sgd:lr=0.05,momentum=0.9"


def job(policy: str, workers: int = 3, servers: int = 2, cluster="steady:compute_s=0", **more) -> Job:
    given = {"iterations": 50, "target": None, "optimizer": None, "batch": None, "seed": 0, **more}
    return Job("digits-mlp", policy, workers, servers, cluster, **given)


def machine_of(node, header):
    return policies.parse(header.policy).machine(node.role, node.rank, header.members, header.seed)


def done_by(run: paceline.Run, rank: int, incarnation: int = 0) -> list[int]:
    """The iterations a worker computed."""
    return [
        record.event.iteration
        for record in run.trace
        if record.node == ("worker", rank)
        and record.incarnation == incarnation
        and isinstance(record.event, GradientReady)
    ]


@pytest.mark.parametrize("optimizer", ["sgd:lr=0.1", MOMENTUM, "adam:lr=0.002"])
def test_bsp_live_equals_single_process(optimizer: str) -> None:
    run = train_job_live(job("bsp", optimizer=optimizer))
    alone = train_alone("digits-mlp", 3, 50, optimizer, torch.float32)
    assert largest_difference(run.parameters, alone) < 1e-5
    assert done_by(run, 2) == list(range(50))


@pytest.mark.parametrize("policy", [*POLICIES, "scheduled", "elastic:lookahead=4"])
def test_a_recorded_live_trace_replays_to_the_same_actions(policy: str) -> None:
    cluster = replace(
        load("random-slowdown:factor=6,compute_s=0.005"),
        faults=(Fault("crash", 1, at_iteration=20), Fault("join", 1, at_s=0.3)),
    )
    run = train_job_live(job(policy, cluster=cluster, iterations=60))
    again = Trace.from_bytes(run.trace.to_bytes())
    assert len(again) > 200
    assert replay(again, machine_of) == []


@pytest.mark.parametrize("policy", [*POLICIES, "scheduled", "elastic:lookahead=4"])
def test_kill_9_in_the_middle_then_a_new_worker(policy: str) -> None:
    """3 workers, 2 servers: the others go on within 0.2 s, a new worker joins, the run ends."""
    iterations = 110
    work = partial(train, workloads.load("digits-mlp"), optimizers.parse("sgd:lr=0.1"), 32, iterations, 0)
    plan = RunPlan(
        Members(3, 2),
        function_starter(work),
        policies.parse(policy),
        load("steady:compute_s=0.01"),
        care=FaultPolicy(timeout_s=60),
    )
    driver = Driver(plan, say=lambda line: None)
    killed_at: list[float] = []

    def kill_and_join() -> None:
        while len(driver.parts.logged.history) < 20:
            time.sleep(0.001)
        (victim,) = [child for child in driver.parts.workers.live() if child.rank == 1]
        killed_at.append(time.monotonic() - driver.parts.state.epoch_s)
        victim.kill()
        driver.parts.worker_restarts.injector.due.append(Fault("join", 1, at_s=killed_at[0] + 0.3))

    killer = threading.Thread(target=kill_and_join)
    killer.start()
    run = driver.run()
    killer.join()
    noticed = [
        record.event.at - killed_at[0]
        for record in run.trace
        if record.node.role == "server" and isinstance(record.event, ViewChanged) and record.event.at > killed_at[0]
    ]
    assert 0 < max(noticed[:2]) < 0.2, "both shards know"
    answered = [
        record.event.at
        for record in run.trace
        if record.node.role == "server" and any(isinstance(action, Answer) for action in record.actions)
    ]
    after = [at - killed_at[0] for at in answered if at > killed_at[0]]
    assert after[0] < 0.2
    pauses = [later - earlier for earlier, later in pairwise(answered)]
    assert max(pauses) < 0.3, "nobody waits for the dead"
    # Under Backup a worker that is late may adopt the last iteration's successor.
    last = iterations - (5 if policy.startswith("backup") else 1)
    assert min(max(done_by(run, 0)), max(done_by(run, 2))) >= last
    assert len(done_by(run, 1)) < iterations
    joined = done_by(run, 1, incarnation=1)
    assert joined[0] > 20, "it starts where the others are"
    assert joined[-1] >= last
    assert run.failures == []


def test_live_and_virtual_order_their_pushes_the_same_way() -> None:
    """The same fixed delays, the same policy object. Pushes that are meant to be closer than the clocks of a busy
    machine can tell apart may swap."""
    cluster = "factors:by_worker=1:1.37:2.21,compute_s=0.1"
    for policy in ("asp", "ssp:staleness=1"):
        virtual = paceline.simulate(policy=policy, workers=3, cluster=cluster, iterations=8)
        live = train_job_live(job(policy, 3, 1, cluster, iterations=8))
        orders = []
        for run in (virtual, live):
            orders.append(
                [
                    (record.event.push.handle.source, record.event.push.handle.iteration)
                    for record in run.trace
                    if record.node == ("server", 0) and isinstance(record.event, PushArrived)
                ]
            )
        times = {
            (record.event.push.handle.source, record.event.push.handle.iteration): record.event.at
            for record in virtual.trace
            if isinstance(record.event, PushArrived)
        }
        assert sorted(orders[0]) == sorted(orders[1])
        place = {push: index for index, push in enumerate(orders[1])}
        for first in times:
            for second in times:
                if times[first] + 0.05 < times[second]:
                    assert place[first] < place[second], (policy, first, second)


def test_shards_that_disagree_do_not_hang_a_worker() -> None:
    """Under Backup the last shard a worker hears may answer less than the others: it must be asked again at once."""

    def work() -> None:
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.001), model=model)
        while opt.global_step < 600:
            opt.zero_grad()
            model(torch.ones(4, 64)).sum().backward()
            opt.step()

    run = paceline.launch(work, workers=3, servers=3, policy="backup:extra=1", timeout_s=60)
    assert run.failures == []


@pytest.mark.ci
def test_relaxed_policies_reach_the_target_sooner_than_bsp() -> None:
    times = {}
    for policy in POLICIES:
        run = train_job_live(
            job(policy, 4, 2, "random-slowdown:factor=6,compute_s=0.01", iterations=2000, target="accuracy=0.75")
        )
        times[policy] = run.time_to_target_s
    assert None not in times.values(), times
    assert all(times[policy] < times["bsp"] for policy in POLICIES[1:]), times


def tiny(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


@pytest.mark.parametrize("lr", [1.0, torch.tensor(1.0)], ids=["number", "tensor, changed in place"])
def test_a_scheduler_on_the_workers_reaches_the_servers(lr: float | torch.Tensor) -> None:
    def work() -> None:
        model = tiny()
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5), model=model)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.1)
        for _ in range(6):
            opt.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
            opt.step()
            scheduler.step()

    run = paceline.launch(work, workers=2, servers=2, policy="bsp")
    alone = tiny()
    opt = torch.optim.SGD(alone.parameters(), lr=1.0, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.1)
    for _ in range(6):
        opt.zero_grad()
        alone(torch.ones(4, 3)).sum().backward()
        opt.step()
        scheduler.step()
    assert largest_difference(run.parameters, dict(alone.named_parameters())) < 1e-5


def test_everybody_starts_from_worker_0s_values() -> None:
    def work() -> None:
        model = tiny(seed=paceline.init().rank)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.0), model=model)
        assert torch.equal(model.weight, tiny(seed=0).weight)
        opt.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        opt.step()

    run = paceline.launch(work, workers=3, policy="asp")
    assert run.failures == []
    assert torch.equal(run.parameters["weight"], tiny(seed=0).weight)


def test_unequal_lengths_do_not_hang_bsp() -> None:
    def work() -> None:
        model = tiny()
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        for _ in range(5 + 10 * paceline.init().rank):
            opt.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            opt.step()

    run = paceline.launch(work, workers=3, servers=2, policy="bsp", timeout_s=60)
    assert [len(done_by(run, rank)) for rank in range(3)] == [5, 15, 25]


def test_a_gradient_that_is_not_finite_is_rejected_and_nobody_waits_for_it(capfd) -> None:
    def work() -> None:
        model = tiny()
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        for step in range(6):
            opt.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            if paceline.init().rank == 1 and step == 3:
                model.weight.grad[0, 0] = float("nan")
                model.bias.grad[:] = float("inf")
                opt.step()
                assert opt.dropped_share > 0
            else:
                opt.step()
                assert opt.dropped_share == 0

    run = paceline.launch(work, workers=2, policy="bsp")
    assert run.failures == []
    assert all(torch.isfinite(value).all() for value in run.parameters.values())
    assert "rejected the gradient of worker 1, iteration 3: the gradient is not finite" in capfd.readouterr().out


def test_a_model_that_has_diverged_does_not_fill_the_terminal(capfd) -> None:
    def work() -> None:
        model = tiny()
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        for _ in range(130):
            opt.zero_grad()
            (model(torch.ones(1, 3)).sum() * float("nan")).backward()
            opt.step()

    run = paceline.launch(work, workers=1, policy="asp")
    assert run.failures == []
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("rejected")]
    assert len(said) == 3 + 9 + 1
    assert said[2] == "rejected the gradient of worker 0, iteration 2: the gradient is not finite"
    assert said[3].startswith("rejected 10 gradients so far, the last one of worker 0, iteration 9: ")
    assert said[-1].startswith("rejected 100 gradients so far")


def test_a_worker_that_raises_is_dropped_and_reported(capfd) -> None:
    def work() -> None:
        model = tiny()
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        for step in range(8):
            if paceline.init().rank == 1 and step == 3:
                raise ValueError("a bug in the script")
            opt.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            opt.step()

    run = paceline.launch(work, workers=3, policy="bsp")
    assert run.failures == ["worker 1 failed with exit code 1"]
    assert len(done_by(run, 0)) == 8
    said = capfd.readouterr()
    assert "worker 1 failed:" in said.err
    assert "ValueError: a bug in the script" in said.err


def test_a_function_without_an_optimizer_gets_a_clear_line() -> None:
    with pytest.raises(RunFailed, match=r"without making a paceline.Optimizer"):
        paceline.launch(lambda: None, workers=2)


def test_all_workers_failing_is_an_error(capfd) -> None:
    def work() -> None:
        raise RuntimeError("nothing works")

    with pytest.raises(RunFailed, match="worker 0 failed"):
        paceline.launch(work, workers=2)


def test_a_different_model_is_refused(capfd) -> None:
    def work() -> None:
        width = 3 + (paceline.init().rank == 1)
        model = nn.Linear(width, 2)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        opt.zero_grad()
        model(torch.ones(1, width)).sum().backward()
        opt.step()

    run = paceline.launch(work, workers=2, policy="bsp", timeout_s=30)
    assert run.failures == ["worker 1 failed with exit code 1"]
    assert "the model of worker 1 differs from worker 0's" in capfd.readouterr().err


def test_a_run_that_does_not_end_is_given_up() -> None:
    def work() -> None:
        model = tiny()
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        while True:
            opt.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            opt.step()

    with pytest.raises(RunFailed, match="did not end within 5 s"):
        paceline.launch(work, workers=2, timeout_s=5)
