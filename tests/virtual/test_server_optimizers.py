"""Every optimizer that may run on the servers, and what happens around it: parity, slices, state, refusals."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import cli, simulate, workloads
from paceline.errors import ConfigError
from paceline.optim import Optimizer
from paceline.sample_order import SampleOrder
from paceline.tensors import optimizers, schedules, state
from paceline.tensors.lars import LARS
from paceline.tensors.layout import Entry, Layout, balanced, flatten, layout_of
from paceline.tensors.optimizer_catalogue import CATALOGUE
from paceline.tensors.optimizers import describe, parse
from paceline.tensors.shard_optimizer import ShardOptimizer, squared_norm
from tests.reference import largest_difference, train_alone

TEXTS = {
    "sgd": "sgd:lr=0.1,momentum=0.9,dampening=0.2",
    "adam": "adam:lr=0.002,amsgrad=true",
    "adamw": "adamw:lr=0.002,betas=0.8:0.99",
    "adagrad": "adagrad:lr=0.05,lr_decay=0.01",
    "rmsprop": "rmsprop:lr=0.002,momentum=0.9,centered=true",
    "adadelta": "adadelta:lr=1,rho=0.8",
    "adamax": "adamax:lr=0.002",
    "nadam": "nadam:lr=0.002,momentum_decay=0.01",
    "radam": "radam:lr=0.002",
    "asgd": "asgd:lr=0.05,t0=10,lambd=0.01",
    "rprop": "rprop:lr=0.001,etas=0.6:1.1",
    "nesterov": "nesterov:lr=0.05,momentum=0.9",
    "lars": "lars:lr=1,trust=0.02,weight_decay=0.01",
    "adafactor": "adafactor:lr=0.01,weight_decay=0.01",
    "muon": "muon:lr=0.005,ns_steps=3",
}
ELEMENTWISE = [name for name in CATALOGUE if not CATALOGUE[name].whole]


def test_every_kind_is_tested_here() -> None:
    assert set(TEXTS) == set(CATALOGUE)


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("name", [name for name in TEXTS if name != "muon"])
def test_bsp_equals_torchs_own_optimizer_in_one_process(name: str, servers: int) -> None:
    workload = "digits-mlp"
    alone = train_alone(workload, 3, 25, TEXTS[name], torch.float64)
    run = simulate(
        workload, "bsp", workers=3, servers=servers, cluster="lognormal:sigma=1", iterations=25, dtype="float64",
        optimizer=TEXTS[name],
    )  # fmt: skip
    assert largest_difference(run.parameters, alone) < 1e-9
    before = dict(workloads.load(workload).module(0, torch.float64).named_parameters())
    moved = max((run.parameters[key] - before[key]).abs().max().item() for key in before)
    assert moved > 1e-3, "it did step"


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_muon_equals_torchs_given_the_same_gradients(servers: int) -> None:
    """Muon works in bfloat16 inside: the last bit of a gradient may become a percent of a step. So two runs whose
    gradients differ in rounding stay close, and steps on equal gradients are equal."""
    tensors, _ = make_model()
    layout = layout_of(((f"p{i}", t, 0) for i, t in enumerate(tensors)), "tensors")
    flat = layout.empty()
    flatten(tensors, layout.views(flat))
    spec = parse(TEXTS["muon"])
    parts = layout.slices(servers)
    optimizers_ = [ShardOptimizer(layout, part, flat[part], spec) for part in parts]
    whole = spec.build([tensors])
    for _ in range(5):
        gradient = torch.randn(layout.numel, dtype=torch.float64)
        for tensor, view in zip(tensors, layout.views(gradient), strict=True):
            tensor.grad = view.clone()
        whole.step()
        for part, optimizer in zip(parts, optimizers_, strict=True):
            optimizer.apply([optimizer.cut(gradient[part])], 1.0)
    for tensor, view in zip(tensors, layout.views(flat), strict=True):
        assert torch.equal(tensor, view)
    alone = train_alone("matrix-factorization", 3, 10, TEXTS["muon"], torch.float64)
    run = simulate(
        "matrix-factorization", "bsp", workers=3, servers=servers, iterations=10, dtype="float64",
        optimizer=TEXTS["muon"],
    )  # fmt: skip
    moved = dict(workloads.load("matrix-factorization").module(0, torch.float64).named_parameters())
    for name, value in run.parameters.items():
        step = (alone[name] - moved[name]).norm()
        assert (value - alone[name]).norm() < 0.1 * step


def make_model() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    shapes = [(6, 5), (4, 6), (3, 4)]
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return tensors, [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "nesterov"])
def test_one_of_n_gradients_moves_the_parameters_a_nth_as_far(name: str) -> None:
    """But for `nesterov`, whose momentum waits for a whole step (`test_local_steps.py`)."""
    moved = {}
    for weight in (1.0, 0.25):
        tensors, gradients = make_model()
        layout = layout_of(((f"p{i}", t, 0) for i, t in enumerate(tensors)), parse(TEXTS[name]).borders)
        flat, gradient = layout.empty(), layout.empty()
        flatten(tensors, layout.views(flat))
        flatten(gradients, layout.views(gradient))
        optimizer = ShardOptimizer(layout, slice(0, layout.numel), flat, parse(TEXTS[name]))
        for _ in range(2):
            optimizer.apply([optimizer.cut(gradient)], 1.0)
        before = flat.clone()
        optimizer.apply([optimizer.cut(gradient)], weight)
        moved[weight] = flat - before
    assert moved[1.0].abs().max() > 0
    assert torch.allclose(moved[0.25], moved[1.0] / 4, atol=1e-12)


@pytest.mark.parametrize("name", TEXTS)
def test_the_state_goes_to_torch_and_to_other_slices_and_back(name: str) -> None:
    """Three steps on two shards; the state, whole, into a torch optimizer and into three shards; all go on alike."""
    spec = parse(TEXTS[name] + ",ema=0.9,schedule=linear(samples=1000),batch=10")
    tensors, _ = make_model()
    layout = layout_of(((f"p{i}", t, 0) for i, t in enumerate(tensors)), spec.borders)
    flat = layout.empty()
    flatten(tensors, layout.views(flat))

    def cut(servers: int) -> list[tuple[slice, ShardOptimizer]]:
        return [(part, ShardOptimizer(layout, part, flat[part].clone(), spec)) for part in layout.slices(servers)]

    def step(shards: list[tuple[slice, ShardOptimizer]], seed: int) -> torch.Tensor:
        gradient = torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for part, optimizer in shards:
            optimizer.apply([optimizer.cut(gradient[part])], 1.0)
        return gradient

    two = cut(2)
    for seed in range(3):
        step(two, seed)
    whole = state.join([optimizer.state() for _, optimizer in two], layout)
    flat = torch.cat([optimizer.values for _, optimizer in two])
    three = cut(3)
    for part, optimizer in three:
        optimizer.load_state(state.cut(whole, layout, part))
    theirs = [view.clone() for view in layout.views(flat)]
    torchs = spec.build([theirs])
    for tensor, learned in zip(theirs, state.to_torch(whole, layout), strict=True):
        torchs.state[tensor].update(learned)
    again = state.from_torch(torchs, theirs, layout)
    assert all(torch.equal(again[key], whole[key]) for key in again), "there and back"
    gradient = step(two, 7)
    step(three, 7)
    for tensor, view in zip(theirs, layout.views(gradient), strict=True):
        tensor.grad = view.clone()
    torchs.param_groups[0]["lr"] *= 0.97
    torchs.step()
    expected = torch.cat([optimizer.values for _, optimizer in two])
    assert torch.equal(torch.cat([optimizer.values for _, optimizer in three]), expected)
    assert torch.equal(torch.cat([o.average for _, o in three]), torch.cat([o.average for _, o in two]))
    assert torch.allclose(torch.cat([tensor.reshape(-1) for tensor in theirs]), expected, atol=1e-12)


def test_lars_by_hand() -> None:
    w, b = torch.tensor([[3.0, 4.0]], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    w.grad, b.grad = torch.tensor([[0.0, 2.0]], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)
    LARS([w, b], lr=0.1, momentum=0, weight_decay=0.1, trust=0.01).step()
    ratio = 0.01 * 5 / (2 + 0.1 * 5)
    assert torch.allclose(w, torch.tensor([[3 - 0.1 * ratio * 0.3, 4 - 0.1 * ratio * 2.4]], dtype=torch.float64))
    assert b.item() == pytest.approx(1 - 0.1 * (0.5 + 0.1)), "a bias steps as under SGD"


# Slices on borders.


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=9), st.data())
def test_slices_on_borders_are_as_equal_as_can_be(sizes: list[int], data) -> None:
    parts = data.draw(st.integers(1, len(sizes)))
    cuts = balanced(sizes, parts)
    assert cuts[0] == 0
    assert cuts[-1] == len(sizes)
    assert len(cuts) == parts + 1
    assert all(a < b for a, b in pairwise(cuts)), "none is empty"
    largest = max(sum(sizes[a:b]) for a, b in pairwise(cuts))
    assert largest == best(tuple(sizes), parts)


def best(sizes: tuple[int, ...], parts: int) -> int:
    if parts == 1:
        return sum(sizes)
    return min(max(sum(sizes[:k]), best(sizes[k:], parts - 1)) for k in range(1, len(sizes) - parts + 2))


def test_layers_are_tensors_of_one_module() -> None:
    entries = tuple(Entry(name, (size,), 0) for name, size in [("0.weight", 9), ("0.bias", 1), ("2.weight", 4)])
    layout = Layout(entries, "float32", "layers")
    assert layout.units() == [("0", 10), ("2", 4)]
    assert layout.slices(2) == [slice(0, 10), slice(10, 14)]
    with pytest.raises(ConfigError, match="servers=3 is out of range: 1 to 2"):
        layout.slices(3)


# What happens around the optimizer.


def run_alone(extras: str, change) -> dict[str, torch.Tensor]:
    """One process, 3 workers' gradients apart; `change(step, gradients of each worker)` before their mean."""
    workload = workloads.load("digits-mlp")
    module = workload.module(0, torch.float64)
    parameters = list(module.parameters())
    opt = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    order = SampleOrder(len(workload.train[0]), 3, workload.batch, 0)
    for step in range(30):
        each = []
        for worker in range(3):
            samples = torch.from_numpy(order.of_worker(worker, step))
            loss = workload.loss(module(workload.train[0][samples].double()), workload.train[1][samples])
            each.append(torch.autograd.grad(loss, parameters))
        opt.param_groups[0]["lr"] = 0.5
        change(step, each, opt)
        for parameter, gradients in zip(parameters, zip(*each, strict=True), strict=True):
            parameter.grad = torch.stack(gradients).mean(0)
        opt.step()
    return {name: value.detach() for name, value in module.named_parameters()}


def simulate_extras(extras: str, policy: str = "bsp"):
    text = f"sgd:lr=0.5,momentum=0.9{extras}"
    return simulate("digits-mlp", policy, workers=3, servers=2, iterations=30, optimizer=text, dtype="float64")


def test_each_worker_clips_its_own_whole_gradient() -> None:
    norms = []

    def clip(step, each, opt) -> None:
        for worker, gradients in enumerate(each):
            norm = math.sqrt(sum(gradient.pow(2).sum().item() for gradient in gradients))
            norms.append(norm)
            each[worker] = [gradient * min(1.0, 0.3 / (norm + 1e-6)) for gradient in gradients]

    alone = run_alone("", clip)
    assert min(norms) < 0.3 < max(norms), "some are clipped and some are not"
    assert largest_difference(simulate_extras(",clip=0.3").parameters, alone) < 1e-9


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd:lr=0.5", "sgd:lr=0.1,momentum=0.9", "adamw:lr=0.01", "lars:lr=0.1"])
def test_the_servers_clip_the_mean_as_one_process_does(optimizer: str, servers: int) -> None:
    text = f"{optimizer},clip_mean=0.4"
    run = simulate("digits-mlp", "bsp", workers=3, servers=servers, iterations=30, optimizer=text, dtype="float64")
    alone = train_alone("digits-mlp", 3, 30, text, torch.float64)
    assert largest_difference(run.parameters, alone) < 1e-9
    assert largest_difference(run.parameters, train_alone("digits-mlp", 3, 30, optimizer, torch.float64)) > 1e-3
    assert run.replay() == []


@pytest.mark.parametrize("policy", ["scheduled", "deadline:factor=100", "bsp+backup:extra=0", "bsp@0,deadline@9"])
def test_the_mean_is_clipped_under_every_policy_that_has_one(policy: str) -> None:
    text = "sgd:lr=0.5,clip_mean=0.4"
    run = simulate("digits-mlp", policy, workers=3, servers=2, iterations=20, optimizer=text, dtype="float64")
    assert largest_difference(run.parameters, train_alone("digits-mlp", 3, 20, text, torch.float64)) < 1e-9
    assert run.replay() == []


def test_layer_by_layer_the_norm_is_still_of_all() -> None:
    text = "sgd:lr=0.5,clip_mean=0.4"
    run = simulate("digits-mlp", "bsp", workers=3, iterations=20, optimizer=text, dtype="float64", by_layer=True)
    assert largest_difference(run.parameters, train_alone("digits-mlp", 3, 20, text, torch.float64)) < 1e-9


def test_a_norm_beyond_a_float_is_still_a_number() -> None:
    assert squared_norm(torch.full((4,), 1e30)) == pytest.approx(4e60)
    assert math.isfinite(squared_norm(torch.full((4,), 1e300, dtype=torch.float64)))


def test_a_schedule_counts_samples_in_every_policy() -> None:
    def schedule(step, each, opt) -> None:
        used = 3 * 32 * step
        factor = used / 480 if used < 480 else (1 + math.cos(math.pi * min(1, (used - 480) / 2000))) / 2
        opt.param_groups[0]["lr"] = 0.5 * factor

    text = ",schedule=cosine(samples=2000,warmup=480)"
    alone = run_alone("", schedule)
    assert largest_difference(simulate_extras(text).parameters, alone) < 1e-9
    ended = simulate_extras(text, "asp").history
    still = [point.loss for point in ended if point.updates > 3 * 26]
    assert max(still) - min(still) < 1e-9, "the rate is 0 after 2480 samples, 78 gradients, under ASP too"


@pytest.mark.parametrize("text", list(schedules.CATALOGUE))
def test_schedules_begin_at_1_never_rise_and_warm_up(text: str) -> None:
    schedule = schedules.parse(text)
    factors = [schedule.factor(samples) for samples in range(0, 200_000, 1000)]
    assert factors[0] == 1
    assert all(later <= earlier for earlier, later in pairwise(factors))
    warm = schedules.parse(f"{text}:warmup=100")
    assert [warm.factor(0), warm.factor(50), warm.factor(100)] == [0, 0.5, 1]


def test_the_moving_average_is_kept_beside_the_model() -> None:
    seen = []

    def watch(step, each, opt) -> None:
        seen.append([parameter.detach().clone() for parameter in opt.param_groups[0]["params"]])

    alone = run_alone("", watch)
    average = seen[0]
    for values in [*seen[1:], list(alone.values())]:
        average = [0.9 * old + 0.1 * new for old, new in zip(average, values, strict=True)]
    run = simulate_extras(",ema=0.9")
    assert largest_difference(run.parameters, alone) < 1e-9
    assert largest_difference(run.average, dict(zip(alone, average, strict=True))) < 1e-9
    assert run.averaged_model().keys() == run.model().keys()
    assert simulate_extras("").average == {}


@pytest.mark.parametrize(
    "text",
    ["sgd:lr=0.1,momentum=0.9", "sgd:lr=0.1,momentum=0.9,nesterov=true", "adam:lr=0.002", "rmsprop:lr=0.001,alpha=0.9",
     "lars:lr=1,trust=0.02", "adamax:lr=0.002", "nadam:lr=0.002"],
)  # fmt: skip
def test_stretched_time_brings_on_arrival_close_to_bsp(text: str) -> None:
    """With SSP's gate closed the workers compute what BSP's do; N steps of weight 1/N then remember N times less,
    unless time is stretched. A constant gradient shows it without noise."""
    ends = {}
    for label, weights, extras in (("bsp", 1, ""), ("plain", 8, ""), ("stretched", 8, ",stretch=true")):
        torch.manual_seed(0)
        layout = Layout((Entry("p", (4, 3), 0),), "float64", parse(text).borders)
        values = torch.randn(12, dtype=torch.float64) + 3
        before = values.clone()
        optimizer = ShardOptimizer(layout, slice(0, 12), values, parse(text + extras))
        for iteration in range(12):
            gradient = torch.full((12,), 1.0 + (iteration % 3), dtype=torch.float64)
            for _ in range(weights):
                optimizer.apply([[gradient]], 1 / weights)
        ends[label] = (values - before).norm().item()
    stretched, plain = abs(ends["stretched"] - ends["bsp"]), abs(ends["plain"] - ends["bsp"])
    assert stretched < 0.25 * ends["bsp"]
    assert stretched < plain


def test_stretched_averages_decay_by_the_weight() -> None:
    layout = Layout((Entry("p", (1,), 0),), "float64")
    ends = []
    for steps in (1, 10):
        optimizer = ShardOptimizer(
            layout, slice(0, 1), torch.zeros(1, dtype=torch.float64), parse("adam:lr=0,ema=0.5,stretch=true")
        )
        optimizer.values.fill_(1.0)
        for _ in range(steps):
            optimizer.apply([[torch.zeros(1, dtype=torch.float64)]], 1 / steps)
        ends.append(optimizer.average.item())
    assert ends == pytest.approx([0.5, 0.5])


# Refusals.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sparseadam", "sparseadam cannot run on the servers: it takes sparse gradients"),
        ("lbfgs:lr=1", "lbfgs cannot run on the servers: it needs several gradients"),
        ("adamm", "unknown optimizer 'adamm' (known: sgd, adam"),
        ("muon", "muon steps matrices only, and 0.bias has the shape [64]"),
        ("lars --servers 5", "servers=5 is out of range: 1 to 4, since slices end on the borders of tensors"),
        ("sgd:lr=0.1,clip=0", "clip=0 is out of range: more than 0"),
        ("sgd:lr=0.1,clip_mean=-1", "clip_mean=-1 is out of range: more than 0"),
        ("sgd:lr=0.1,clip_mean=1 --policy asp", "asp steps on each gradient when it arrives: use clip=1"),
        (
            "sgd:lr=0.1,clip_mean=1 --servers 2 --policy bsp+ssp",
            "but ssp:staleness=3 steps on each gradient when it arrives",
        ),
        ("sgd:lr=0.1,clip_mean=1 --policy adpsgd", "averages parameters, not gradients: use clip=1"),
        ("sgd:lr=0.1,ema=1", "ema=1 is out of range: more than 0 and less than 1"),
        ("sgd:lr=0.1,ema=yes", "sgd:ema=yes is not a number"),
        ("sgd:lr=0.1,scale=none", "sgd has no parameter 'scale' (the policy has it, as asp:scale=none)"),
        ("sgd:lr=0.1,stretch=2", "sgd:stretch=2 must be true or false"),
        ("sgd:lr=0.1,schedule=cosin", "unknown schedule 'cosin', did you mean 'cosine'?"),
        ("sgd:lr=0.1,schedule=cosine(samples=0)", "cosine:samples=0 is out of range: 1 or more"),
        ("rprop:lr=0.1,stretch=true", "rprop has no decay that stretch=true could change"),
        ("rmsprop:momentum=0.9,stretch=true", "rmsprop with momentum cannot have stretch=true"),
        ("lars:momentum=1", "momentum=1 is out of range"),
    ],
)
def test_what_cannot_be_gets_one_line(text: str, said: str, capsys) -> None:
    assert cli.run(["simulate", "--optimizer", *text.split()]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_users_optimizer_is_described_whole() -> None:
    matrix = torch.nn.Parameter(torch.zeros(2, 2))
    assert describe(torch.optim.Adafactor([matrix])).groups[0]["eps"] == (None, 1e-3)
    muon = torch.optim.Muon([matrix], adjust_lr_fn="match_rms_adamw")
    assert describe(muon).groups[0]["adjust_lr_fn"] == "match_rms_adamw"
    assert describe(LARS([matrix])).name == "lars"
    with pytest.raises(ConfigError, match="SparseAdam cannot run on the servers: it takes sparse gradients"):
        describe(torch.optim.SparseAdam([matrix]))
    text = "muon:lr=0.1,adjust_lr_fn=match_rms_adamw"
    assert optimizers.parse(text).groups[0]["adjust_lr_fn"] == "match_rms_adamw"


def test_options_in_a_world_of_one() -> None:
    """The script alone clips and schedules as it would on the servers."""
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    opt = Optimizer(torch.optim.SGD([parameter], lr=1.0), options="clip=1,schedule=linear(samples=100),batch=50")
    for _ in range(3):
        parameter.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
        opt.step()
    assert parameter.tolist() == pytest.approx([-0.9, -1.2], abs=1e-5)
    opt = Optimizer(torch.optim.SGD([parameter], lr=1.0), options="clip_mean=0.5")
    parameter.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    opt.step()
    assert parameter.tolist() == pytest.approx([-1.2, -1.6], abs=1e-5)
    assert opt.param_groups[0]["lr"] == 1.0
    with pytest.raises(ConfigError, match="a schedule counts samples"):
        Optimizer(torch.optim.SGD([parameter], lr=1.0), options="schedule=cosine")
    with pytest.raises(ConfigError, match="no option 'clp'"):
        Optimizer(torch.optim.SGD([parameter], lr=1.0), options="clp=1")
    with pytest.raises(ConfigError, match=r"no option 'scale' .the policy has it, as asp:scale=none"):
        Optimizer(torch.optim.SGD([parameter], lr=1.0), options="scale=none")
