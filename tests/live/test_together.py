"""Pushes that have come together: stepped on in one pass, and nobody can tell."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import paceline
from paceline import policies, session
from paceline.core.messages import Members
from paceline.runtime.live.driver.children import function_starter
from paceline.runtime.live.driver.launch import Driver, LivePlan
from paceline.runtime.live.driver.watching import Care
from paceline.runtime.live.server import together
from paceline.runtime.live.server.together import Together
from paceline.tensors.optimizers import SliceOptimizer

WORKERS, STEPS = 4, 30


def run(policy: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **sgd: float) -> tuple[torch.Tensor, list[int]]:
    """Gradients are ones, and after each step a worker's model must be what its version says. How many steps were taken
    together each time; a server that is slow has several pushes waiting."""
    monkeypatch.setattr(together, "WORTH_IT", 0)
    catch_up, apply, seen = Together.catch_up, SliceOptimizer.apply, folder / "seen"
    seen.write_text("")

    def note(self: Together) -> None:
        if self.steps:
            with seen.open("a") as file:
                file.write(f"{len(self.steps)}\n")
        catch_up(self)

    def apply_slowly(self: SliceOptimizer, *arguments: object, **more: object) -> None:
        time.sleep(0.002)
        apply(self, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Together, "catch_up", note)
    monkeypatch.setattr(SliceOptimizer, "apply", apply_slowly)

    def work() -> None:
        parameter = torch.nn.Parameter(torch.zeros(1000))
        opt = paceline.Optimizer(torch.optim.SGD([parameter], lr=0.5, **sgd))
        live = session.init().live
        assert live is not None
        assert live.has_servers
        for _ in range(STEPS):
            parameter.grad = torch.ones(1000)
            opt.step()
            if not sgd:
                expected = -live.machine.versions[0] * 0.5 / WORKERS
                assert parameter.eq(expected).all(), (parameter.min(), parameter.max(), expected)
        (folder / f"done-{live.rank}").touch()
        while len(list(folder.glob("done-*"))) < WORKERS:  # a gradient weighs more once somebody has left
            time.sleep(0.01)

    plan = LivePlan(Members(WORKERS, 1), function_starter(work), policies.parse(policy), care=Care(timeout_s=60))
    (values,) = Driver(plan).run().parameters.values()
    return values, [int(line) for line in seen.read_text().split()]


@pytest.mark.parametrize("policy", ["asp", "ssp:staleness=1", "waiting:delay_s=0.001"])
def test_each_worker_gets_the_values_after_its_own_step(policy: str, tmp_path: Path, monkeypatch) -> None:
    values, seen = run(policy, tmp_path, monkeypatch)
    assert values.eq(-WORKERS * STEPS * 0.5 / WORKERS).all()
    assert max(seen) > 1, "none were taken together"
    assert max(seen) <= together.MOST


def test_with_momentum_each_is_taken_by_itself(tmp_path: Path, monkeypatch) -> None:
    values, seen = run("asp", tmp_path, monkeypatch, momentum=0.9)
    assert not seen
    assert values.lt(-STEPS * 0.5).all()
