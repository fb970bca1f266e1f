"""What would go wrong in silence is refused with one clear line; what goes wrong aloud says who and why."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

import paceline
from paceline.cluster import Fault, load
from paceline.core.events import GradientReady
from paceline.core.messages import Members
from paceline.errors import ConfigError, RunFailed
from paceline.function_workers import function_starter
from paceline.policies import BSP
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.health import FaultPolicy


def model_and_optimizer(**more) -> tuple[nn.Module, paceline.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1, **more), model=model)


def step(model: nn.Module, opt: paceline.Optimizer) -> None:
    opt.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    opt.step()


def replaces_data() -> None:
    model, opt = model_and_optimizer()
    model.weight.data = model.weight.data.clone()
    step(model, opt)


def loads_after_wrapping() -> None:
    model, opt = model_and_optimizer()
    model.load_state_dict(nn.Linear(3, 2).state_dict())
    step(model, opt)


def clamps() -> None:
    model, opt = model_and_optimizer()
    step(model, opt)
    with torch.no_grad():
        model.weight.clamp_(-0.1, 0.1)
    step(model, opt)


def unfreezes() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model[0].requires_grad_(True)
    step(model, opt)


def adds_a_group() -> None:
    _, opt = model_and_optimizer()
    opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def two_optimizers() -> None:
    model_and_optimizer()
    model_and_optimizer()


def sparse() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.tensor([1])).sum().backward()
    opt.step()


def steps_in_a_child() -> None:
    model, opt = model_and_optimizer()
    pid = os.fork()
    if pid == 0:
        try:
            step(model, opt)
        except paceline.PacelineError as error:
            print(f"refused: {error}", file=__import__("sys").stderr)
        os._exit(0)
    os.waitpid(pid, 0)
    step(model, opt)


@pytest.mark.parametrize(
    ("work", "said", "fails"),
    [
        (replaces_data, "weight was changed by the script: once wrapped, parameters belong to the servers", True),
        (loads_after_wrapping, "weight was changed by the script", True),
        (clamps, "weight was changed by the script", True),
        (unfreezes, "a parameter that was frozen has a gradient", True),
        (adds_a_group, "all parameter groups must be there when paceline.Optimizer is made", True),
        (two_optimizers, "a worker has one paceline.Optimizer", True),
        (sparse, "has a sparse gradient", True),
        (steps_in_a_child, "refused: worker 0 called step in a child process", False),
    ],
)
def test_what_would_go_wrong_in_silence_is_refused(work, said: str, fails: bool, capfd) -> None:
    run = paceline.launch(work, workers=1, timeout_s=30)
    assert bool(run.failures) == fails
    err = capfd.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_another_optimizer_on_one_rank_is_refused(capfd) -> None:
    def work() -> None:
        model = nn.Linear(3, 2)
        make = torch.optim.Adam if paceline.init().rank == 1 else torch.optim.SGD
        step(model, paceline.Optimizer(make(model.parameters(), lr=0.1)))

    run = paceline.launch(work, workers=2, timeout_s=30)
    assert run.failures == ["worker 1 failed with exit code 1"]
    assert "differs from worker 0's" in capfd.readouterr().err


def test_a_name_in_a_parameter_group_does_no_harm() -> None:
    def work() -> None:
        model = nn.Linear(3, 2)
        groups = [{"params": model.parameters(), "name": "encoder"}]
        step(model, paceline.Optimizer(torch.optim.SGD(groups, lr=0.1), model=model))

    assert paceline.launch(work, workers=1, timeout_s=30).failures == []


def test_a_joiner_takes_the_learning_rate_of_the_run_and_does_not_reset_it() -> None:
    def work() -> None:
        model, opt = model_and_optimizer()
        joined = opt.global_step > 0
        if joined:
            assert opt.param_groups[0]["lr"] < 0.1
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.99)
        while opt.global_step < 250:
            step(model, opt)
            scheduler.step()
            if paceline.init().rank == 0:
                paceline.log(loss=opt.param_groups[0]["lr"])

    cluster = "steady:compute_s=0.01"
    faults = (Fault("crash", 1, at_iteration=10), Fault("join", 1, at_s=1.2))
    from dataclasses import replace

    run = paceline.launch(work, workers=2, policy="bsp", cluster=replace(load(cluster), faults=faults), timeout_s=60)
    assert run.failures == []
    joined = [r for r in run.trace if r.node == ("worker", 1) and r.incarnation == 1]
    assert any(isinstance(record.event, GradientReady) for record in joined)


def test_numbers_of_numpy_may_be_logged() -> None:
    def work() -> None:
        model, opt = model_and_optimizer()
        step(model, opt)
        paceline.log(loss=np.float32(0.5))

    run = paceline.launch(work, workers=1, timeout_s=30)
    assert [point.loss for point in run.history] == [0.5]


def test_when_all_workers_are_killed_the_run_has_failed() -> None:
    def work() -> None:
        model, opt = model_and_optimizer()
        for count in range(100):
            if count == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            step(model, opt)

    run = paceline.launch(work, workers=2, timeout_s=30)
    assert sorted(run.failures) == ["worker 0 was killed by SIGKILL", "worker 1 was killed by SIGKILL"]


def test_killed_before_anything_was_described() -> None:
    with pytest.raises(RunFailed, match="worker 0 was killed by SIGKILL, before the run began"):
        paceline.launch(lambda: os.kill(os.getpid(), signal.SIGKILL), workers=1, timeout_s=30)


def test_a_wrong_policy_in_the_script_is_a_configuration_error(capfd) -> None:
    def work() -> None:
        model = nn.Linear(3, 2)
        paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), policy="spp")

    with pytest.raises(ConfigError, match="failed with exit code 2"):
        paceline.launch(work, workers=2, timeout_s=30)
    assert "unknown policy 'spp', did you mean 'ssp'?" in capfd.readouterr().err


def test_a_policy_under_the_name_of_another_is_refused_before_anything_starts() -> None:
    """Servers would make the other one. Under its own name it works (tests/front/test_user_policy.py)."""

    class Mine(BSP):
        """Has BSP's name."""

    with pytest.raises(ConfigError, match="Mine has the name 'bsp' of one of paceline's policies: give it its own"):
        paceline.launch(lambda: None, policy=Mine())


@pytest.mark.parametrize(
    "given", [{"workers": 2.5}, {"policy": 3}, {"cluster": 5}, {"target": 5}, {"seed": "x"}, {"seed": True}]
)
def test_wrong_types_are_one_line(given: dict) -> None:
    with pytest.raises(ConfigError):
        paceline.launch(lambda: None, **given)


def test_a_worker_that_joins_while_the_run_ends_is_told_so() -> None:
    def work() -> None:
        model, opt = model_and_optimizer()
        for count in range(100_000):
            step(model, opt)
            if paceline.init().rank == 0 and count == 50:
                paceline.log(loss=0.0)

    plan = RunPlan(
        Members(2, 1), function_starter(work), BSP(), load("steady:compute_s=0.01"), care=FaultPolicy(timeout_s=30)
    )
    driver = Driver(plan, say=lambda line: None)

    def stop_and_join() -> None:
        while not driver.parts.logged.history:
            time.sleep(0.001)
        driver.parts.worker_restarts.injector.due.append(Fault("join", 2, at_s=0.0))
        time.sleep(0.3)
        driver.parts.interrupts.count = 1

    thread = threading.Thread(target=stop_and_join)
    thread.start()
    run = driver.run()
    thread.join()
    assert run.failures == []
