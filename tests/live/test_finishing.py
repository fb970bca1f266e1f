"""Live, too, workers that have come to the end of their script keep their share of N; lost ones do not."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import paceline
from paceline import policies, workloads
from paceline.api import Job, train_job_live
from paceline.cluster import Fault, load
from paceline.core.actions import Apply
from paceline.core.events import ViewChanged
from paceline.core.messages import Members, View
from paceline.function_workers import function_starter
from paceline.run import Run
from paceline.runtime.live.driver.checkpointing import CheckpointOptions
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.tensors import optimizers
from paceline.workload_training import train

SLOW = "one-slow:factor=4,compute_s=0.01"


def live(policy: str, *faults: Fault, iterations: int = 15) -> Run:
    cluster = replace(load(SLOW), faults=faults)
    run = train_job_live(Job("quadratic", policy, 3, 2, cluster, iterations, None, None, None, 0))
    assert run.failures == []
    assert run.replay() == []
    return run


def steps(run: Run, shard: int) -> list[tuple[View, float]]:
    """Each step of a shard on arrival: the view it was taken under, and its weight."""
    view, found = View(0, ()), []
    for record in run.trace:
        if record.node == ("server", shard):
            if isinstance(record.event, ViewChanged):
                view = record.event.view
            found += [(view, action.weight) for action in record.actions if isinstance(action, Apply)]
    return found


@pytest.mark.parametrize("policy", ["asp", "ssp:staleness=3", "elastic:lookahead=4", "specsync"])
def test_the_straggler_steps_with_one_nth_to_the_end(policy: str) -> None:
    run = live(policy)
    for shard in range(2):
        assert {weight for _, weight in steps(run, shard)} == {1 / 3}
    assert any(len(view.finished) == 2 for view, _ in steps(run, 0)), "it was alone"


@pytest.mark.parametrize("policy", ["asp:scale=none", "specsync:base=asp(scale=none)"])
def test_with_the_full_rate_each_step_has_weight_one(policy: str) -> None:
    run = live(policy)
    assert {weight for _, weight in steps(run, 0)} == {1.0}


def test_in_a_mix_each_shard_has_its_own_scale() -> None:
    run = live("asp:scale=none+asp")
    assert [{weight for _, weight in steps(run, shard)} for shard in range(2)] == [{1.0}, {1 / 3}]


def counting_its_own_steps(each: tuple[int, ...]) -> None:
    """Rank r takes each[r] steps of 1 down a slope of 1."""
    rank = paceline.init().rank
    weights = torch.nn.Parameter(torch.zeros(64))
    opt = paceline.Optimizer(torch.optim.SGD([weights], lr=1.0))
    for _ in range(each[rank]):
        opt.zero_grad()
        weights.sum().backward()
        opt.step()


@pytest.mark.parametrize("servers", [1, 2])
def test_a_mean_of_those_who_are_left_is_a_step_for_their_part(servers: int) -> None:
    """As under asp: whoever trains on alone under bsp does not step for all."""
    run = paceline.launch(partial(counting_its_own_steps, (2, 3, 6)), workers=3, servers=servers, policy="bsp")
    assert run.failures == []
    assert run.replay() == []
    for shard in range(servers):
        assert [weight for _, weight in steps(run, shard)] == [1, 1, 2 / 3, 1 / 3, 1 / 3, 1 / 3]
    [values] = run.parameters.values()
    assert torch.allclose(values, torch.full((64,), -(2 + 2 / 3 + 3 * 1 / 3)), atol=1e-6)


@pytest.mark.parametrize("policy", ["backup:extra=1", "deadline"])
def test_a_worker_that_was_late_and_trains_on_does_not_step_for_all(policy: str) -> None:
    run = paceline.launch(partial(counting_its_own_steps, (20, 20, 40)), workers=3, policy=policy)
    found = steps(run, 0)
    assert all(weight == len(view.members) / (len(view.members) + len(view.finished)) for view, weight in found)
    assert found[-1][1] == 1 / 3


@pytest.mark.parametrize("kind", ["crash", "leave"])
@pytest.mark.parametrize("when", [{"at_iteration": 5}, {"at_s": 0.0}])
def test_who_is_lost_or_leaves_in_the_middle_gives_its_share_up(kind: str, when: dict[str, float]) -> None:
    run = live("asp", Fault(kind, 1, **when), iterations=40)  # type: ignore[arg-type]
    found = steps(run, 0)
    assert all(1 not in view.finished for view, _ in found)
    assert all(weight == (1 / 3 if 1 in dict(view.members) else 1 / 2) for view, weight in found)
    assert found[-1][1] == 1 / 2


def test_a_restarted_server_knows_who_has_finished(tmp_path: Path) -> None:
    work = partial(train, workloads.load("quadratic"), optimizers.parse("sgd:lr=0.01"), 4, 60, 0)
    checkpointing = CheckpointOptions(tmp_path, every_updates=5)
    cluster, care = load("one-slow:factor=10,compute_s=0.005"), FaultPolicy(timeout_s=90)
    plan = RunPlan(
        Members(3, 2),
        function_starter(work),
        policies.parse("asp"),
        cluster=cluster,
        care=care,
        checkpointing=checkpointing,
    )
    driver = Driver(plan, say=lambda line: None)

    def kill() -> None:
        while len(driver.parts.roster.membership.finished) < 2:
            time.sleep(0.001)
        next(child for child in driver.parts.children.values() if child.role == "server" and child.rank == 1).kill()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        run = driver.run()
    finally:
        thread.join()
    again = [record for record in run.trace if record.node == ("server", 1) and record.incarnation == 1]
    views = [record.event.view for record in again if isinstance(record.event, ViewChanged)]
    assert len(views[0].finished) == 2
    weights = [action.weight for record in again for action in record.actions if isinstance(action, Apply)]
    assert weights
    assert set(weights) == {1 / 3}
