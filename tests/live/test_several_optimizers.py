"""Several optimizers in one worker: a small GAN, whose two networks are stepped in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import nn

import paceline
from paceline.core.events import GradientReady
from paceline.errors import ConfigError
from tests.reference import largest_difference

STEPS = 8
BATCH = 6
Optimizers = Sequence[torch.optim.Optimizer]
MAKE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.01, betas=(0.5, 0.999), weight_decay=0.01),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
}


def networks() -> nn.ModuleDict:
    torch.manual_seed(2)
    return nn.ModuleDict(
        {
            "critic": nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)),
            "maker": nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)),
        }
    ).double()


def of_all(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(2 * BATCH, size, generator=generator).double() for size in (3, 2))


def train(nets: nn.ModuleDict, opts: Optimizers, part: slice, steps: int = STEPS) -> None:
    """The critic's loss has gradients for itself only, the maker's for both, as in a GAN."""
    critic, maker = nets["critic"], nets["maker"]
    for step in range(steps):
        real, noise = (each[part] for each in of_all(step))
        critic.zero_grad()
        made = maker(noise)
        loss = nn.functional.softplus(-critic(real)).mean() + nn.functional.softplus(critic(made.detach())).mean()
        loss.backward()
        opts[0].step()
        maker.zero_grad()
        nn.functional.softplus(-critic(made)).mean().backward()
        opts[1].step()


def alone(kind: str) -> dict[str, torch.Tensor]:
    nets = networks()
    train(nets, [MAKE[kind](nets["critic"]), MAKE[kind](nets["maker"])], slice(None))
    return dict(nets.named_parameters())


def work(kind: str, policy: str | None = None, steps: int = STEPS) -> None:
    nets = networks()
    opts = paceline.optimizers(MAKE[kind](nets["critic"]), MAKE[kind](nets["maker"]), policy=policy, model=nets)
    rank = paceline.init().rank
    train(nets, opts, slice(rank * BATCH, (rank + 1) * BATCH), steps)
    moments = opts[1].state_dict()["state"]
    assert len(moments) == 4
    assert opts[0].global_step == opts[1].global_step
    if kind == "adam" and opts[0].global_step == 2 * STEPS:
        assert moments[0]["step"] == STEPS, "each optimizer counts its own steps"


@pytest.mark.parametrize(("kind", "servers"), [("adam", 2), ("momentum", 1)])
def test_under_bsp_they_equal_one_process_on_the_joined_batch(kind: str, servers: int) -> None:
    run = paceline.launch(partial(work, kind), workers=2, servers=servers, policy="bsp")
    assert run.failures == []
    assert largest_difference(run.parameters, alone(kind)) < 1e-9
    pushes = [record.node.rank for record in run.trace if isinstance(record.event, GradientReady)]
    assert sorted(pushes) == [0] * 2 * STEPS + [1] * 2 * STEPS


@pytest.mark.parametrize("policy", ["ssp:staleness=1", "hop:graph=complete", "adpsgd:graph=complete", "backup:extra=1"])
def test_they_train_under_other_policies(policy: str) -> None:
    run = paceline.launch(partial(work, "momentum", policy), workers=2)
    assert run.failures == []
    assert all(bool(value.isfinite().all()) for value in run.parameters.values())
    start = dict(networks().named_parameters())
    moved = {name for name, value in run.parameters.items() if not torch.equal(value, start[name])}
    assert moved == start.keys(), "both networks are trained"


def test_a_step_without_new_samples_weighs_as_the_one_before() -> None:
    def draw() -> None:
        data = torch.utils.data.TensorDataset(torch.arange(24.0)[:, None])
        loader = torch.utils.data.DataLoader(data, 4, sampler=paceline.Sampler(data))
        nets = [nn.Linear(1, 1), nn.Linear(1, 1)]
        opts = paceline.optimizers(*(torch.optim.SGD(net.parameters(), lr=1e-6) for net in nets), policy="ssp")
        for (batch,) in loader:
            for net, opt in zip(nets, opts, strict=True):
                net(batch).sum().backward()
                opt.step()

    run = paceline.launch(draw, workers=2)
    weights = [record.event.weight for record in run.trace if isinstance(record.event, GradientReady)]
    assert weights == [4.0] * 12


def test_in_a_world_of_one_each_takes_its_own_steps() -> None:
    nets = networks()
    opts = paceline.optimizers(MAKE["adam"](nets["critic"]), MAKE["adam"](nets["maker"]), model=nets)
    train(nets, opts, slice(None))
    assert largest_difference(dict(nets.named_parameters()), alone("adam")) == 0
    assert [opt.global_step for opt in opts] == [2 * STEPS] * 2, "as in a live run"


def test_what_cannot_be_joined_is_refused_in_one_line() -> None:
    net = nn.Linear(1, 1)
    other = torch.optim.Adam(nn.Linear(1, 1).parameters())
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="of one kind, got SGD, Adam"):
        paceline.optimizers(sgd, other)
    with pytest.raises(ConfigError, match="a parameter is in two optimizers"):
        paceline.optimizers(sgd, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="a schedule counts samples"):
        paceline.optimizers(sgd, options="schedule=cosine(samples=10),batch=1")
    with pytest.raises(ConfigError, match="got none"):
        paceline.optimizers()
    with pytest.raises(ConfigError, match="got Linear"):
        paceline.optimizers(net)  # type: ignore[arg-type]
