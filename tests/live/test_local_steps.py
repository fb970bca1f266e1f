"""Local steps live: rounds equal plain loops of model averaging and DiLoCo; what belongs to a step, what to a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import paceline
from paceline import policies, session
from paceline.cluster import Fault, load
from paceline.core.actions import Apply
from paceline.core.events import GradientReady
from paceline.core.local_steps import LocalSteps, make
from paceline.core.messages import Members
from paceline.errors import ConfigError
from paceline.function_workers import function_starter
from paceline.policies import with_local_steps
from paceline.run import Run
from paceline.runtime.live.driver.checkpointing import CheckpointOptions
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.testing.samples import RecordedSampler, lost
from tests.live.test_run_end import OVER_TCP
from tests.reference import largest_difference

WORKERS, STEPS, ROUNDS, BATCH = 3, 4, 10, 4
AVERAGE, NESTEROV = "average", "nesterov(lr=0.7,momentum=0.9)"


def dataset() -> tuple[Tensor, Tensor]:
    x = torch.randn(WORKERS * STEPS * ROUNDS * BATCH, 5, generator=torch.Generator().manual_seed(1)).double()
    return x, x.sum(1, keepdim=True).sin()


def model_of(norm: bool = False) -> nn.Module:
    torch.manual_seed(3)
    middle = nn.BatchNorm1d(6) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(5, 6), middle, nn.Linear(6, 1)).double()


def inner_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def backward(model: nn.Module, rank: int, step: int) -> None:
    x, y = dataset()
    at = (step * WORKERS + rank) % (len(x) // BATCH) * BATCH
    nn.functional.mse_loss(model(x[at : at + BATCH]), y[at : at + BATCH]).backward()


def train(steps: int = STEPS * ROUNDS, norm: bool = False, **given) -> None:
    model = model_of(norm)
    opt = paceline.Optimizer(inner_of(model), model=model, **given)
    rank = paceline.init().rank
    while opt.global_step < steps:
        step = opt.global_step
        opt.zero_grad()
        backward(model, rank, step)
        opt.step()
        assert opt.global_step == step + 1


def run_of(work: Callable[[], object], policy: str, local: LocalSteps | None = None, servers: int = 1, **more) -> Run:
    """A run in which nothing fails."""
    chosen, within = with_local_steps.parse(policy)
    given = {"care": FaultPolicy(timeout_s=60), **more}
    members = Members(WORKERS, 0 if policy.startswith("hop") else servers)
    run = Driver(
        RunPlan(members, function_starter(work), chosen, local_steps=local or within, **given), say=lambda line: None
    ).run()
    assert run.replay() == []
    return run


def rounds_of(run: Run) -> list[GradientReady]:
    return [record.event for record in run.trace if isinstance(record.event, GradientReady)]


def parameters_of(models: list[nn.Module]) -> list[list[Tensor]]:
    """For each parameter, what it is in each model."""
    return [list(each) for each in zip(*(model.parameters() for model in models), strict=True)]


def local_round(models: list[nn.Module], inner: list[torch.optim.Optimizer], number: int) -> None:
    for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
        for step in range(number * STEPS, (number + 1) * STEPS):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()


def averaging() -> dict[str, Tensor]:
    """Local SGD: after each round every model becomes the mean of all."""
    models = [model_of() for _ in range(WORKERS)]
    inner = [inner_of(model) for model in models]
    for number in range(ROUNDS):
        local_round(models, inner, number)
        with torch.no_grad():
            for parameters in parameters_of(models):
                mean = torch.stack(parameters).mean(0)
                for parameter in parameters:
                    parameter.copy_(mean)
    return {name: value.detach() for name, value in models[0].named_parameters()}


def diloco() -> dict[str, Tensor]:
    """DiLoCo: Nesterov momentum on the mean of what the models have moved by."""
    models = [model_of() for _ in range(WORKERS)]
    inner = [inner_of(model) for model in models]
    anchor = [parameter.detach().clone() for parameter in models[0].parameters()]
    outer = torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True)
    for number in range(ROUNDS):
        local_round(models, inner, number)
        with torch.no_grad():
            for mine, parameters in zip(anchor, parameters_of(models), strict=True):
                mine.grad = mine - torch.stack(parameters).mean(0)
            outer.step()
            for mine, parameters in zip(anchor, parameters_of(models), strict=True):
                for parameter in parameters:
                    parameter.copy_(mine)
    return {name: mine for (name, _), mine in zip(models[0].named_parameters(), anchor, strict=True)}


@pytest.mark.parametrize(
    ("outer", "where", "servers"),
    [(AVERAGE, "", 1), (NESTEROV, "", 2), (AVERAGE, "open", 2), (NESTEROV, "keys", 1)],
)
def test_bsp_equals_a_loop_of_averaging_or_diloco(outer: str, where: str, servers: int) -> None:
    work = partial(train, local_steps=STEPS, outer=outer)
    run = run_of(work, "bsp", servers=servers, multihost=OVER_TCP.get(where))
    assert largest_difference(run.parameters, averaging() if outer == AVERAGE else diloco()) < 1e-9
    assert [event.steps for event in rounds_of(run)] == [STEPS] * ROUNDS * WORKERS


def test_hop_adds_what_a_round_has_moved_by_to_the_average() -> None:
    run = run_of(partial(train, 3 * STEPS, local_steps=STEPS, outer=AVERAGE), "hop:graph=complete")
    models = [model_of() for _ in range(WORKERS)]
    inner = [inner_of(model) for model in models]
    for number in range(3):
        begun = [[each.detach().clone() for each in parameters] for parameters in parameters_of(models)]
        local_round(models, inner, number)
        with torch.no_grad():
            for before, after in zip(begun, parameters_of(models), strict=True):
                mean = torch.stack(before).mean(0)
                for first, last in zip(before, after, strict=True):
                    last.copy_(mean + (last - first))
    expected = {
        name: torch.stack([dict(model.named_parameters())[name].detach() for model in models]).mean(0)
        for name in run.parameters
    }
    assert largest_difference(run.parameters, expected) < 1e-9


def test_a_world_of_one_trains_as_a_run_of_one_worker() -> None:
    model = model_of()
    opt = paceline.Optimizer(inner_of(model), local_steps=STEPS, outer=NESTEROV)
    for step in range(STEPS * 3):
        assert (opt.global_step, opt.at_round_end) == (step, step % STEPS == 0)
        opt.zero_grad()
        backward(model, 0, step)
        opt.step()
    work = partial(train, STEPS * 3, local_steps=STEPS, outer=NESTEROV)
    run = paceline.launch(work, workers=1, policy="bsp")
    assert largest_difference(run.parameters, {n: p.detach() for n, p in model.named_parameters()}) < 1e-9


def test_steps_that_are_skipped_or_not_finite_count_and_change_nothing() -> None:
    def work() -> None:
        model = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), local_steps=4, outer=AVERAGE)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        for value in (1.0, float("nan"), 2.0, None):
            opt.zero_grad()
            if value is None:
                opt.skip_step()
            else:
                model.weight.grad = torch.full_like(model.weight, value)
                opt.step()
            scheduler.step()
        assert opt.global_step == 4
        # The rates were 1, 0.5 and 0.25.
        assert torch.equal(model.weight, torch.full((1, 2), -1.0 - 0.25 * 2.0)), model.weight
        for _ in range(4):
            opt.skip_step()
        assert torch.equal(model.weight, torch.full((1, 2), -1.5))

    run = run_of(work, "bsp")
    assert [event.weight for event in rounds_of(run)[:WORKERS]] == [2.0] * WORKERS


def test_a_round_weighs_its_samples_and_is_handed_in_at_a_barrier_and_at_the_end() -> None:
    def work() -> None:
        model = nn.Linear(1, 1, bias=False).double()
        with torch.no_grad():
            model.weight.zero_()
        rank = paceline.init().rank
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), local_steps=100, outer=AVERAGE)

        def move(by: float, weight: float) -> None:
            model.weight.grad = torch.full_like(model.weight, -by)
            opt.step(weight=weight)

        move(rank, 1 + rank)
        paceline.barrier()
        assert model.weight.item() == pytest.approx((0 * 1 + 1 * 2 + 2 * 3) / 6)
        assert opt.at_round_end
        for _ in range(1 + rank):
            move(1.0, 1.0)

    run = run_of(work, "bsp")
    (weight,) = run.parameters.values()
    assert weight.item() == pytest.approx(8 / 6 + (1 * 1 + 2 * 2 + 3 * 3) / 6)
    assert sorted(event.steps for event in rounds_of(run)) == [1, 1, 1, 1, 2, 3]


@pytest.mark.parametrize("outer", [AVERAGE, NESTEROV])
def test_buffers_of_floats_are_averaged_with_each_round(outer: str) -> None:
    def work() -> None:
        model = model_of(norm=True)
        opt = paceline.Optimizer(inner_of(model), model=model, local_steps=2, outer=outer)
        for step in range(2):
            opt.zero_grad()
            backward(model, paceline.init().rank, step)
            opt.step()
        buffers = dict(model.named_buffers())
        assert int(buffers["1.num_batches_tracked"]) == 2
        paceline.log(**{f"mean{index}": float(value) for index, value in enumerate(buffers["1.running_mean"])})

    run = run_of(work, "bsp")
    models = [model_of(norm=True) for _ in range(WORKERS)]
    for rank, model in enumerate(models):
        inner = inner_of(model)
        for step in range(2):
            inner.zero_grad()
            backward(model, rank, step)
            inner.step()
    for name in ("1.running_mean", "1.running_var"):
        mean = torch.stack([dict(model.named_buffers())[name] for model in models]).mean(0)
        assert torch.allclose(run.model()[name], mean, atol=1e-12)
        if name == "1.running_mean":
            assert all(point.values["mean0"] == pytest.approx(float(mean[0])) for point in run.history)
    assert int(run.model()["1.num_batches_tracked"]) == 2


def sampled(folder: Path, steps: int, local: dict[str, object]) -> None:
    """Train on recorded samples."""
    model = model_of()
    x, y = dataset()
    sampler = RecordedSampler(x, folder)
    loader = DataLoader(range(len(x)), 5, sampler=sampler)
    opt = paceline.Optimizer(inner_of(model), model=model, **local)
    taken = 0
    while taken < steps:
        for batch in loader:
            opt.zero_grad()
            nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
            opt.step()
            sampler.used(batch.tolist(), not opt.step_was_dropped, opt.at_round_end)
            taken += 1
            if taken == steps:
                break


@pytest.mark.parametrize("policy", ["bsp", pytest.param("asp", marks=pytest.mark.ci), "backup:extra=1"])
def test_a_worker_that_dies_in_a_round_loses_that_round_and_no_sample(policy: str, tmp_path: Path) -> None:
    """Rounds of seven steps go across the borders of epochs, which have eight steps of each worker."""
    faults = (Fault("restart", 1, at_iteration=2),)
    work = partial(sampled, tmp_path, 56, {"local_steps": 7})
    driver = Driver(
        RunPlan(
            Members(WORKERS, 2), function_starter(work), policies.parse(policy),
            replace(load("steady:compute_s=0.001"), faults=faults), care=FaultPolicy(restarts=2, timeout_s=60),
        ),
        say=lambda line: None,
    )  # fmt: skip
    run = driver.run()
    assert run.replay() == []
    (table,) = driver.parts.sample_dispatchers.dispatches.values()
    assert table.finished()
    assert lost(tmp_path, table) == {}
    applied = [handle for record in run.trace for action in record.actions for handle in handles_of(action)]
    assert len(applied) == 2 * len(set(applied)), "each round counts once on each of two servers"


def handles_of(action: object) -> list[tuple[int, int, int]]:
    handles = action.handles if isinstance(action, Apply) else ()
    return [(handle.source, handle.incarnation, handle.iteration) for handle in handles]


@pytest.mark.parametrize(
    ("policy", "local"),
    [
        ("asp", make("auto(at_least=2,at_most=8)")),
        ("bsp", make("auto(at_least=2,at_most=8)")),
        ("ssp:staleness=1", make(every_s=0.02)),
        ("hop:graph=ring", make("auto(at_least=2,at_most=8)")),
        *(
            pytest.param(policy, make(4), marks=pytest.mark.ci)
            for policy in (
                "dssp:low=1,high=3", "pssp:staleness=1", "backup:extra=1", "deadline", "waiting:delay_s=0.01,base=bsp",
                "bsp@0,ssp:staleness=1@3", "bsp+asp", "hop:graph=complete,notify_ack=true",
            )
        ),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("where", ["", pytest.param("open", marks=pytest.mark.ci)])
def test_every_policy_takes_rounds(policy: str, local: LocalSteps, where: str) -> None:
    scenario = None if where else load("random-slowdown:factor=3,compute_s=0.003")
    run = run_of(partial(train, 40), policy, local, servers=2, cluster=scenario, multihost=OVER_TCP.get(where))
    assert run.failures == []
    events = rounds_of(run)
    assert (WORKERS - 1) * 40 <= sum(event.steps for event in events) <= WORKERS * 40  # who begins late does less
    if local.rule == "auto":
        assert max(event.steps for event in events) <= 8
        assert {event.steps for event in events if event.iteration == 1} != {2}, "rounds follow a plan"
    assert str(local) in run.policy


@pytest.mark.parametrize(
    ("policy", "given", "said"),
    [
        ("elastic", {"local_steps": 4}, "bsp with local_steps=auto"),
        ("specsync", {"local_steps": 4}, "begun again"),
        ("adpsgd", {"local_steps": 4}, "in the middle of a round"),
        ("bsp", {"local_steps": 4, "overlap": True}, "overlap=True"),
        ("bsp", {"local_steps": 4, "options": "clip_mean=1"}, "outer=nesterov(clip_mean=1)"),
        ("bsp", {"outer": "average"}, "is for local steps"),
    ],
)
def test_what_cannot_be_together_is_refused_in_one_line(policy: str, given: dict[str, object], said: str) -> None:
    model = model_of()
    with pytest.raises(ConfigError) as refused:
        paceline.Optimizer(inner_of(model), policy, **given)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_resumed_run_goes_on_with_the_inner_state(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With momentum inside and outside, stopped and resumed at the end of a round: as if it had not been stopped."""

    def trained(steps: int, options: CheckpointOptions) -> Run:
        work = partial(train, steps, local_steps=STEPS, outer=NESTEROV)
        return run_of(work, "bsp", servers=2, checkpointing=options)

    trained(5 * STEPS, CheckpointOptions(tmp_path / "run"))
    run = trained(ROUNDS * STEPS, CheckpointOptions(tmp_path / "run", resume=True))
    assert largest_difference(run.parameters, diloco()) < 1e-9
    assert "begins afresh" not in capfd.readouterr().err
    for path in (tmp_path / "run" / "inner-states").iterdir():
        path.write_bytes(b"nonsense")
    trained((ROUNDS + 1) * STEPS, CheckpointOptions(tmp_path / "run", resume=True))
    said = capfd.readouterr().err
    assert said.count("its inner optimizer begins afresh") == WORKERS
    assert session.world().run is None
