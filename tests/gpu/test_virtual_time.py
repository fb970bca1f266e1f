"""Virtual time on a GPU: gradients are those of the plain loop, equal seeds give equal runs, nothing is left there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline import cli, simulate, workloads
from paceline.runtime.virtual.cuda_graphs import LANES, Replayed
from paceline.runtime.virtual.gradients import Batched, Gradients, OneByOne, Way, ways_to_compute
from paceline.tensors.devices import deterministic
from paceline.tensors.layout import Layout, flatten, layout_of
from paceline.workloads.base import Workload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")]

GPU = torch.device("cuda", 0)
RESNET = "fashion-resnet20:data=synthetic,width=8"
VGG = "fashion-vgg:data=synthetic,connected=64"
TEXT = "char-transformer:width=16,layers=1,context=16"
RATINGS = "matrix-factorization:data=100k"


def digits_like(make_module) -> Workload:
    """Returns a workload of vectors with 64 numbers and ten classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 64, generator=generator)
    y = (x @ torch.randn(64, 10, generator=generator)).argmax(1)
    return Workload("own", make_module, nn.functional.cross_entropy, (x, y), (x, y), 8, "sgd:lr=0.1")


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


class Looks(nn.Module):
    """A module whose computation depends on a value, which neither vmap nor a graph can do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out * 2 if out.sum().item() > 0 else out


def setting(workload: Workload, rows: int) -> tuple[Workload, nn.Module, Layout, tuple[torch.Tensor, ...]]:
    """Returns what ways are made from, in float64, and what they are called with."""
    workload = workload.on(GPU)
    module = workload.module(0, torch.float64).to(GPU)
    layout = layout_of((name, value, 0) for name, value in module.named_parameters())
    flat = layout.empty(GPU)
    flatten(list(module.parameters()), layout.views(flat))
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(rows, layout.numel, generator=generator, dtype=torch.float64)
    samples = torch.randint(0, len(workload.train[0]), (rows, 5), generator=generator).to(GPU)
    x, y = (t.double() if t.is_floating_point() else t for t in (part[samples] for part in workload.train))
    return workload, module, layout, (flat + 0.01 * noise.to(GPU), x, y)


@pytest.mark.parametrize("name", [RESNET, VGG, TEXT, RATINGS, "svm", "quadratic"])
def test_all_ways_give_the_gradients_of_the_plain_loop(name: str) -> None:
    *parts, called = setting(workloads.load(name), 2 * LANES + 3)
    plain = OneByOne(*parts)(*called)
    for way in (Replayed(*parts), Batched(*parts)):
        assert torch.allclose(way(*called), plain, atol=1e-10), way.name
        assert torch.allclose(way(*(part[:3] for part in called)), plain[:3], atol=1e-10), "fewer rows than before"


def test_models_with_convolutions_are_replayed_first() -> None:
    def names(workload: Workload) -> list[str]:
        return [way.name for way in ways_to_compute(*setting(workload, 1)[:3])]

    assert names(workloads.load(RESNET)) == ["CUDA graphs", "vmap", "one by one"]
    assert names(workloads.load(TEXT)) == ["vmap", "CUDA graphs", "one by one"]


def test_a_module_with_buffers_has_one_stream_and_its_statistics_are_those_of_the_loop() -> None:
    statistics = []
    for make in (Replayed, OneByOne):
        *parts, called = setting(digits_like(Normed), 6)
        way: Way = make(*parts)
        found = way(*called)
        way(*called)
        statistics.append((found, *parts[1].buffers()))
        if isinstance(way, Replayed):
            assert [len(lanes) for lanes in way.lanes.values()] == [1]
    for ours, theirs in zip(*statistics, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-10)
    assert statistics[0][3] == 12, "two computations were no part of a run: those before the recording"


def used(workload: Workload, device: torch.device = GPU) -> list[str]:
    """Returns the ways that are left after some gradients."""
    workload, module, layout, (parameters, x, y) = setting(workload, 4)
    gradients = Gradients(workload, module, layout, layout.slices(1))
    for _ in range(2):
        gradients._gradients(parameters, x, y)
    return [way.name for way in gradients.ways]


def test_what_one_way_cannot_compute_the_next_does() -> None:
    assert used(digits_like(Looks)) == ["one by one"]
    assert used(digits_like(Normed)) == ["CUDA graphs", "one by one"]
    assert used(digits_like(lambda: nn.Linear(64, 10)))[0] == "vmap", "a recording that failed leaves the GPU usable"


DROPOUT = digits_like(lambda: nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10)))
NORMED_DROPOUT = digits_like(lambda: nn.Sequential(Normed(), nn.Dropout(0.2)))


@pytest.mark.parametrize(
    "workload",
    [RESNET, VGG, TEXT, RATINGS, "svm", pytest.param(DROPOUT, id="dropout"), pytest.param(NORMED_DROPOUT, id="both")],
)
@pytest.mark.parametrize("policy", ["asp", "hop:graph=ring"])
def test_equal_seeds_give_equal_runs_to_the_bit(workload: str | Workload, policy: str) -> None:
    def run(seed: int):
        return simulate(workload, policy, workers=12, iterations=6, cluster="random-slowdown", seed=seed, device="cuda")

    first, second, other = run(0), run(0), run(1)
    assert first.history == second.history
    for name, value in first.parameters.items():
        assert not value.is_cuda
        assert torch.equal(value, second.parameters[name]), name
    assert any(not torch.equal(value, other.parameters[name]) for name, value in first.parameters.items())


@pytest.mark.parametrize("policy", ["bsp", "ssp:staleness=3", "backup:extra=1", "pssp:c=0.3", "adpsgd:graph=ring"])
@pytest.mark.parametrize("optimizer", ["sgd:lr=0.1", "adam:lr=0.01,ema=0.9,clip=1", "adafactor:lr=0.01"])
def test_a_gpu_learns_what_the_cpu_learns(policy: str, optimizer: str) -> None:
    workload = digits_like(lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))

    def run(device: str):
        return simulate(
            workload, policy, workers=5, servers=None if policy[:2] == "ad" else 2, iterations=10,
            optimizer=optimizer, dtype="float64", device=device,
        )  # fmt: skip

    ours, theirs = run("cuda"), run("cpu")
    assert ours.time_s == theirs.time_s
    for name, value in ours.parameters.items():
        assert torch.allclose(value, theirs.parameters[name], atol=1e-8), name
    assert ours.history[-1].loss == pytest.approx(theirs.history[-1].loss)


def test_a_second_gpu_that_is_not_there_is_one_line(capsys) -> None:
    assert cli.run(["simulate", "--workload", "quadratic", "--device", "cuda:64"]) == 2
    assert "device=cuda:64: this machine has no such GPU" in capsys.readouterr().err


def test_the_command_runs_on_the_gpu_and_settings_are_as_before(capsys) -> None:
    benchmark, deterministic_before = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    assert cli.run(["compare", "bsp", "asp", "--workload", RESNET, "--iterations", "3", "--device", "cuda"]) == 0
    assert "data: 10000 synthetic images" in capsys.readouterr().out
    assert torch.backends.cudnn.benchmark == benchmark
    assert torch.are_deterministic_algorithms_enabled() == deterministic_before


def test_an_operation_without_a_deterministic_form_is_named() -> None:
    with deterministic(GPU) as met:
        torch.zeros(4, device=GPU).put_(torch.tensor([0, 0], device=GPU), torch.ones(2, device=GPU), accumulate=False)
        torch.histc(torch.rand(100, device=GPU), 10)
    assert any("histc" in name for name in met)
