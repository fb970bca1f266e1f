"""Models on a GPU; skipped without one. `test_data_path.py` has the same logic on a late device."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from paceline.runtime.live.peer.parameter_slots import SlotPool
from paceline.runtime.live.peer.peer_parameters import PeerParameters
from paceline.runtime.live.storage import shared_memory
from paceline.runtime.live.worker import cuda_copies
from paceline.runtime.live.worker.stream_copies import StreamCopies
from paceline.tensors.layout import layout_of

from .test_aborting import ITERATION, Alone, abortable

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture
def moved() -> Iterator[tuple[StreamCopies, torch.Tensor, list[torch.Tensor]]]:
    """A model of some large tensors and a small one on the GPU, one on the CPU, and a registered segment."""
    device = torch.device("cuda", torch.cuda.current_device())
    tensors = [torch.randn(4_000_000, device=device) for _ in range(4)]
    tensors += [torch.randn(3, 5, device=device).t(), torch.randn(7)]
    layout = layout_of((str(index), tensor, 0) for index, tensor in enumerate(tensors))
    folder = shared_memory.RunFolder()
    segment = shared_memory.create(folder.path / "segment", layout)
    assert cuda_copies.pin(segment, device) == ""
    yield (
        StreamCopies(tensors, layout.views(segment), layout.views(segment), cuda_copies.copy_streams_for(tensors)),
        segment,
        tensors,
    )
    torch.cuda.synchronize()
    cuda_copies.unpin(segment)
    folder.remove()


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1).cpu() for tensor in tensors])


def busy() -> None:
    """Keep the GPU from what it is given next for a while."""
    torch.cuda._sleep(200_000_000)


def test_a_segment_is_pinned_and_a_second_time_fails_without_harm(moved) -> None:
    _, segment, tensors = moved
    assert segment.is_pinned()
    assert "already" in cuda_copies.pin(segment, tensors[0].device)
    assert torch.isfinite(tensors[0] + 1).all()
    torch.cuda.synchronize()


def test_write_waits_for_what_computes_the_gradient_and_for_the_copy(moved) -> None:
    transfer, segment, tensors = moved
    segment.fill_(-1.0)
    busy()
    gradients = [tensor * 2 for tensor in tensors]
    assert transfer.write(gradients)
    assert torch.equal(segment, flat(gradients))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [0, 3, 4, 5])
def test_the_device_looks_for_nan_and_inf(moved, bad: float, where: int) -> None:
    transfer, _, tensors = moved
    gradients = [tensor.clone() for tensor in tensors]
    gradients[where][-1] = bad
    assert not transfer.write(gradients)
    assert transfer.write([torch.full_like(tensor, 3e38) for tensor in tensors])


def test_put_does_not_wait_and_a_gradient_let_go_of_is_still_copied(moved) -> None:
    transfer, segment, tensors = moved
    transfer.write(tensors)  # what is used for the first time is loaded, which waits
    segment.zero_()
    busy()
    for index in range(4):
        gradient = torch.full_like(tensors[index], index + 1.0)
        transfer.put({index: gradient})
        del gradient
        torch.full_like(tensors[index], -9.0)  # would get its memory
    assert not segment.any(), "put waited"
    transfer.put({4: tensors[4], 5: tensors[5]})
    assert transfer.finish()
    expected = torch.arange(1.0, 5.0).repeat_interleave(4_000_000)
    assert torch.equal(segment[: 4 * 4_000_000], expected)


def test_what_follows_load_sees_the_new_parameters_and_settle_waits_for_it(moved) -> None:
    transfer, segment, tensors = moved
    segment.fill_(3.0)
    busy()
    transfer.load()
    sums = [tensor.mean() for tensor in tensors]
    transfer.settle()
    segment.fill_(4.0)  # as a shard would
    assert [round(value.item(), 3) for value in sums] == [3.0] * len(tensors)


def trained(
    folder: Path, device: str, overlap: bool, policy: str, servers: int = 2, place: str = "auto"
) -> dict[str, torch.Tensor]:
    file = folder / f"{device}-{overlap}.safetensors"
    arguments = [device, str(overlap), str(file), policy, str(servers), place]
    script = [sys.executable, str(ROOT / "tests/live/gpu_script.py"), *arguments]
    done = subprocess.run(script, capture_output=True, text=True, timeout=110, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "slow" not in done.stderr
    assert ("where the models are" in done.stdout) == (device == "cuda" and place == "auto"), done.stdout
    return load_file(file)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("place", ["auto", "cpu"])
def test_a_live_run_on_the_gpu_equals_one_on_the_cpu(servers: int, place: str, tmp_path: Path) -> None:
    """Under one server the parameters come from the vector that it steps, under two from a segment of one's own."""
    reference = trained(tmp_path, "cpu", False, "bsp", servers)
    for overlap in (False, True):
        found = trained(tmp_path, "cuda", overlap, "bsp", servers, place)
        for name, value in reference.items():
            assert torch.allclose(value, found[name], atol=1e-9), name


@pytest.mark.parametrize("order", ["parallel", "serial"])
def test_peers_on_the_gpu_equal_those_on_the_cpu(order: str, tmp_path: Path) -> None:
    """Steps are taken on the device, averages in shared memory; a gradient is not finite, and a step is skipped."""
    policy = f"hop:graph=complete,order={order}"
    reference, found = (trained(tmp_path, device, False, policy) for device in ("cpu", "cuda"))
    for name, value in reference.items():
        assert torch.allclose(value, found[name], atol=1e-9), name


def test_adpsgd_on_the_gpu_comes_to_its_end(tmp_path: Path) -> None:
    """Who averages with whom is a matter of time; the parameters are numbers, and not those of the start."""
    found = trained(tmp_path, "cuda", False, "adpsgd:graph=complete")
    assert all(torch.isfinite(value).all() for value in found.values())


def test_a_peer_on_the_gpu_keeps_its_tensors_and_sends_what_it_holds() -> None:
    """What is lent stays as it was while the model goes on; the model is where it was."""
    tensors = [torch.full((5,), 1.0, device="cuda"), torch.full((2, 3), 1.0, device="cuda")]
    layout = layout_of((str(index), tensor, 0) for index, tensor in enumerate(tensors))
    folder = shared_memory.RunFolder()
    try:
        slot_pool = SlotPool(folder.path, (0, 0), layout, 2)
        slot_pool.members = {0: 0, 1: 0}
        values = PeerParameters(tensors, slot_pool)
        values.slot.values.fill_(2.0)
        values.load()
        assert [tensor.mean().item() for tensor in tensors] == [2.0, 2.0]
        lent = values.publish(1)
        slot_pool.lend(lent, 1)
        places = [tensor.data_ptr() for tensor in tensors]
        values.step(lambda: torch._foreach_add_(tensors, 1.0))
        other = SlotPool(folder.path, (1, 0), layout, 2)
        theirs = other.slots[other.claim()]
        theirs.values.fill_(5.0)
        values.average(0.5, [theirs], [0.5])
        assert [tensor.mean().item() for tensor in tensors] == [4.0, 4.0]
        assert flat(tensors).tolist() == values.fetch().tolist()
        assert set(slot_pool.slots[lent].values.tolist()) == {2.0}, "a neighbour may still read it"
        assert [tensor.data_ptr() for tensor in tensors] == places
    finally:
        folder.remove()


def test_a_pass_is_given_up_although_the_host_could_run_ahead(tmp_path: Path) -> None:
    """The word comes when the device has done a third: paced, there are hooks left that see it. Same bits then."""
    device = torch.device("cuda", torch.cuda.current_device())

    def make() -> nn.Module:
        torch.manual_seed(1)
        layers = [layer for _ in range(20) for layer in (nn.Linear(2048, 2048), nn.ReLU(inplace=True), nn.Dropout(0.1))]
        return nn.Sequential(*layers, nn.BatchNorm1d(2048)).to(device)

    x = torch.randn(8192, 2048, device=device)

    def run(net: nn.Module) -> torch.Tensor:
        loss = net(x).pow(2).mean()
        loss.backward()
        return loss

    expected, net, timed = make(), make(), make()
    torch.manual_seed(3)
    run(expected)
    torch.cuda.synchronize()
    started = time.monotonic()
    run(timed)
    torch.cuda.synchronize()
    usual_s = time.monotonic() - started
    live = Alone(tmp_path)
    aborting = abortable(live, list(net.parameters()), net)
    torch.manual_seed(3)
    timer = threading.Timer(usual_s / 3, lambda: aborting.flag.set(ITERATION))
    timer.start()
    aborting.run(lambda: run(net), 0.0)
    timer.join()
    assert live.times_begun == 2
    for one, other in zip(net.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    for one, other in zip(net.buffers(), expected.buffers(), strict=True):
        assert torch.equal(one, other)
    aborting.close()
