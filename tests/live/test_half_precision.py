"""Parameters in half precision, whose masters the servers have in float32."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import PacelineError
from tests.reference import largest_difference

STEPS = 30


def network(dtype: torch.dtype, mixed: bool = False) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
    if mixed:
        net[1].float()
    return net


def loss_of(net: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    hidden = net[0](x.to(net[0].weight.dtype))
    hidden = net[1](hidden.to(net[1].weight.dtype)).to(hidden.dtype)
    return nn.functional.mse_loss(net[3](net[2](hidden)).float(), x.sum(1, keepdim=True).sin())


def work(dtype: torch.dtype, mixed: bool = False, rate: float = 0.02) -> None:
    net = network(dtype, mixed)
    opt = paceline.Optimizer(torch.optim.Adam(net.parameters(), lr=rate), model=net)
    rank = paceline.init().rank
    for step in range(STEPS):
        if step == 10:
            paceline.barrier()
        opt.zero_grad()
        loss_of(net, step, rank).backward()
        opt.step()
    assert net[0].weight.dtype is dtype
    if rank == 0:
        paceline.log(first=net[0].weight.float().sum().item())


def held_out(parameters: dict[str, torch.Tensor]) -> float:
    net = network(torch.float32)
    net.load_state_dict(parameters)
    return sum(loss_of(net, 1000 + step, 0).item() for step in range(20)) / 20


@pytest.mark.parametrize(("dtype", "policy", "mixed"), [
    (torch.bfloat16, "bsp", False), (torch.float16, "ssp:staleness=1", False), (torch.bfloat16, "bsp", True),
])  # fmt: skip
def test_halves_train_as_well_as_floats(dtype: torch.dtype, policy: str, mixed: bool) -> None:
    run = paceline.launch(partial(work, dtype, mixed), workers=2, servers=2, policy=policy)
    assert run.failures == []
    assert {value.dtype for value in run.parameters.values()} == {torch.float32}
    floats = paceline.launch(partial(work, torch.float32), workers=2, servers=2, policy="bsp")
    losses = held_out(run.parameters), held_out(floats.parameters)
    assert losses[0] < 0.6 * held_out(dict(network(torch.float32).state_dict()))
    if policy == "bsp":  # the model has the run's parameters, rounded
        assert losses[0] < 1.05 * losses[1]
        assert run.history[-1].values["first"] == run.parameters["0.weight"].to(dtype).float().sum().item()


def test_steps_that_are_too_small_for_a_half_add_up() -> None:
    run = paceline.launch(partial(work, torch.bfloat16, rate=1e-6), workers=2, policy="bsp")
    moved = largest_difference(run.parameters, dict(network(torch.bfloat16).float().named_parameters()))
    assert 1e-5 < moved < 1e-4


def test_what_halves_cannot_have_is_refused_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    def overlapping() -> None:
        net = network(torch.bfloat16)
        paceline.Optimizer(torch.optim.SGD(net.parameters(), lr=0.1), overlap=True)

    def changing() -> None:
        net = network(torch.bfloat16)
        opt = paceline.Optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        net.load_state_dict(network(torch.bfloat16).state_dict())
        loss_of(net, 0, 0).backward()
        opt.step()

    for script, policy, why in (
        (overlapping, "bsp", "these parameters are halves"),
        (changing, "bsp", "a parameter was changed by the script"),
        (partial(work, torch.bfloat16), "hop:graph=complete", "need servers"),
    ):
        with contextlib.suppress(PacelineError):  # if the run has not begun
            assert paceline.launch(script, workers=2, policy=policy).failures
        err = capfd.readouterr().err
        assert why in err
        assert "Traceback" not in err
