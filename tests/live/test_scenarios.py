"""Scenarios, workloads and server optimizers live: the same as in virtual time, by sleeps, signals and processes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import paceline
from paceline import run_folder
from paceline.api import Job, simulate_job, train_job_live
from paceline.cluster import Fault, Link, load
from paceline.core.events import PushArrived
from tests.reference import largest_difference


def job(workload: str, optimizer: str | None = None, cluster="steady:compute_s=0", policy="bsp", iterations=15) -> Job:
    return Job(workload, policy, 2, 2, cluster, iterations, None, optimizer, None, 0)


@pytest.mark.parametrize(
    ("workload", "optimizer"),
    [
        ("digits-mlp", "adam:lr=0.01,clip=0.5,ema=0.9,schedule=cosine(samples=700)"),
        ("digits-cnn", "adafactor:lr=0.02"),
        ("digits-mlp", "lars:lr=2,trust=0.02"),
        ("svm", None),
        ("matrix-factorization", "muon:lr=0.01"),
    ],
)
def test_bsp_live_is_bsp_in_virtual_time(workload: str, optimizer: str | None) -> None:
    virtual, live = simulate_job(job(workload, optimizer)), train_job_live(job(workload, optimizer))
    assert largest_difference(virtual.parameters, live.parameters) < 1e-5
    assert virtual.average.keys() == live.average.keys()
    if virtual.average:
        assert largest_difference(virtual.average, live.average) < 1e-5
        assert largest_difference(live.average, live.parameters) > 1e-3


def test_the_average_is_saved_beside_the_model(tmp_path) -> None:
    run = train_job_live(job("quadratic", "sgd:lr=0.05,ema=0.5", iterations=3))
    run_folder.write_config(tmp_path, {})
    run_folder.save(tmp_path, run)
    assert torch.equal(load_file(tmp_path / "average.safetensors")["weight"], run.average["weight"])
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], run.parameters["weight"])
    assert torch.equal(run_folder.load(tmp_path).average["weight"], run.average["weight"])


@pytest.mark.parametrize("when", [{"at_iteration": 5}, {"at_s": 0.3}])
def test_a_worker_restarts_as_the_scenario_says(when: dict[str, float], capfd) -> None:
    scenario = replace(load("steady:compute_s=0.02"), faults=(Fault("restart", 1, for_s=0.2, **when),))
    run = train_job_live(job("quadratic", cluster=scenario, policy="asp", iterations=150))
    assert "worker 1 was killed by SIGKILL, as the scenario says; starting it again in 0.2 s" in capfd.readouterr().out
    pushes = [record.event.push.handle for record in run.trace if isinstance(record.event, PushArrived)]
    assert {handle.incarnation for handle in pushes if handle.source == 1} == {0, 1}
    assert run.failures == []
    assert run.replay() == []


def test_a_slow_link_delays_its_worker_only() -> None:
    """quadratic has 24 bytes: 480 bytes/s is 0.05 s each way; with the latency 0.1 s an iteration."""
    scenario = replace(load("steady:compute_s=0.01"), links=(Link((1,), 0.0, 480.0),))
    run = train_job_live(job("quadratic", cluster=scenario, policy="asp", iterations=8))
    ends: dict[int, list[float]] = {0: [], 1: []}
    for record in run.trace:
        if record.node.role == "worker" and type(record.event).__name__ == "GradientReady":
            ends[record.node.rank].append(record.event.at)
    each = {rank: (times[-1] - times[0]) / (len(times) - 1) for rank, times in ends.items()}
    assert each[1] > 0.1
    assert each[0] < 0.08


def test_options_of_the_front_door_reach_the_servers() -> None:
    def work() -> None:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        opt = paceline.Optimizer(sgd, "bsp", model, options="clip=0.1,ema=0.5,schedule=linear(samples=12),batch=2")
        while opt.global_step < 4:
            opt.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            opt.step()
            time.sleep(0.01)

    run = paceline.launch(work, workers=2, servers=2)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    # 4 samples a step: the factors are 1, 2/3, 1/3, 0; the clipped gradient has norm 0.1.
    gradient = torch.cat([torch.full((6,), 2.0), torch.full((2,), 2.0)])
    step = 0.1 * gradient / gradient.norm()
    for name, part in (("weight", step[:6].view(2, 3)), ("bias", step[6:])):
        expected = dict(model.named_parameters())[name].detach() - 2 * part
        assert torch.allclose(run.parameters[name], expected, atol=1e-5)
        assert not torch.allclose(run.average[name], expected, atol=1e-4)


def test_too_many_servers_for_whole_tensors_is_one_line(capfd) -> None:
    def work() -> None:
        model = nn.Linear(3, 2)
        paceline.Optimizer(torch.optim.Adafactor(model.parameters()), "bsp", model)

    words = "servers=3 is out of range: 1 to 2, since slices end on the borders of tensors"
    with pytest.raises(paceline.ConfigError, match=words):
        paceline.launch(work, workers=1, servers=3)
    assert "Traceback" not in capfd.readouterr().err
