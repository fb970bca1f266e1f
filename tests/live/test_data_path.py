"""How gradients get into segments and parameters out, with a copy stream that is late on purpose and without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.runtime.live.worker import cuda_copies, gathered_gradient, host_copies, stream_copies
from paceline.runtime.live.worker.data_path import GradientCopies
from paceline.runtime.live.worker.host_copies import AROUND, HostCopies, write_slice
from paceline.runtime.live.worker.stream_copies import StreamCopies
from paceline.runtime.live.worker.worker_memory import HostMemory
from paceline.tensors import fused_kernels
from paceline.tensors.fused_kernels import AT_ONCE
from paceline.tensors.layout import Layout, layout_of
from tests.live.late_copy_stream import LateCopyStream

CPU = torch.device("cpu")
SHAPES = [(3, 4), (0,), (2, AT_ONCE), ()]


def layout_and_tensors() -> tuple[Layout, list[torch.Tensor]]:
    torch.manual_seed(0)
    tensors = [torch.randn(shape) for shape in SHAPES]
    return layout_of((str(index), tensor, 0) for index, tensor in enumerate(tensors)), tensors


@pytest.fixture(params=["at once", "around the caches", "in a lane"])
def copy_streams(request, monkeypatch) -> dict[torch.device, LateCopyStream]:
    monkeypatch.setattr(host_copies, "AROUND", 0 if request.param == "around the caches" else AROUND)
    return {CPU: LateCopyStream()} if request.param == "in a lane" else {}


def make(
    copy_streams: dict[torch.device, LateCopyStream],
) -> tuple[GradientCopies, torch.Tensor, list[torch.Tensor], Layout]:
    layout, tensors = layout_and_tensors()
    flat = torch.full((layout.numel,), 7.0)
    return copies(tensors, layout.views(flat), copy_streams), flat, tensors, layout


def copies(
    tensors: list[torch.Tensor], views: list[torch.Tensor], copy_streams: dict[torch.device, LateCopyStream]
) -> GradientCopies:
    """As a worker has it: without streams everything is on the CPU."""
    return StreamCopies(tensors, views, views, copy_streams) if copy_streams else HostCopies(views)


def test_a_gradient_is_whole_when_write_returns(copy_streams) -> None:
    transfer, flat, tensors, layout = make(copy_streams)
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
def test_what_is_not_finite_is_seen_anywhere(copy_streams, bad: float, where: int) -> None:
    transfer, _, tensors, _ = make(copy_streams)
    gradients = [tensor.clone() for tensor in tensors]
    gradients[where].view(-1)[-1] = bad
    assert not transfer.write(gradients)
    assert transfer.write(tensors), "the next gradient is judged by itself"
    assert transfer.write([torch.full_like(tensor, 3e38) for tensor in tensors]), "large is not infinite"


@pytest.mark.parametrize(("size", "around"), [(AROUND - 1, False), (AROUND, True)])
def test_gradients_of_large_models_go_around_the_caches(size: int, around: bool, monkeypatch) -> None:
    ways: list[bool] = []
    copy = fused_kernels.copy_and_check_finite
    monkeypatch.setattr(fused_kernels, "copy_and_check_finite", lambda *given: ways.append(given[2]) or copy(*given))
    tensors = [torch.randn(size - 5), torch.randn(5)]
    views = [torch.zeros(size - 5), torch.zeros(5)]
    assert HostCopies(views).write(tensors)
    assert all(torch.equal(*pair) for pair in zip(tensors, views, strict=True))
    assert ways == [around] * 2, "the small tensor, too"
    overlapping = HostCopies(views)
    overlapping.put(dict(enumerate(tensors)))
    assert overlapping.finish()
    assert ways == [around] * 4


@pytest.mark.parametrize("how", ["with gaps", "one for all", "sign to be changed", "transposed"])
def test_a_gradient_may_lie_as_it_likes(how: str, copy_streams) -> None:
    size = 2 * AT_ONCE
    gradient = {
        "with gaps": lambda: torch.randn(2 * size)[::2],
        "one for all": lambda: torch.tensor(2.0).expand(size),
        "sign to be changed": lambda: torch.randn(size, dtype=torch.complex64).conj().imag,
        "transposed": lambda: torch.randn(2, AT_ONCE).t().reshape(2, AT_ONCE).t(),
    }[how]()
    view = torch.zeros(gradient.shape)
    transfer = copies([torch.zeros(gradient.shape)], [view], copy_streams)
    assert transfer.write([gradient])
    assert torch.equal(view, gradient)


def test_a_tensor_that_lost_its_gradient_is_judged_no_more(copy_streams) -> None:
    transfer, flat, tensors, _ = make(copy_streams)
    transfer.put({0: torch.full((3, 4), float("nan"))})
    assert transfer.write([None, *tensors[1:]])
    assert torch.isfinite(flat).all()


def test_parameters_are_loaded(copy_streams) -> None:
    layout, tensors = layout_and_tensors()
    views = layout.views(torch.full((layout.numel,), 5.0))
    StreamCopies(tensors, views, views, copy_streams).load()
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


@pytest.fixture
def memory(tmp_path: Path, monkeypatch) -> HostMemory:
    """The memory of a worker that has begun, and whose servers are all on other hosts."""
    monkeypatch.setattr(gathered_gradient, "WORTH_IT", 0)
    layout, tensors = layout_and_tensors()
    memory = HostMemory(tmp_path, (0, 0), layout, tensors, overlap=False)
    memory.begin()
    memory.follow(common=False, gathers=True, early=[])
    return memory


def test_a_gradient_that_is_gathered_stays_where_it_is_until_all_have_it(memory: HostMemory) -> None:
    before = memory.own.clone()
    gradients = [torch.full_like(tensor, 7.0) for tensor in memory.tensors]
    assert memory.write(gradients)
    assert memory.gathered.tensors is gradients
    memory.commit()
    memory.load()
    memory.release()
    assert torch.equal(memory.own, before)
    assert not memory.gathered.tensors
    assert not memory.write([*gradients[:-1], torch.tensor(float("nan"))])
    assert memory.write([None, *gradients[1:]]), "one that does not lie as it is sent is copied"
    assert not memory.gathered.tensors
    assert memory.layout.views(memory.own)[2].eq(7.0).all()


def test_a_gradient_that_no_server_has_seen_follows_to_another_path(memory: HostMemory) -> None:
    memory.write([torch.full_like(tensor, 7.0) for tensor in memory.tensors])
    memory.follow(common=False, gathers=False, early=[])
    assert memory.own.eq(7.0).all()
    assert not memory.gathered.tensors
    memory.follow(common=False, gathers=True, early=[])
    assert memory.gathered.tensors


def test_a_gradient_that_is_pushed_is_written_for_the_servers_that_lack_it_only(memory: HostMemory) -> None:
    """Others may have answered: what they wrote is the model's."""
    memory.write([torch.full_like(tensor, 7.0) for tensor in memory.tensors])
    memory.commit()
    memory.own.fill_(1.0)
    memory.follow(common=False, gathers=False, early=[])
    assert memory.own.eq(1.0).all()
    memory.restore(((0, 5), (9, 12)))
    assert memory.own[:12].tolist() == 5 * [7.0] + 4 * [1.0] + 3 * [7.0]
    assert memory.own[12:].eq(1.0).all()
    memory.release()
    memory.restore(((5, 9),))
    assert memory.own[5:9].eq(1.0).all()


@pytest.mark.parametrize("how", ["written", "moved"])
def test_what_the_script_did_to_a_tensor_is_found(how: str, memory: HostMemory) -> None:
    assert memory.first_changed() is None
    with torch.no_grad():
        if how == "written":
            memory.tensors[2].add_(1.0)
        else:
            memory.tensors[2].data = torch.zeros_like(memory.tensors[2])
    memory.follow(common=False, gathers=False, early=[])
    assert memory.first_changed() == 2


def train(overlap: bool, late: bool, policy: str = "bsp") -> paceline.Run:
    """Train on the CPU, as if it were a device with a lane if `late`."""

    def work() -> None:
        copy_stream = LateCopyStream()
        if late:
            cuda_copies.copy_streams_for = lambda tensors: {CPU: copy_stream}
            cuda_copies.pin = lambda segment, device: "as if it could not"
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
            assert copy_stream.most == ({1: 6, 100: 2}[stream_copies.TOGETHER] if overlap else 1)

    run = paceline.launch(work, workers=2, servers=2, policy=policy, timeout_s=60)
    assert run.failures == []
    return run


@pytest.mark.parametrize("together", [1, 100])
def test_a_model_on_a_late_device_trains_as_one_on_the_cpu(together: int, capfd, monkeypatch) -> None:
    """Gradients are copied one by one, or as soon as there are a hundred bytes of them."""
    monkeypatch.setattr(stream_copies, "TOGETHER", together)
    expected = train(overlap=False, late=False).parameters
    for overlap in (False, True):
        found = train(overlap, late=True).parameters
        assert all(torch.equal(expected[name], found[name]) for name in expected), f"overlap={overlap}"
    assert "worker 0: copies from and to the GPU are slow: as if it could not" in capfd.readouterr().err
