"""Live runs on unequal batches: what a push weighs, and that the mean is that of the joined batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.core.events import GradientReady
from paceline.errors import ConfigError, RunFailed
from paceline.run import Run
from tests.reference import largest_difference

SIZES = (8, 3, 1)
"""The samples of each rank's batch."""
ITERATIONS = 12
FEATURES = 5


def dataset() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(ITERATIONS * sum(SIZES), FEATURES, generator=torch.Generator().manual_seed(1))
    return x, x.sum(1, keepdim=True).sin()


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 1)).to(dtype)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
}


def part_of(rank: int, iteration: int) -> slice:
    first = iteration * sum(SIZES) + sum(SIZES[:rank])
    return slice(first, first + SIZES[rank])


def train(kind: str, dtype: torch.dtype, options: str = "") -> None:
    model, (x, y) = model_of(dtype), dataset()
    opt = paceline.Optimizer(OPTIMIZERS[kind](model), model=model, options=options)
    rank = paceline.init().rank
    for iteration in range(ITERATIONS):
        part = part_of(rank, iteration)
        opt.zero_grad()
        nn.functional.mse_loss(model(x[part].to(dtype)), y[part].to(dtype)).backward()
        opt.step(weight=SIZES[rank])


def alone(kind: str, dtype: torch.dtype, clip_mean: float | None = None) -> dict[str, torch.Tensor]:
    model, (x, y) = model_of(dtype), dataset()
    optimizer = OPTIMIZERS[kind](model)
    for batch, targets in zip(x.to(dtype).split(sum(SIZES)), y.to(dtype).split(sum(SIZES)), strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), targets).backward()
        if clip_mean is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_mean)
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float64, 1e-9)], ids=str)
@pytest.mark.parametrize(("kind", "servers"), [("sgd", 1), ("momentum", 2), ("adam", 2)])
def test_weighted_bsp_equals_one_process_on_the_joined_batch(
    kind: str, servers: int, dtype: torch.dtype, most: float
) -> None:
    run = paceline.launch(partial(train, kind, dtype), workers=3, servers=servers, policy="bsp", seed=1)
    assert largest_difference(run.parameters, alone(kind, dtype)) < most


def test_a_mean_is_clipped_by_its_own_norm_over_two_servers() -> None:
    clipped = partial(train, "momentum", torch.float64, "clip_mean=0.05")
    run = paceline.launch(clipped, workers=3, servers=2, policy="bsp")
    assert largest_difference(run.parameters, alone("momentum", torch.float64, 0.05)) < 1e-9


def test_peers_on_a_complete_graph_agree_on_the_joined_batch() -> None:
    """For a linear loss gradients do not depend on the parameters: the weighted average is exactly that of the joined
    batch, one step behind."""

    def work() -> None:
        model, (x, _) = model_of(torch.float64)[0], dataset()
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        rank = paceline.init().rank
        for iteration in range(ITERATIONS):
            opt.zero_grad()
            model(x[part_of(rank, iteration)].double()).mean().backward()
            opt.step(weight=SIZES[rank])
        for _ in range(2):  # average once more what was learned last
            opt.zero_grad()
            (0 * model(x[:1].double()).sum()).backward()
            opt.step(weight=SIZES[rank])

    run = paceline.launch(work, workers=3, policy="hop:graph=complete")
    model, (x, _) = model_of(torch.float64)[0], dataset()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in x.double().split(sum(SIZES)):
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
    assert largest_difference(run.parameters, dict(model.named_parameters())) < 1e-9


def weights_of(run: Run) -> dict[int, list[float]]:
    """What each rank's pushes weighed, in order."""
    found: dict[int, list[float]] = {}
    for record in run.trace:
        if isinstance(record.event, GradientReady):
            found.setdefault(record.node.rank, []).append(record.event.weight)
    return found


def test_a_push_weighs_the_samples_that_were_drawn_for_it() -> None:
    def work(num_workers: int, per_step: int | None, micro: int) -> None:
        data = TensorDataset(torch.arange(2 * 22.0)[:, None])
        loader = DataLoader(data, 4, sampler=paceline.Sampler(data, per_step=per_step), num_workers=num_workers)
        model = nn.Linear(1, 1)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
        opt.zero_grad()
        for number, (batch,) in enumerate(loader, 1):
            model(batch).sum().backward()
            if number % micro == 0 or number == len(loader):
                opt.step()
                opt.zero_grad()

    plain = weights_of(paceline.launch(partial(work, 0, None, 1), workers=2, policy="bsp"))
    assert plain == {0: [4.0] * 5 + [2.0], 1: [4.0] * 5 + [2.0]}
    ahead = weights_of(paceline.launch(partial(work, 2, None, 1), workers=2, policy="bsp"))
    assert ahead == plain
    accumulated = weights_of(paceline.launch(partial(work, 0, None, 2), workers=2, policy="bsp"))
    assert accumulated == {0: [8.0, 8.0, 6.0], 1: [8.0, 8.0, 6.0]}


def test_without_a_sampler_a_push_weighs_one_and_on_arrival_takes_its_share() -> None:
    def work(weights: dict[int, float]) -> None:
        model = nn.Linear(1, 1, bias=False)
        model.weight.data.fill_(0.0)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        rank = paceline.init().rank
        for _ in range(10):
            opt.zero_grad()
            model.weight.sum().backward()
            opt.step(weight=weights.get(rank))

    run = paceline.launch(partial(work, {}), workers=2, policy="asp")
    assert weights_of(run) == {0: [1.0] * 10, 1: [1.0] * 10}
    assert run.parameters["group0.0"].item() == -10.0
    run = paceline.launch(partial(work, {0: 3.0, 1: 1.0}), workers=2, policy="ssp:staleness=0")
    # The first push of all knows of no other: it takes half, as if the other weighed as much.
    assert run.parameters["group0.0"].item() in (-(9.5 + 0.25), -(9.5 + 0.75))


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf"), True, "many"])
def test_a_weight_that_is_none_is_refused_in_one_line(weight: object) -> None:
    opt = paceline.Optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0))
    with pytest.raises(ConfigError, match=r"weight=.* is out of range: a number above 0"):
        opt.step(weight=weight)  # type: ignore[arg-type]


def test_equal_parts_have_no_use_for_a_weight(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        model = nn.Linear(1, 1)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        model(torch.ones(1, 1)).sum().backward()
        opt.step(weight=2)

    with pytest.raises(RunFailed):
        paceline.launch(work, workers=2, policy="adpsgd:graph=ring")
    assert (
        "worker 0: adpsgd averages two peers in equal parts: step(weight=...) is not for it" in capfd.readouterr().err
    )
