"""What a script may hold on to in a live run without servers, as docs/policies/hop.md says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import RunFailed
from paceline.runtime.live.peer import parameter_slots
from paceline.runtime.live.peer.peer import LivePeer
from paceline.runtime.live.peer.peer_parameters import PeerParameters

POLICY = "hop:graph=complete,order=serial"


def made() -> tuple[nn.Linear, paceline.Optimizer]:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)


def step(model: nn.Linear, opt: paceline.Optimizer) -> None:
    """All parameters are one larger afterwards, on every peer."""
    model.weight.grad = torch.full((1, 2), -1.0)
    opt.step()


def values(tensor: torch.Tensor) -> list[float]:
    return [round(value, 4) for value in tensor.flatten().tolist()]


def test_parameters_and_what_is_taken_anew_follow_and_clones_stay() -> None:
    def work() -> None:
        model, opt = made()
        parameter, groups = model.weight, opt.param_groups
        first = {name: value.clone() for name, value in model.state_dict().items()}
        for number in range(1, 8):
            step(model, opt)
            expected = [float(number)] * 2
            assert (
                values(parameter) == values(groups[0]["params"][0]) == values(model.state_dict()["weight"]) == expected
            )
            assert values(model(torch.eye(2))) == expected
            assert values(first["weight"]) == [0.0, 0.0]
            assert parameter is model.weight

    run = paceline.launch(work, workers=2, policy=POLICY, timeout_s=30)
    assert run.failures == []
    assert values(run.parameters["weight"]) == [7.0, 7.0]


def test_a_state_dict_held_across_steps_does_not_follow_and_is_written_over() -> None:
    """Documented, so that whoever makes it follow changes the page too."""

    is_lent = parameter_slots.SlotPool.is_lent

    def lent_until_the_next_step(slots: parameter_slots.SlotPool, number: int) -> bool:
        """The neighbour always averages later than this peer does, which may be so and need not."""
        live = paceline.session.world().live
        return (isinstance(live, LivePeer) and number == live.parameters.number) or is_lent(slots, number)

    def work() -> None:
        parameter_slots.SlotPool.is_lent = lent_until_the_next_step  # type: ignore[method-assign]  # a fork of our own
        rank = paceline.init().rank
        model, opt = made()
        held = model.state_dict()["weight"]
        seen, follows = set(), []
        for _ in range(8):
            model.weight.grad = torch.full((1, 2), -1.0 - rank)
            opt.step()
            seen.add(tuple(values(held)))
            follows.append(values(held) == values(model.weight))
        assert not all(follows)
        assert len(seen) > 1, "its memory has held other parameters"

    assert paceline.launch(work, workers=2, policy=POLICY, timeout_s=30).failures == []


def assigns_data(model: nn.Linear) -> None:
    model.weight.data = torch.ones(1, 2)


def loads(model: nn.Linear) -> None:
    model.load_state_dict({"weight": torch.ones(1, 2)})


def changes_detached(model: nn.Linear) -> None:
    model.weight.detach().add_(1.0)


@pytest.mark.parametrize("deed", [assigns_data, loads, changes_detached])
def test_changing_parameters_is_refused_at_the_next_step(deed, capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        model, opt = made()
        step(model, opt)
        deed(model)
        step(model, opt)

    with pytest.raises(RunFailed, match="no peer came to its end"):
        paceline.launch(work, workers=2, policy=POLICY, timeout_s=30)
    assert "weight was changed by the script" in capfd.readouterr().err


def test_a_change_through_data_is_not_seen() -> None:
    """Documented: torch does not count it."""

    def work() -> None:
        model, opt = made()
        step(model, opt)
        model.weight.data.add_(1.0)
        step(model, opt)

    assert values(paceline.launch(work, workers=2, policy=POLICY, timeout_s=30).parameters["weight"]) == [3.0, 3.0]


@pytest.mark.parametrize("order", ["parallel", "serial"])
def test_copied_parameters_are_the_same_as_views_of_them(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU (`test_gpu.py`), here without one."""

    def work() -> None:
        rank = paceline.init().rank
        model, opt = made()
        places = set()
        for number in range(12):
            model.weight.grad = torch.full((1, 2), float("nan") if number == 5 and rank else 1.0 + rank * number)
            opt.skip_step() if number == 3 else opt.step()
            places.add(model.weight.data_ptr())
        live = paceline.session.world().live
        assert isinstance(live, LivePeer)
        assert (len(places) == 1) == (not live.parameters.in_place)

    found = []
    for in_place in (True, False):
        made_of = PeerParameters.__init__

        def copied(values: PeerParameters, *given: Any, how: Any = made_of, here: bool = in_place) -> None:
            how(values, *given)
            values.in_place = here

        with monkeypatch.context() as patched:
            patched.setattr(PeerParameters, "__init__", copied)
            run = paceline.launch(work, workers=3, policy=f"hop:graph=ring,order={order}", timeout_s=30)
        assert run.failures == []
        found.append(run.parameters["weight"])
    assert torch.equal(*found)
