"""A live comparison is evaluated outside its clock: nobody waits for it, and it makes no worker a straggler."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch
from torch import nn

from paceline import workloads
from paceline.api import Job, train_job_live
from paceline.live_evaluation import MOST, ModelCopies
from paceline.run import FINISHED, TARGET, Run
from paceline.workloads.base import Workload

EVALUATION_S = 0.15
COMPUTE_S = 0.01


class SlowToEvaluate(Workload):
    """Takes many times as long to be evaluated as an iteration does."""

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        time.sleep(EVALUATION_S)
        return super().evaluate(module)


def trained(policy: str, iterations: int, target: str | None = None) -> Run:
    workload = SlowToEvaluate(**vars(workloads.load("digits-mlp")))
    cluster = f"steady:compute_s={COMPUTE_S}"
    return train_job_live(Job(workload, policy, 2, 1, cluster, iterations, target, None, None, 0))


@pytest.mark.parametrize("policy", ["bsp", "ssp:staleness=3"])
def test_nobody_waits_for_an_evaluation(policy: str) -> None:
    run = trained(policy, 40)
    evaluated = len(run.history)
    assert evaluated >= 10
    assert run.time_s < evaluated * EVALUATION_S / 3, "and it is ten times the run if nothing else is busy"
    assert run.metrics.slowest_worker < 3, "a worker that evaluates computes more than ten times as long"
    assert run.metrics.wait_share < 0.35, "who waits for one that evaluates waits most of the time"
    assert run.ended == FINISHED
    times = [point.time_s for point in run.history]
    assert times == sorted(times)
    assert times[-1] == run.time_s
    assert run.final["accuracy"] > 0.3


def test_a_target_ends_the_run_although_no_worker_evaluates() -> None:
    run = trained("bsp", 100_000, "accuracy=0.5")
    assert run.ended == TARGET
    assert run.target is not None
    reached = [run.target.reached(point) for point in run.history]
    first = run.history[reached.index(True)]
    assert run.time_to_target_s == first.time_s < run.time_s
    assert run.metrics.slowest_worker < 3


def test_a_target_that_is_missed() -> None:
    run = trained("bsp", 10, "accuracy=1")
    assert run.ended == FINISHED
    assert run.time_to_target_s is None
    assert "accuracy" in run.final


def test_copies_are_spaced_in_time_and_bounded_in_number() -> None:
    module = nn.Linear(3, 2)
    copies = ModelCopies(module.state_dict())
    moments = 10_000
    for moment in range(moments):
        nn.init.constant_(module.weight, moment)
        copies.keep(module, 1.0 + moment, updates=moment)
    kept = []
    for number in copies.numbers():
        loaded = copies.load(number, module)
        assert loaded is not None
        assert torch.equal(module.weight, torch.full((2, 3), float(loaded[1]))), "each is what the model was then"
        kept.append(loaded[0])
    assert MOST / 2 <= len(kept) <= MOST
    gaps = [later - earlier for earlier, later in pairwise(kept)]
    assert max(gaps) <= 3 * min(gaps)
    assert kept[0] - 1.0 <= max(gaps)
    assert moments - kept[-1] <= max(gaps)


def test_a_copy_that_is_gone_is_not_loaded() -> None:
    module = nn.Linear(3, 2)
    copies = ModelCopies(module.state_dict())
    for moment in range(MOST + 1):
        copies.keep(module, 1.0 + moment, updates=moment)
    assert copies.load(MOST - 1, module) is None
    assert copies.load(MOST, module) is not None
