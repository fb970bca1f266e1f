"""The front door in a live run: what people do with optimizers besides calling `step`."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import paceline
from tests.reference import largest_difference


def tiny(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def batch(step: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def test_gradient_accumulation_and_clipping_without_a_closure() -> None:
    def train(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        for step in range(5):
            opt.zero_grad()
            for part in batch(step).chunk(2):
                (model(part).pow(2).sum() / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()

    def work() -> None:
        model = tiny()
        train(model, paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model))

    run = paceline.launch(work, workers=2, servers=2, policy="bsp")
    alone = tiny()
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1))
    assert run.failures == []
    assert largest_difference(run.parameters, dict(alone.named_parameters())) < 1e-5


def test_parameter_groups_keep_their_own_hyper_parameters() -> None:
    def groups(model: nn.Module) -> list[dict]:
        return [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters(), "weight_decay": 0.1}]

    def train(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        for step in range(5):
            opt.zero_grad()
            model(batch(step)).pow(2).sum().backward()
            opt.step()

    def work() -> None:
        model = tiny()
        train(model, paceline.Optimizer(torch.optim.SGD(groups(model), lr=0.01, momentum=0.9), model=model))

    run = paceline.launch(work, workers=2, servers=3, policy="bsp")
    alone = tiny()
    train(alone, torch.optim.SGD(groups(alone), lr=0.01, momentum=0.9))
    assert largest_difference(run.parameters, dict(alone.named_parameters())) < 1e-5


def test_a_tensor_without_a_gradient_is_left_alone() -> None:
    def train(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        for step in range(6):
            opt.zero_grad()
            model[0](batch(step)).pow(2).sum().backward() if step % 2 else model(batch(step)).pow(2).sum().backward()
            opt.step()

    def work() -> None:
        model = tiny()
        train(model, paceline.Optimizer(torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.1), model=model))

    run = paceline.launch(work, workers=2, servers=2, policy="bsp")
    alone = tiny()
    train(alone, torch.optim.Adam(alone.parameters(), lr=0.1, weight_decay=0.1))
    assert largest_difference(run.parameters, dict(alone.named_parameters())) < 1e-5


def test_frozen_parameters_and_buffers_start_as_worker_0_has_them() -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        model[0].requires_grad_(False)
        model[1].running_mean += seed
        return model

    def work() -> None:
        rank = paceline.init().rank
        model = make(seed=rank)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        assert torch.equal(model[0].weight, make(0)[0].weight)
        assert torch.equal(model[1].running_mean, make(0)[1].running_mean)
        for step in range(3):
            opt.zero_grad()
            model(batch(step, rank)).pow(2).sum().backward()
            opt.step()

    run = paceline.launch(work, workers=3, servers=2, policy="bsp")
    assert run.failures == []
    assert set(run.parameters) == {"1.weight", "1.bias", "2.weight", "2.bias"}
    means = []
    for rank in range(3):
        model = make(0)
        for step in range(3):
            model(batch(step, rank))
        means.append(model[1].running_mean)
    whole = run.model()
    assert set(whole) == set(make(0).state_dict())
    assert torch.allclose(whole["1.running_mean"], torch.stack(means).mean(0), atol=1e-6)
    assert whole["1.num_batches_tracked"].item() == 3
    make(1).load_state_dict(whole)


def test_tied_weights_are_saved_under_both_names(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(3, 3, bias=False)
            self.out = nn.Linear(3, 3, bias=False)
            self.out.weight = self.into.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.into(x))

    def work() -> None:
        torch.manual_seed(0)
        model = Tied()
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
        for step in range(3):
            opt.zero_grad()
            model(batch(step)).pow(2).sum().backward()
            opt.step()

    run = paceline.launch(work, workers=2, policy="asp")
    assert run.failures == []
    model = Tied()
    model.load_state_dict(run.model())
    assert torch.equal(model.into.weight, run.parameters["into.weight"])


@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_a_scaler_that_finds_inf_skips_the_step_and_nobody_waits(policy: str) -> None:
    def work() -> None:
        rank = paceline.init().rank
        model = tiny()
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(5):
            opt.zero_grad()
            loss = model(batch(step)).pow(2).sum()
            if rank == 1 and step == 2:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(opt)
            assert opt.step_was_dropped == (rank == 1 and step == 2)
            scaler.update()
        assert scaler.get_scale() == (4.0 if rank == 1 else 8.0)

    run = paceline.launch(work, workers=2, servers=2, policy=policy, timeout_s=60)
    assert run.failures == []
    assert all(torch.isfinite(value).all() for value in run.parameters.values())
    if policy == "bsp":
        alone = tiny()
        opt = torch.optim.SGD(alone.parameters(), lr=0.1)
        for step in range(5):
            opt.zero_grad()
            alone(batch(step)).pow(2).sum().backward()
            opt.step()
        assert largest_difference(run.parameters, dict(alone.named_parameters())) < 1e-5


def test_skip_step_counts_as_progress() -> None:
    def work() -> None:
        model = tiny()
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        for step in range(6):
            if paceline.init().rank == 0 and step < 4:
                opt.skip_step()
                assert opt.step_was_dropped
            else:
                opt.zero_grad()
                model(batch(step)).pow(2).sum().backward()
                opt.step()
        assert opt.global_step == 6

    run = paceline.launch(work, workers=2, servers=2, policy="bsp", timeout_s=60)
    assert run.failures == []
    assert run.metrics.updates == 6


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_the_state_comes_from_the_servers_and_goes_back_to_them(name: str, tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        more = {"momentum": 0.9} if name == "SGD" else {}
        return getattr(torch.optim, name)(model.parameters(), lr=0.05, **more)

    def steps(model: nn.Module, opt: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            opt.zero_grad()
            model(batch(step)).pow(2).sum().backward()
            opt.step()

    def work() -> None:
        model = tiny()
        opt = paceline.Optimizer(make(model), model=model)
        steps(model, opt, 0, 4)
        if paceline.init().rank == 0:
            torch.save({"model": copy.deepcopy(model.state_dict()), "opt": opt.state_dict()}, tmp_path / "saved")
        steps(model, opt, 4, 5)

    def go_on() -> None:
        saved = torch.load(tmp_path / "saved")
        model = tiny(seed=9)
        model.load_state_dict(saved["model"])
        inner = make(model)
        inner.load_state_dict(saved["opt"])
        steps(model, paceline.Optimizer(inner, model=model), 4, 8)

    alone = tiny()
    opt = make(alone)
    steps(alone, opt, 0, 4)
    paceline.launch(work, workers=2, servers=3, policy="bsp")
    saved = torch.load(tmp_path / "saved")["opt"]["state"]
    for index, state in opt.state_dict()["state"].items():
        assert state.keys() == saved[index].keys()
        for key, value in state.items():
            assert torch.allclose(torch.as_tensor(value), saved[index][key], atol=1e-6), key
    run = paceline.launch(go_on, workers=2, servers=2, policy="bsp")
    steps(alone, opt, 4, 8)
    assert largest_difference(run.parameters, dict(alone.named_parameters())) < 1e-5


def test_loading_state_after_wrapping_says_what_to_do(capfd) -> None:
    def work() -> None:
        model = tiny()
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        opt.load_state_dict({})

    run = paceline.launch(work, workers=1)
    assert run.failures
    assert "load it into the torch optimizer, then wrap that" in capfd.readouterr().err


@pytest.mark.parametrize("policy", ["asp", "hop:graph=ring", "alone"])
@pytest.mark.parametrize("whose", ["ours", "inner", "all", "ours and all"])
def test_hooks_of_steps_are_called_once_for_each(whose: str, policy: str) -> None:
    """Whoever takes the step: a server, or the inner optimizer."""

    def work() -> None:
        model, seen = tiny(), []
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        if whose == "inner":
            inner.register_step_pre_hook(lambda *_: seen.append("before"))
        opt = paceline.Optimizer(inner, model=model)
        if whose == "inner":
            inner.register_step_post_hook(lambda *_: seen.append("after"))
        if whose.startswith("ours"):
            opt.register_step_pre_hook(lambda *_: seen.append("before"))
            opt.register_step_post_hook(lambda *_: seen.append("after"))
        handles = []
        if whose.endswith("all"):
            handles.append(register_optimizer_step_pre_hook(lambda *_: seen.append("before all")))
            handles.append(register_optimizer_step_post_hook(lambda *_: seen.append("after all")))
        for step in range(3):
            opt.zero_grad()
            model(batch(step)).pow(2).sum().backward()
            opt.step()
        for handle in handles:
            handle.remove()
        mine = ["before", "after"] if whose != "all" else []
        every = ["before all", *mine, "after all"] if whose.endswith("all") else mine
        assert seen == every * 3

    if policy == "alone":
        work()
    else:
        assert paceline.launch(work, workers=2, policy=policy).failures == []


def test_a_profile_shows_the_steps() -> None:
    def work() -> None:
        model = tiny()
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        model(batch(0)).pow(2).sum().backward()
        opt.step()
        with torch.profiler.profile() as profile:
            opt.step()
        assert "Optimizer.step#Optimizer.step" in {event.key for event in profile.key_averages()}

    assert paceline.launch(work, workers=1).failures == []


def test_an_average_of_the_weights_gradient_checkpointing_and_freezing_in_the_middle() -> None:
    """What scripts do around a model: under bsp all is as in one process."""

    def train(model: nn.Module, opt: torch.optim.Optimizer) -> torch.Tensor:
        average = torch.optim.swa_utils.AveragedModel(model)
        for step in range(8):
            model[0].requires_grad_(step not in (2, 3, 4))
            opt.zero_grad()
            hidden = torch.utils.checkpoint.checkpoint(model[0], batch(step).requires_grad_(), use_reentrant=False)
            model[2](model[1](hidden)).pow(2).sum().backward()
            opt.step()
            average.update_parameters(model)
        return torch.stack([each.sum() for each in average.module.parameters()]).sum()

    def work() -> None:
        model = tiny()
        opt = paceline.Optimizer(torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.1), model=model)
        paceline.log(average=train(model, opt))

    run = paceline.launch(work, workers=2, servers=2, policy="bsp")
    alone = tiny()
    averaged = train(alone, torch.optim.Adam(alone.parameters(), lr=0.1, weight_decay=0.1))
    assert run.failures == []
    assert largest_difference(run.parameters, dict(alone.named_parameters())) < 1e-5
    assert all(abs(point.values["average"] - averaged.item()) < 1e-4 for point in run.history)
