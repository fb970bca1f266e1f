"""How gradients get into segments and parameters out, with a lane that is late on purpose and without one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline
from paceline.runtime.live.worker import cuda, staging
from paceline.runtime.live.worker.staging import AROUND, Transfer, write_slice
from paceline.tensors import passes
from paceline.tensors.layout import Layout, layout_of
from paceline.tensors.passes import AT_ONCE
from tests.live.lanes import LateLane

CPU = torch.device("cpu")
SHAPES = [(3, 4), (0,), (2, AT_ONCE), ()]


def layout_and_tensors() -> tuple[Layout, list[torch.Tensor]]:
    torch.manual_seed(0)
    tensors = [torch.randn(shape) for shape in SHAPES]
    return layout_of((str(index), tensor, 0) for index, tensor in enumerate(tensors)), tensors


@pytest.fixture(params=["at once", "around the caches", "in a lane"])
def lanes(request, monkeypatch) -> dict[torch.device, LateLane]:
    monkeypatch.setattr(staging, "AROUND", 0 if request.param == "around the caches" else AROUND)
    return {CPU: LateLane()} if request.param == "in a lane" else {}


def make(lanes: dict[torch.device, LateLane]) -> tuple[Transfer, torch.Tensor, list[torch.Tensor], Layout]:
    layout, tensors = layout_and_tensors()
    flat = torch.full((layout.numel,), 7.0)
    return Transfer(tensors, layout.views(flat), layout.views(flat), lanes), flat, tensors, layout


def test_a_gradient_is_whole_when_write_returns(lanes) -> None:
    transfer, flat, tensors, layout = make(lanes)
    gradients = [2 * tensor for tensor in tensors]
    gradients[2] = gradients[2].t().contiguous().t()
    assert not gradients[2].is_contiguous()
    assert transfer.write(gradients)
    assert all(torch.equal(view, given) for view, given in zip(layout.views(flat), gradients, strict=True))
    gradients[0] = None
    assert transfer.write(gradients)
    assert torch.equal(layout.views(flat)[0], torch.zeros(3, 4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [0, 2, 3])
def test_what_is_not_finite_is_seen_anywhere(lanes, bad: float, where: int) -> None:
    transfer, _, tensors, _ = make(lanes)
    gradients = [tensor.clone() for tensor in tensors]
    gradients[where].view(-1)[-1] = bad
    assert not transfer.write(gradients)
    assert transfer.write(tensors), "the next gradient is judged by itself"
    assert transfer.write([torch.full_like(tensor, 3e38) for tensor in tensors]), "large is not infinite"


@pytest.mark.parametrize(("size", "around"), [(AROUND - 1, False), (AROUND, True)])
def test_gradients_of_large_models_go_around_the_caches(size: int, around: bool, monkeypatch) -> None:
    ways: list[bool] = []
    copy = passes.copy_and_look
    monkeypatch.setattr(passes, "copy_and_look", lambda *given: ways.append(given[2]) or copy(*given))
    tensors = [torch.randn(size - 5), torch.randn(5)]
    views = [torch.zeros(size - 5), torch.zeros(5)]
    assert Transfer(tensors, views, views, {}).write(tensors)
    assert all(torch.equal(*pair) for pair in zip(tensors, views, strict=True))
    assert ways == [around] * 2, "the small tensor, too"
    overlapping = Transfer(tensors, views, views, {})
    overlapping.put(dict(enumerate(tensors)))
    assert overlapping.finish()
    assert ways == [around] * 4


@pytest.mark.parametrize("how", ["with gaps", "one for all", "sign to be changed", "transposed"])
def test_a_gradient_may_lie_as_it_likes(how: str, lanes) -> None:
    size = 2 * AT_ONCE
    gradient = {
        "with gaps": lambda: torch.randn(2 * size)[::2],
        "one for all": lambda: torch.tensor(2.0).expand(size),
        "sign to be changed": lambda: torch.randn(size, dtype=torch.complex64).conj().imag,
        "transposed": lambda: torch.randn(2, AT_ONCE).t().reshape(2, AT_ONCE).t(),
    }[how]()
    view = torch.zeros(gradient.shape)
    transfer = Transfer([torch.zeros(gradient.shape)], [view], [view], lanes)
    assert transfer.write([gradient])
    assert torch.equal(view, gradient)


def test_a_tensor_that_lost_its_gradient_is_judged_no_more(lanes) -> None:
    transfer, flat, tensors, _ = make(lanes)
    transfer.put({0: torch.full((3, 4), float("nan"))})
    assert transfer.write([None, *tensors[1:]])
    assert torch.isfinite(flat).all()


def test_parameters_are_loaded(lanes) -> None:
    transfer, flat, tensors, _ = make(lanes)
    flat.fill_(5.0)
    transfer.load()
    assert all((tensor == 5.0).all() for tensor in tensors)


def test_one_slice_is_written_again_and_nothing_else() -> None:
    layout, tensors = layout_and_tensors()
    whole = torch.cat([tensor.reshape(-1) for tensor in tensors])
    for part in layout.slices(3):
        flat = torch.full((layout.numel,), 7.0)
        write_slice(tensors, flat, layout, part)
        expected = torch.full((layout.numel,), 7.0)
        expected[part] = whole[part]
        assert torch.equal(flat, expected)
    write_slice([None, *tensors[1:]], flat, layout, layout.slices(1)[0])
    assert torch.equal(flat[:12], torch.zeros(12))
    assert torch.equal(flat[12:], whole[12:])


def train(overlap: bool, late: bool, policy: str = "bsp") -> paceline.Run:
    """Train on the CPU, as if it were a device with a lane if `late`."""

    def work() -> None:
        lane = LateLane()
        if late:
            cuda.lanes_for = lambda tensors: {CPU: lane}
            cuda.pin = lambda segment, device: "as if it could not"
        torch.manual_seed(0)
        rank = paceline.init().rank
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))
        opt = paceline.Optimizer(torch.optim.Adam(model.parameters(), lr=0.05), model=model, overlap=overlap)
        for step in range(8):
            opt.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + rank)
            model[: 3 if step == 5 else 5](torch.randn(4, 5, generator=generator)).pow(2).sum().backward()
            opt.skip_step() if step == 2 + rank else opt.step()
        if late:
            assert lane.most == (6 if overlap else 1), "with overlap each gradient goes by itself"

    run = paceline.launch(work, workers=2, servers=2, policy=policy, timeout_s=60)
    assert run.failures == []
    return run


def test_a_model_on_a_late_device_trains_as_one_on_the_cpu(capfd) -> None:
    expected = train(overlap=False, late=False).parameters
    for overlap in (False, True):
        found = train(overlap, late=True).parameters
        assert all(torch.equal(expected[name], found[name]) for name in expected), f"overlap={overlap}"
    assert "worker 0: copies from and to the GPU are slow: as if it could not" in capfd.readouterr().err
