"""The public surface, a world of one, and scripts under `paceline run`."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import ConfigError, PacelineError
from tests import forked

ROOT = Path(__file__).parents[2]
PACELINE = [sys.executable, "-m", "paceline.cli"]


def test_the_public_names_are_these() -> None:
    assert sorted(paceline.__all__) == sorted(
        [
            "ASP", "BSP", "SSP", "Backup", "BatchSampler", "Cluster", "ConfigError", "Optimizer", "PacelineError",
            "Policy", "Run", "RunFailed", "Sampler", "Trace", "barrier", "init", "launch", "log", "optimizers",
            "simulate", "stop", "zipline",
        ]
    )  # fmt: skip
    assert all(hasattr(paceline, name) for name in paceline.__all__)


def train_plainly(make_step) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped = make_step(opt)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(wrapped, max_lr=0.5, total_steps=12)
    for _ in range(10):

        def closure() -> torch.Tensor:
            wrapped.zero_grad()
            loss = model(torch.ones(3, 4)).pow(2).sum()
            loss.backward()
            return loss

        wrapped.step(closure)
        scheduler.step()
    return model.weight.detach()


def test_a_world_of_one_is_the_inner_optimizer_itself() -> None:
    assert torch.equal(train_plainly(lambda opt: opt), train_plainly(lambda opt: paceline.Optimizer(opt, "ssp")))


def test_a_world_of_one_keeps_state_dict_and_counts_steps() -> None:
    model = nn.Linear(2, 1)
    opt = paceline.Optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    assert isinstance(opt, torch.optim.Optimizer)
    model(torch.ones(1, 2)).sum().backward()
    opt.step()
    assert opt.global_step == 1
    assert not opt.step_was_dropped
    saved = opt.state_dict()
    other = paceline.Optimizer(torch.optim.Adam(nn.Linear(2, 1).parameters(), lr=0.3))
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.1
    assert other.param_groups is other.inner.param_groups


def test_loading_state_in_a_world_of_one_reaches_the_inner_optimizer() -> None:
    def stepped(opt: torch.optim.Optimizer, model: nn.Module) -> torch.Tensor:
        model(torch.ones(1, 2)).sum().backward()
        opt.step()
        opt.zero_grad()
        return next(model.parameters()).detach().clone()

    torch.manual_seed(0)
    first = nn.Linear(2, 1)
    opt = paceline.Optimizer(torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9))
    stepped(opt, first)
    second = nn.Linear(2, 1)
    second.load_state_dict(first.state_dict())
    resumed = paceline.Optimizer(torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9))
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert torch.equal(stepped(opt, first), stepped(resumed, second))


def test_wrong_uses_get_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"wraps a torch.optim optimizer, got Linear"):
        paceline.Optimizer(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown policy"):
        paceline.Optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), policy="spp")
    with pytest.raises(PacelineError, match=r"log\(loss=...\) takes one number, got Tensor of shape \(3,\)"):
        paceline.log(loss=torch.zeros(3))  # type: ignore[arg-type]


def test_the_sampler_deals_every_sample_once_an_epoch() -> None:
    sampler = paceline.Sampler(range(10), seed=3)
    first, second = list(sampler), list(sampler)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert len(sampler) == 10


def test_python_train_py_just_works() -> None:
    done = forked.run(["examples/digits.py", "--steps", 60], ROOT)
    assert done.returncode == 0, done.stderr
    assert "step 60: accuracy" in done.stdout


def test_paceline_run_trains_the_example(tmp_path) -> None:
    result = tmp_path / "out.json"
    options = ["--workers", 2, "--servers", 2, "--policy", "ssp:staleness=3", "--json", result]
    options += ["--report", tmp_path / "out.html"]
    done = forked.run(["-m", "paceline", "run", *options, "examples/digits.py", "--steps", 60, "--lr", 0.2], ROOT)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(result.read_text())["runs"]
    assert run["policy"] == "ssp:staleness=3"
    assert run["iterations"] == 60
    assert run["updates"] == 120
    assert run["final"]["accuracy"] > 0.5
    assert (tmp_path / "out.html").exists()


def test_a_target_ends_a_live_run_early() -> None:
    options = ["--workers", 2, "--policy", "asp", "--target", "accuracy=0.5"]
    done = forked.run(["-m", "paceline", "run", *options, "examples/digits.py", "--steps", 100000], ROOT)
    assert done.returncode == 0, done.stderr
    assert "reached accuracy=0.5 after" in done.stdout


def test_a_script_that_raises_gives_traceback_rank_and_exit_code_1(tmp_path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import paceline\npaceline.init()\nraise KeyError('oops')\n")
    done = forked.run(["-m", "paceline", "run", "--workers", 2, script], tmp_path)
    assert done.returncode == 1
    assert "worker 0 failed:" in done.stderr
    assert "KeyError: 'oops'" in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("paceline: worker")


def test_a_script_that_never_steps_is_told_so(tmp_path) -> None:
    script = tmp_path / "idle.py"
    script.write_text(
        "import torch, paceline\nmodel = torch.nn.Linear(1, 1)\n"
        "paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))\n"
    )
    done = forked.run(["-m", "paceline", "run", "--workers", 1, script], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "WARNING: nothing was trained: no worker has called the step" in done.stdout


def test_backup_beyond_the_workers_named_by_the_script_is_refused(tmp_path) -> None:
    script = tmp_path / "policy.py"
    script.write_text(
        "import torch, paceline\nmodel = torch.nn.Linear(1, 1)\n"
        "paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), policy='backup:extra=5')\n"
    )
    done = forked.run(["-m", "paceline", "run", "--workers", 2, script], tmp_path)
    assert done.returncode == 2
    assert "extra may be from 0 to 1" in done.stderr.splitlines()[-1]


ENDLESS = """
import torch, paceline
world = paceline.init()
model = torch.nn.Linear(4, 2)
opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), policy="ssp:staleness=3", model=model)
while True:
    opt.zero_grad()
    model(torch.ones(3, 4)).pow(2).sum().backward()
    opt.step()
    if world.rank == 0 and opt.global_step % 20 == 0:
        print(f"step {opt.global_step}", flush=True)
"""


def start_long_run(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A run that would go on for ever, once its workers are training; the driver and its processes."""
    (folder / "endless.py").write_text(ENDLESS)
    driver = subprocess.Popen(
        [*PACELINE, "run", "--workers", "1", "--servers", "2", "--cluster", "steady:compute_s=0.01", "endless.py"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert driver.stdout is not None
    # On a busy machine it may say first whom it waits for.
    assert any(line.startswith("worker 0: step") for line in driver.stdout)
    children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
    assert len(children) == 4  # the fork server, two servers, the worker
    return driver, [int(child) for child in children]


def test_all_processes_told_to_end_once_finish_with_a_summary(tmp_path) -> None:
    driver, children = start_long_run(tmp_path)
    os.killpg(driver.pid, signal.SIGTERM)
    out, err = driver.communicate(timeout=30)
    assert driver.returncode == 0, err
    assert "stopping after the current iterations" in out
    assert "iterations in" in out
    assert list(tmp_path.glob("runs/*/model.safetensors"))
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_ctrl_c_twice_stops_at_once(tmp_path) -> None:
    driver, children = start_long_run(tmp_path)
    for child in children[-2:]:
        os.kill(child, signal.SIGSTOP)
    driver.send_signal(signal.SIGINT)
    assert driver.stdout is not None
    while "stopping" not in driver.stdout.readline():
        pass
    driver.send_signal(signal.SIGINT)
    _, err = driver.communicate(timeout=30)
    assert driver.returncode == 130
    assert err.strip().splitlines()[-1] == "paceline: interrupted"
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_when_the_driver_is_killed_nobody_stays(tmp_path) -> None:
    driver, children = start_long_run(tmp_path)
    driver.kill()
    driver.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    from paceline.runtime.live.storage import shared_memory

    shared_memory.remove_stale()  # unless another run that began meanwhile has done so already
    assert not list(shared_memory.base_folder().glob(f"{shared_memory.PREFIX}{driver.pid}-*"))
