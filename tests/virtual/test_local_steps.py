"""Local steps in virtual time: they equal plain loops of model averaging and of DiLoCo, and run under every policy."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import paceline
from paceline import cluster, workloads
from paceline.bench import local_rounds
from paceline.cluster import Fault
from paceline.core.actions import Compute
from paceline.core.events import GradientReady
from paceline.core.messages import Members, Node
from paceline.errors import ConfigError
from paceline.policies.with_local_steps import parse
from paceline.report.metrics import measure
from paceline.run import Run
from paceline.runtime.virtual.backend import Backend
from paceline.runtime.virtual.simulation import Simulation
from paceline.runtime.virtual.world import SimulationPlan
from paceline.sample_order import SampleOrder
from paceline.tensors import optimizers
from paceline.tensors.nesterov import Nesterov
from paceline.workloads.base import in_dtype
from tests.reference import largest_difference

WORKERS, ROUNDS, STEPS = 4, 10, 5
BATCHES = (8, 16, 24, 32)


def diloco_by_hand(
    inner: str, nesterov: tuple[float, float] | None, batch: int | tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """DiLoCo, or without an outer Nesterov model averaging, weighted by samples."""
    workload = workloads.load("digits-mlp")
    model = workload.module(0, torch.float64)
    copies = [copy.deepcopy(model) for _ in range(WORKERS)]
    steppers = [optimizers.parse(inner).build([list(each.parameters())]) for each in copies]
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    if nesterov is not None:
        outer = torch.optim.SGD(model.parameters(), *nesterov, nesterov=True)
    order = SampleOrder(len(workload.train[0]), WORKERS, batch, 0)
    sizes = (batch,) * WORKERS if isinstance(batch, int) else batch
    x, y = (in_dtype(tensor, torch.float64) for tensor in workload.train)
    for turn in range(ROUNDS):
        for rank, (each, stepper) in enumerate(zip(copies, steppers, strict=True)):
            each.load_state_dict(model.state_dict())
            for step in range(turn * STEPS, (turn + 1) * STEPS):
                samples = torch.from_numpy(order.of_worker(rank, step))
                stepper.zero_grad()
                workload.loss(each(x[samples]), y[samples]).backward()
                stepper.step()
        for place, value in enumerate(model.parameters()):
            ends = [list(each.parameters())[place].detach() for each in copies]
            value.grad = sum(size * (value.detach() - end) for size, end in zip(sizes, ends, strict=True)) / sum(sizes)
        outer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def train(policy: str, **given: object) -> Run:
    options = {"workers": WORKERS, "iterations": ROUNDS * STEPS, "dtype": "float64"} | given
    return paceline.simulate("digits-mlp", policy, **options)  # type: ignore[arg-type]


MOMENTUM, ADAM = "sgd:lr=0.1,momentum=0.9", "adam:lr=0.01"
CASES = [
    (MOMENTUM, None, BATCHES),
    (ADAM, (0.7, 0.9), 16),
    pytest.param(ADAM, (0.7, 0.9), BATCHES, marks=pytest.mark.ci),
    pytest.param(MOMENTUM, (0.7, 0.9), BATCHES, marks=pytest.mark.ci),
    pytest.param(MOMENTUM, None, 16, marks=pytest.mark.ci),
]


@pytest.mark.parametrize(("inner", "nesterov", "batch"), CASES)
def test_bsp_is_model_averaging_and_diloco(inner, nesterov, batch) -> None:
    by_hand = diloco_by_hand(inner, nesterov, batch)
    outer = "average" if nesterov is None else None
    run = train("bsp", local_steps=STEPS, outer=outer, optimizer=inner, batch=batch, servers=3)
    assert largest_difference(run.parameters, by_hand) < 1e-9
    assert run.metrics.local_steps == WORKERS * ROUNDS * STEPS
    assert not run.replay()


def test_peers_that_all_average_are_model_averaging() -> None:
    by_hand = diloco_by_hand("sgd:lr=0.1", None, 16)
    run = train("hop:graph=complete,order=serial", local_steps=STEPS, optimizer="sgd:lr=0.1", batch=16)
    assert largest_difference(run.parameters, by_hand) < 1e-9


def test_what_acts_on_local_steps_and_what_on_rounds() -> None:
    clipped = train("bsp:local_steps=5", optimizer="sgd:lr=0.1,clip=0.1,ema=0.5")
    assert clipped.average, "the servers keep the moving average"
    free = train("bsp:local_steps=5", optimizer="sgd:lr=0.1")
    assert largest_difference(clipped.parameters, free.parameters) > 1e-3
    with pytest.raises(ConfigError, match="clip_mean=1 bounds the mean of gradients"):
        train("bsp:local_steps=5", optimizer="sgd:lr=0.1,clip_mean=1")


POLICIES = [
    "bsp",
    "asp",
    "ssp:staleness=2",
    "dssp",
    "pssp",
    "backup:extra=1",
    "deadline",
    "hop",
    "waiting",
    "bsp@0,asp@3",
]


RULES = [
    {"local_steps": "auto(at_least=3,at_most=12)"},
    pytest.param({"local_steps": 6}, marks=pytest.mark.ci),
    pytest.param({"every_s": 0.5}, marks=pytest.mark.ci),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("local", RULES)
def test_rounds_under_every_policy_and_with_losses(policy, local) -> None:
    faults = (
        Fault("crash", 1, at_iteration=2),
        Fault("restart", 2, at_s=1.3, for_s=0.4),
        Fault("pause", 0, 2.0, None, 3.0),
    )
    run = train(policy, **local, cluster=replace(cluster.load("lognormal:sigma=0.5"), faults=faults), iterations=40)
    assert not run.replay()
    assert run.metrics.local_steps >= 3 * 40
    steps = [record.event.steps for record in run.trace if isinstance(record.event, GradientReady)]
    assert sum(steps) == run.metrics.local_steps
    assert local != {"local_steps": 6} or max(steps) == 6


def simulate(policy: str, local: str, scenario: str, iterations: int, backend: Backend | None = None) -> Simulation:
    """Simulates rounds without tensors."""
    chosen, members = parse(policy, local), Members(WORKERS, 1)
    options = {"checked": True, "goodbyes": True, "local": chosen.local}
    plan = SimulationPlan(chosen.policy, cluster.load(scenario), members, iterations, **options)
    simulation = Simulation(plan, backend)
    simulation.run()
    return simulation


def test_time_goes_as_without_tensors() -> None:
    run = train("ssp:staleness=2", local_steps="auto", cluster="lognormal:sigma=0.5", iterations=100)
    backend = Backend(run.trace.header.slice_bytes)
    alone = simulate("ssp:staleness=2", "auto", "lognormal:sigma=0.5", 100, backend)
    assert alone.engine.now == run.time_s
    computed = [
        [r.event.steps for r in each if isinstance(r.event, GradientReady)] for each in (run.trace, alone.trace)
    ]
    assert computed[0] == computed[1]


def test_a_round_takes_what_its_steps_take() -> None:
    simulation = simulate("asp", "3", "lognormal:sigma=0.5", 9)
    mine = [record for record in simulation.trace if record.node == Node("worker", 0)]
    begun = [record.event.at for record in mine if any(isinstance(action, Compute) for action in record.actions)]
    ended = [record.event.at for record in mine if isinstance(record.event, GradientReady)]
    draw = simulation.plan.cluster.durations(0, WORKERS, 0)
    taken = [end - begin for begin, end in zip(begun, ended, strict=False)]
    assert taken == pytest.approx([sum(draw() for _ in range(3)) for _ in range(3)])


def test_auto_waits_least() -> None:
    waited = {}
    for local in ("auto", "32", "proportional"):
        simulation = simulate("bsp", local, "factors:by_worker=1:1.2:1.7:2.1", 1000)
        waited[local] = measure(simulation.trace).wait_share
    assert waited["auto"] < 0.7 * waited["proportional"], waited
    assert waited["proportional"] < 0.5 * waited["32"], waited


def test_delayed_nesterov_is_that_of_the_paper() -> None:
    x, lr, momentum, pushes = torch.tensor([2.0, -1.0], dtype=torch.float64), 0.5, 0.8, 4
    here = x.clone()
    optimizer = Nesterov([here], lr, momentum)
    buffer, since, draws = torch.zeros(2, dtype=torch.float64), [], torch.Generator().manual_seed(1)
    for push in range(1, 3 * pushes + 1):
        gradient = torch.randn(2, generator=draws, dtype=torch.float64)
        optimizer.param_groups[0]["weight"] = 1 / pushes
        here.grad = gradient.clone()
        optimizer.step()
        x -= lr / pushes * gradient
        since.append(gradient)
        if push % pushes == 0:
            buffer = momentum * buffer + torch.stack(since).mean(0)
            x -= lr * momentum * buffer
            since = []
        assert torch.allclose(here, x, rtol=0, atol=1e-12)


def test_a_whole_step_is_torchs() -> None:
    ours, theirs = torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    steppers = Nesterov([ours], 0.7, 0.9), torch.optim.SGD([theirs], 0.7, 0.9, nesterov=True)
    for step in range(5):
        ours.grad = theirs.grad = torch.full((3,), 1.0 + step, dtype=torch.float64)
        for stepper in steppers:
            stepper.step()
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


def test_the_benchmark_says_why_a_plan_waits_no_less() -> None:
    setting = local_rounds.Setting(8, 600, (0,), "digits-mlp", target="")
    scenarios, said = ["factors:by_worker=1:2:4:8", "steady"], []
    rows = local_rounds.run(setting, scenarios, ["32", local_rounds.BY_TIME, "auto"], said.append)
    fixed, by_time, bound, *_, alike = rows
    assert (len(rows), len(said)) == (6, 6)
    assert by_time.waiting < bound.waiting < fixed.waiting
    assert "the bounds leave no choice" in bound.why
    assert "all are as fast as each other" in alike.why
    assert fixed.steps == 32
    assert fixed.time_to_target_s is None


def test_a_round_weighs_the_samples_of_all_its_steps() -> None:
    """Also where rounds differ in length, as with auto on workers of unequal speed."""
    run = paceline.simulate(
        "digits-mlp",
        "bsp:local_steps=auto(at_least=2)",
        workers=2,
        cluster="factors:by_worker=1:3",
        iterations=60,
        batch=8,
    )
    ends = [record.event for record in run.trace if isinstance(record.event, GradientReady)]
    assert len({end.steps for end in ends}) > 1
    assert all(end.weight == 8 * end.steps for end in ends)
