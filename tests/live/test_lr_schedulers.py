"""LR schedulers that are attached go on with a run: after `resume`, in workers that come later, without servers too."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.optim import lr_scheduler

import paceline
from paceline import policies
from paceline.cluster import Fault, load
from paceline.core.messages import Members
from paceline.errors import ConfigError
from paceline.function_workers import function_starter
from paceline.lr_schedulers import Attached, SchedulerState, like, plain
from paceline.run import Run
from paceline.runtime.live.driver.checkpointing import CheckpointOptions
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.durability import find_start
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.runtime.live.protocol.records import DurabilityOptions
from paceline.runtime.live.storage import checkpoint

Make = Callable[[torch.optim.Optimizer], Any]

KINDS: dict[str, Make] = {
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 3),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [2, 5, 5, 12]),
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 0.9**step),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda step: 0.9),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 10),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 3),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.1, step_size_up=4),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=100),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt), lr_scheduler.ExponentialLR(opt, 0.9)], [4]
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt), lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=2),
}


def sgd(lr: float | torch.Tensor = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=lr, momentum=0.9)


def rates(opt: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[tuple[float, float]]:
    """What it sets in so many steps."""
    found = []
    for _ in range(steps):
        opt.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        group = opt.param_groups[0]
        found.append((float(group["lr"]), group["momentum"]))
    return found


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_scheduler_of_torch_goes_on_from_its_state(kind: str, lr: float | torch.Tensor) -> None:
    if isinstance(lr, torch.Tensor) and kind in ("CyclicLR", "OneCycleLR"):
        lr = 0.1  # they set numbers
    first, second = sgd(lr), sgd(lr)
    before, after = KINDS[kind](first), KINDS[kind](second)
    rates(first, before, 7)
    said = msgspec.msgpack.encode(SchedulerState(kind, Attached(before).state, True))
    groups = plain({name: value for name, value in first.param_groups[0].items() if name != "params"})
    Attached(after).restore(msgspec.msgpack.decode(said, type=SchedulerState))
    for name, value in groups.items():
        second.param_groups[0][name] = like(value, second.param_groups[0].get(name))
    assert rates(second, after, 20) == rates(first, before, 20)


def test_what_is_no_state_of_a_scheduler_is_refused() -> None:
    scheduler = Attached(KINDS["StepLR"](sgd()))
    for state in ({"gamma": "text"}, {"base_lrs": 0.1}, {"last_epoch": [1]}, {"_step_count": {"a": 1}}):
        with pytest.raises(ValueError, match="in place of"):
            scheduler.restore(SchedulerState("StepLR", state, True))
    with pytest.raises(ValueError, match="a Popen"):
        scheduler.restore(SchedulerState("Popen", {}, True))
    scheduler.restore(SchedulerState("StepLR", {"step": 1, "__class__": 2}, True))
    assert callable(scheduler.scheduler.step), "names that it does not have are left out"


def test_a_scheduler_that_cannot_be_kept_is_refused_at_once() -> None:
    class Strange:
        def step(self) -> None: ...

        def state_dict(self) -> dict[str, Any]:
            return {"when": object()}

    opt = paceline.Optimizer(sgd())
    with pytest.raises(ConfigError, match="Strange cannot be kept in checkpoints: its state holds a object"):
        opt.attach(Strange())
    scheduler = KINDS["StepLR"](opt)
    assert opt.attach(scheduler) is scheduler


def every_iteration(opt: torch.optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(opt, 0.1, total_steps=1000)


def now_and_then(opt: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ExponentialLR(opt, 0.9)


EVERY = {every_iteration: 1, now_and_then: 100}
"""After how many iterations each is stepped."""


def expected(make: Make, iteration: int) -> float:
    opt = sgd()
    scheduler = make(opt)
    for _ in range(iteration // EVERY[make]):
        opt.step()
        scheduler.step()
    return float(opt.param_groups[0]["lr"])


def work(make: Make, iterations: int, attach: bool = True, interrupt_at: int = -1, presses: int = 1) -> None:
    """Log (iteration, rate) as accuracy and loss before each step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model=model)
    scheduler = opt.attach(make(opt)) if attach else make(opt)
    while opt.global_step < iterations:
        paceline.log(accuracy=float(opt.global_step), loss=opt.param_groups[0]["lr"])
        if opt.global_step == interrupt_at and paceline.init().rank == 0:
            for _ in range(presses):
                os.kill(os.getppid(), signal.SIGINT)
                signal.sigtimedwait([], 0.3)
        opt.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        opt.step()
        if opt.global_step % EVERY[make] == 0:
            scheduler.step()


def run(script: Callable[[], None], checkpointing: CheckpointOptions | None, policy: str = "bsp", **more: Any) -> Run:
    servers = 0 if policy.startswith("hop") else 1
    plan = RunPlan(
        Members(2, servers), function_starter(script), policies.parse(policy), care=FaultPolicy(timeout_s=60),
        checkpointing=checkpointing, **{"cluster": load("steady:compute_s=0.001"), **more},
    )  # fmt: skip
    return Driver(plan, say=lambda line: None).run()


def logged(run: Run) -> dict[int, float]:
    return {int(point.accuracy or 0): point.loss or math.nan for point in run.history}


@pytest.mark.parametrize("policy", ["bsp", "hop:graph=ring"])
@pytest.mark.parametrize("make", EVERY)
def test_a_resumed_run_has_the_rates_of_one_that_was_not_interrupted(make: Make, policy: str, tmp_path: Path) -> None:
    """Interrupted a second time, and with another checkpoint on the way, which is gone back to. Not at an iteration
    after which the script would step the scheduler now and then: the interruption takes that step away."""
    every = None if policy.startswith("hop") else 7
    first = run(partial(work, make, 10**6, interrupt_at=10), CheckpointOptions(tmp_path, every), policy)
    begins = max(logged(first)) + 1
    script = partial(work, make, 10**6, interrupt_at=120)
    second = run(script, CheckpointOptions(tmp_path, every, resume=True), policy)
    assert min(logged(second)) == begins
    older = checkpoint.whole(tmp_path / "checkpoints")[-2 if every else -1]
    checkpointing = CheckpointOptions(tmp_path, every, resume=True, from_checkpoint=int(older.name))
    third = run(partial(work, make, 200), checkpointing, policy)
    for each in (first, second, third):
        found = logged(each)
        assert found == pytest.approx({iteration: expected(make, iteration) for iteration in found})


def work_again() -> None:
    """Log what `work` does, in the second life of worker 1, and end the run then."""
    again = os.environ["PACELINE_INCARNATION"] == "1"
    model = torch.nn.Linear(3, 2)
    opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model=model)
    scheduler = opt.attach(every_iteration(opt))
    for step in range(10**6):
        if again:
            paceline.log(accuracy=float(opt.global_step), loss=opt.param_groups[0]["lr"])
            if step == 20:
                os.kill(os.getppid(), signal.SIGINT)
        opt.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        opt.step()
        scheduler.step()


def test_a_worker_that_is_started_again_has_the_rates_of_the_others() -> None:
    cluster = replace(load("steady:compute_s=0.005"), faults=(Fault("restart", 1, at_iteration=20, for_s=0.0),))
    found = logged(run(work_again, None, cluster=cluster))
    assert min(found) > 0
    assert len(found) > 10
    assert found == pytest.approx({iteration: expected(every_iteration, iteration) for iteration in found})


def test_a_durable_run_that_died_has_kept_them(tmp_path: Path) -> None:
    checkpointing = CheckpointOptions(tmp_path, durable=DurabilityOptions())
    with pytest.raises(KeyboardInterrupt):
        run(partial(work, now_and_then, 10**6, interrupt_at=110, presses=2), checkpointing)
    assert [path.name for path in checkpoint.whole(tmp_path / "checkpoints")] == ["000000"]
    path = find_start(tmp_path, True, None, lambda line: None)
    assert path is not None
    again = run(partial(work, now_and_then, 200), CheckpointOptions(tmp_path, resume=True))
    found = logged(again)
    assert found == pytest.approx({iteration: expected(now_and_then, iteration) for iteration in found})


def warnings(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("WARNING: this run goes on")]


def test_one_line_says_that_a_scheduler_begins_afresh(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(partial(work, every_iteration, 10, attach=False), CheckpointOptions(tmp_path))
    assert warnings(capfd) == []
    run(partial(work, every_iteration, 20, attach=False), CheckpointOptions(tmp_path, resume=True))
    (line,) = warnings(capfd)
    assert line.startswith("WARNING: this run goes on at iteration 10: an LR scheduler begins afresh")
    run(partial(work, every_iteration, 30), CheckpointOptions(tmp_path, resume=True))
    (line,) = warnings(capfd)
    assert line.endswith("nothing was kept of its OneCycleLR, which begins afresh")
    run(partial(work, now_and_then, 40), CheckpointOptions(tmp_path, resume=True))
    (line,) = warnings(capfd)
    assert line.endswith("its ExponentialLR begins afresh: kept was a OneCycleLR")
