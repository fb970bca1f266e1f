"""How a run ends for its scripts: `paceline.stop()`, targets, `opt.done`, and a rank that breaks out of its loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import policies, session
from paceline.core.messages import Members
from paceline.function_workers import function_starter
from paceline.run import FINISHED, STOPPED, TARGET, Run
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.runtime.live.protocol.configuration import MultihostOptions
from paceline.runtime.live.system import training_end

POLICIES = ["bsp", "ssp:staleness=2", "waiting:delay_s=0.05", "scheduled", "elastic", "hop:graph=ring", "adpsgd"]


OVER_TCP = {
    "keys": MultihostOptions("127.0.0.1", "", shared_memory=False),
    "open": MultihostOptions("127.0.0.1", "", keys=False, shared_memory=False),
}
"""As on several hosts: nothing is in shared memory."""


def launch(work: Callable[[], None], policy: str, workers: int = 3, servers: int = 2, where: str = "") -> Run:
    """A run in which nothing fails, on one host or over TCP."""
    servers = 0 if policy.startswith(("hop", "adpsgd")) else servers
    plan = RunPlan(
        Members(workers, servers), function_starter(work), policies.parse(policy), care=FaultPolicy(timeout_s=60),
        multihost=OVER_TCP.get(where),
    )  # fmt: skip
    run = Driver(plan).run()
    assert run.failures == []
    assert run.replay() == []
    return run


def make(overlap: bool = False) -> tuple[torch.nn.Module, paceline.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    return model, paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model, overlap=overlap)


def step(model: torch.nn.Module, opt: paceline.Optimizer, took_s: float = 0.002) -> None:
    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = model(torch.randn(4, 3)).pow(2).sum()
        loss.backward()
        return loss

    time.sleep(took_s)
    opt.step(closure)


def until_done(folder: Path, overlap: bool = False) -> None:
    """Leave a file with what stands after the loop: the iteration, and whether the model is whole."""
    model, opt = make(overlap)
    rank = paceline.init().rank
    while not opt.done:
        step(model, opt)
        paceline.log(accuracy=min(1.0, opt.global_step / 40))
    for _ in range(3):
        step(model, opt)  # in vain
    before = [parameter.clone() for parameter in model.parameters()]
    time.sleep(0.2)
    same = all(map(torch.equal, before, model.parameters()))
    finite = all(parameter.isfinite().all() for parameter in model.parameters())
    (folder / f"rank-{rank}").write_text(f"{opt.global_step} {same} {finite} {opt.done}")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_script_that_looks_at_done_goes_on_after_its_loop_when_the_target_is_reached(
    policy: str, tmp_path: Path
) -> None:
    servers = None if policy.startswith(("hop", "adpsgd")) else 1
    run = paceline.launch(
        lambda: until_done(tmp_path), workers=3, servers=servers, policy=policy, target="accuracy=0.5", timeout_s=60
    )
    assert run.failures == []
    assert run.ended == TARGET
    for rank in range(3):
        iteration, *rest = (tmp_path / f"rank-{rank}").read_text().split()
        assert rest == ["True"] * 3
        assert int(iteration) >= 1
    assert run.replay() == []


def test_with_overlap_and_several_servers_too(tmp_path: Path) -> None:
    run = paceline.launch(
        lambda: until_done(tmp_path, overlap=True), workers=2, servers=2, policy="asp", target="accuracy=0.5"
    )
    assert run.failures == []
    assert {path.read_text().split(maxsplit=1)[1] for path in tmp_path.iterdir()} == {"True True True"}


def test_a_script_that_does_not_look_is_ended_by_step(tmp_path: Path) -> None:
    def work() -> None:
        model, opt = make()
        while True:
            step(model, opt)
            paceline.log(accuracy=min(1.0, opt.global_step / 40))
            (tmp_path / f"rank-{paceline.init().rank}").write_text(f"{opt.global_step}")

    run = paceline.launch(work, workers=2, policy="bsp", target="accuracy=0.5", timeout_s=60)
    assert run.failures == []
    assert run.ended == TARGET


@pytest.mark.parametrize("where", ["", *OVER_TCP])
@pytest.mark.parametrize("policy", ["bsp", "asp", "hop:graph=ring", "adpsgd"])
def test_stop_ends_the_run_for_all(policy: str, where: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        model, opt = make()
        while not opt.done:
            step(model, opt)
            if opt.global_step == 10 and paceline.init().rank == 1:
                paceline.stop()
                paceline.stop()
        (tmp_path / f"rank-{paceline.init().rank}").write_text(f"{opt.global_step}")

    run = launch(work, policy, servers=1, where=where)
    assert run.ended == STOPPED
    assert len(list(tmp_path.iterdir())) == 3
    assert (tmp_path / "rank-1").read_text() == "10", "who calls it begins no other iteration"
    said = capfd.readouterr().out
    assert said.count("worker 1 has called paceline.stop() at iteration 10: all end after their current iter") == 1
    assert "has ended at iteration" not in said


def test_stop_before_there_is_a_run_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(paceline.RunFailed):
        paceline.launch(paceline.stop, workers=1)
    assert "paceline.stop() was called before paceline.Optimizer was made" in capfd.readouterr().err


def test_a_worker_that_is_done_sees_no_later_parameters(tmp_path: Path) -> None:
    """Under bsp a server steps one copy for all; the other one hears of the end up to 50 ms later."""

    def work() -> None:
        model, opt = make()
        while not opt.done:
            step(model, opt, took_s=0.0)
            if opt.global_step == 20 and paceline.init().rank == 0:
                paceline.stop()
        before = [parameter.clone() for parameter in model.parameters()]
        time.sleep(0.5)
        assert all(map(torch.equal, before, model.parameters()))
        (tmp_path / f"rank-{paceline.init().rank}").write_text(f"{opt.global_step}")

    run = paceline.launch(work, workers=2, servers=1, policy="bsp", timeout_s=60)
    assert run.failures == []
    assert int((tmp_path / "rank-1").read_text()) > int((tmp_path / "rank-0").read_text()) == 20


def test_loops_over_a_loader_end_with_training(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(64, 3))

    def work() -> None:
        model, opt = make()
        loader = DataLoader(data, batch_size=4, sampler=paceline.Sampler(data))
        batches = 0
        while not opt.done:
            for (batch,) in loader:
                opt.zero_grad()
                model(batch).pow(2).sum().backward()
                opt.step()
                batches += 1
                if opt.global_step == 10:
                    paceline.stop()
        (tmp_path / f"rank-{paceline.init().rank}").write_text(f"{batches - opt.global_step}")

    assert paceline.launch(work, workers=2, policy="bsp", timeout_s=60).failures == []
    assert {int(path.read_text()) for path in tmp_path.iterdir()} <= {0, 1}, "a batch that was half drawn is in vain"


def test_a_loop_that_asks_for_steps_for_ever_is_ended(monkeypatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(training_end, "VAIN_S", 0.2)

    def work() -> None:
        model, opt = make()
        print(opt.done)
        while opt.global_step < 10**9:
            step(model, opt)
            if opt.global_step == 10:
                paceline.stop()

    run = paceline.launch(work, workers=2, policy="bsp", timeout_s=60)
    assert run.failures == []
    assert capfd.readouterr().err.count("the run has ended 0.2 s ago, and the script still trains") == 2


@pytest.fixture
def alone() -> Iterator[None]:
    session.forget()
    yield
    session.forget()


def test_in_a_world_of_one_it_is_the_same(alone: None) -> None:
    model, opt = make()
    data = TensorDataset(torch.zeros(8, 3))
    while not opt.done:
        step(model, opt)
        if opt.global_step == 5:
            paceline.stop()
    step(model, opt)
    assert opt.global_step == 5
    assert list(paceline.Sampler(data)) == []


def test_in_a_world_of_one_step_ends_a_script_that_does_not_look(alone: None) -> None:
    model, opt = make()
    step(model, opt)
    paceline.stop()
    with pytest.raises(SystemExit) as stopped:
        step(model, opt)
    assert stopped.value.code == 0
    assert opt.global_step == 1


@pytest.mark.parametrize("policy", ["bsp", "asp", "hop:graph=ring"])
def test_a_rank_that_breaks_out_early_is_told_of(policy: str, capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        model, opt = make()
        for _ in range((200, 20, 200)[paceline.init().rank]):
            step(model, opt, took_s=0.01)

    run = paceline.launch(work, workers=3, policy=policy, timeout_s=60)
    assert run.ended == FINISHED
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "script of" in line]
    assert line.startswith("the script of worker 1 has ended at iteration 20: 2 others go on without it, at iteration ")


def test_who_goes_on_alone_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        model, opt = make()
        for _ in range((20, 200)[paceline.init().rank]):
            step(model, opt, took_s=0.01)

    paceline.launch(work, workers=2, policy="ssp", timeout_s=60)
    assert "has ended at iteration 20: worker 1 goes on alone" in capfd.readouterr().out


@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_where_all_do_as_much_nothing_is_told(policy: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever is fast has ended long before the others."""

    def work() -> None:
        model, opt = make()
        for _ in range(60):
            step(model, opt, took_s=(0.0, 0.02)[paceline.init().rank])

    paceline.launch(work, workers=2, policy=policy, timeout_s=60)
    assert "script of" not in capfd.readouterr().out
