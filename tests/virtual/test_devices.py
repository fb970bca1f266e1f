"""Devices by name, data that move to them, and how gradients are computed where a way fails or memory is out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from paceline import cli, simulate, workloads
from paceline.api import Job, train_job_live
from paceline.errors import ConfigError, PacelineError
from paceline.reproductions import CATALOGUE, find
from paceline.runtime.virtual import cuda_graphs, tensor_backends
from paceline.runtime.virtual.cuda_graphs import Lane, Replayed
from paceline.runtime.virtual.gradients import Gradients, OneByOne, ways_to_compute
from paceline.tensors.device_optimizer import DeviceOptimizer
from paceline.tensors.devices import CPU, check_device, deterministic
from paceline.tensors.layout import flatten, layout_of
from paceline.workloads.base import Workload, moved

WITHOUT_GRADIENTS = ("zipline-search", "fluentps-overlap")


def test_the_cpu_is_a_device_and_others_must_be_there(monkeypatch) -> None:
    assert check_device("cpu") == CPU
    for name in ("gpu", "cuda:", "cuda:x", "meta", "CPU", ""):
        with pytest.raises(ConfigError, match=r"unknown device .* \(known: cpu, cuda"):
            check_device(name)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device=cuda: this machine has no such GPU, torch finds none"):
        check_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert check_device("cuda:1") == torch.device("cuda", 1)
    assert check_device("cuda") == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="device=cuda:2: this machine has no such GPU, it has 2"):
        check_device("cuda:2")


@pytest.mark.parametrize(
    "command",
    [
        "simulate --workload quadratic --device gpu",
        "compare bsp --workload quadratic --device gpu",
        "reproduce hop-skip --device gpu",
        "bench gradients --device gpu",
    ],
)
def test_a_device_that_is_none_is_one_line(command: str, capsys) -> None:
    assert cli.run(command.split()) == 2
    assert capsys.readouterr().err.splitlines() == [
        "paceline: unknown device 'gpu' (known: cpu, cuda, cuda:0, cuda:1, ...)"
    ]


def test_without_cuda_in_torch_one_line_says_so(monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(ConfigError, match=r"device=cuda: torch \S+ was built without CUDA"):
        simulate("quadratic", device="cuda")


def test_live_comparisons_have_no_device(monkeypatch) -> None:
    monkeypatch.setattr("paceline.api.check_device", torch.device)
    job = Job("quadratic", "bsp", 2, 1, "steady", 5, None, None, None, 0, device="cuda")
    with pytest.raises(ConfigError, match="device=cuda is for virtual time"):
        train_job_live(job)


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name not in WITHOUT_GRADIENTS])
def test_every_reproduction_computes_where_it_is_told(name: str, monkeypatch) -> None:
    def refuse(device: str) -> torch.device:
        raise ConfigError(f"asked for {device}")

    monkeypatch.setattr("paceline.api.check_device", refuse)
    with pytest.raises(ConfigError, match="asked for cuda:3"):
        find(name, "cuda:3").measure(0, print)


def test_windows_of_a_text_share_memory_after_they_have_moved() -> None:
    text = torch.arange(40)
    windows = text.unfold(0, 9, 1)[3:, :-1]
    assert torch.equal(moved(windows, CPU), windows)
    assert moved(windows, torch.device("meta")).untyped_storage().nbytes() == text.nbytes
    part = torch.arange(40.0)[5:20]
    assert torch.equal(moved(part, CPU), part)
    assert moved(part, torch.device("meta")).untyped_storage().nbytes() == part.nbytes
    workload = workloads.load("char-transformer:width=16,layers=1,context=16").on(torch.device("meta"))
    assert workload.train[0].untyped_storage().nbytes() < 200_000
    assert workload.test[1].device.type == "meta"


def test_a_loss_that_is_a_module_moves_as_a_copy() -> None:
    data = torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)
    workload = Workload("own", lambda: nn.Linear(3, 2), nn.CrossEntropyLoss(torch.tensor([1.0, 2.0])), data, data)
    for device in (torch.device("meta"), CPU):
        assert workload.on(device).loss.weight.device == device
    assert workload.loss.weight.tolist() == [1.0, 2.0]


def test_on_the_cpu_no_setting_of_torch_is_touched() -> None:
    with deterministic(CPU) as met:
        assert not torch.are_deterministic_algorithms_enabled()
    assert met == set()


# Gradients where something goes wrong.


def gradients_of(workload: Workload, workers: int) -> Gradients:
    module = workload.module(0)
    layout = layout_of((name, value, 0) for name, value in module.named_parameters())
    flat = layout.empty()
    flatten(list(module.parameters()), layout.views(flat))
    gradients = Gradients(workload, module, layout, layout.slices(1))
    for worker in range(workers):
        gradients.order((worker, 0, 0), flat + worker, np.arange(4) + worker)
    return gradients


class Cramped(OneByOne):
    """Computes one by one, with memory for so many at once."""

    def __init__(self, *given, room: int) -> None:
        super().__init__(*given)
        self.room = room
        self.rows: list[int] = []

    def __call__(self, parameters, x, y):
        if len(parameters) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has none.")
        self.rows.append(len(parameters))
        return super().__call__(parameters, x, y)


def cramped(workers: int, room: int) -> tuple[Gradients, Cramped]:
    gradients = gradients_of(workloads.load("quadratic"), workers)
    loop = gradients.ways[-1]
    assert isinstance(loop, OneByOne)
    way = Cramped(loop.workload, loop.module, loop.layout, room=room)
    gradients.ways[0] = way
    return gradients, way


def test_where_memory_is_out_fewer_are_computed_at_once_and_all_are_there() -> None:
    expected = gradients_of(workloads.load("quadratic"), 11)
    expected._compute()
    gradients, way = cramped(11, room=3)
    gradients._compute()
    assert way.rows == [2, 2, 2, 2, 2, 1], "11, 5 and 2 were tried"
    for key, pending in gradients.pending.items():
        assert pending.gradient is not None
        assert torch.allclose(pending.gradient, expected.pending[key].gradient, atol=1e-5)


def test_where_there_is_no_memory_for_one_gradient_one_line_says_so() -> None:
    gradients, _ = cramped(3, room=0)
    with pytest.raises(PacelineError, match=r"of quadratic failed: OutOfMemoryError: CUDA out of memory.* has none\.$"):
        gradients._compute()


def test_a_way_that_fails_is_not_tried_again() -> None:
    gradients = gradients_of(workloads.load("quadratic"), 3)
    tried = []

    class Fails:
        name = "fails"

        def __call__(self, parameters, x, y):
            tried.append(len(parameters))
            raise RuntimeError("it cannot be recorded")

    gradients.ways.insert(0, Fails())
    gradients._compute()
    gradients.order((7, 0, 0), next(iter(gradients.pending.values())).parameters, np.arange(4))
    gradients._compute()
    assert tried == [3]
    assert [way.name for way in gradients.ways] == ["vmap", "one by one"]


def test_the_cpu_has_no_graphs() -> None:
    workload = workloads.load("fashion-resnet20:data=synthetic,width=8")
    module = workload.module(0)
    layout = layout_of((name, value, 0) for name, value in module.named_parameters())
    assert [way.name for way in ways_to_compute(workload, module, layout)] == ["vmap", "one by one"]


@pytest.mark.parametrize("policy", ["bsp", "asp", "hop:graph=ring"])
@pytest.mark.parametrize("text", ["sgd:lr=0.1,clip_mean=0.5", "adam:lr=0.01,ema=0.9,clip=1", "adafactor:lr=0.01"])
def test_a_device_steps_as_the_cpu_does(text: str, policy: str, monkeypatch) -> None:
    if "clip_mean" in text and policy != "bsp":
        text = text.partition(",")[0]

    def run():
        servers = None if policy[:3] == "hop" else 2
        return simulate("digits-mlp", policy, workers=3, servers=servers, iterations=6, optimizer=text, dtype="float64")

    expected = run()
    monkeypatch.setattr(tensor_backends, "ShardOptimizer", DeviceOptimizer)
    found = run()
    for name, value in found.parameters.items():
        assert torch.allclose(value, expected.parameters[name], atol=1e-10), name
    assert found.average.keys() == expected.average.keys()
    for name, value in found.average.items():
        assert torch.allclose(value, expected.average[name], atol=1e-10), name


# CUDA graphs, with streams that do everything at once.


class AtOnce:
    """A stream, or the context of one, on which nothing is left to wait for."""

    def __init__(self, *_: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class ComputedLane(Lane):
    """A lane that computes again where a graph would be replayed, and counts."""

    replays = 0

    def record(self) -> None:
        self.gradient = self.compute()

    def replay(self, parameters, x, y, gradient) -> None:
        self.replays += 1
        for held, given in ((self.parameters, parameters), (self.x, x), (self.y, y)):
            held.copy_(given)
        gradient.copy_(self.compute())


@pytest.fixture
def without_cuda(monkeypatch) -> None:
    for name in ("Stream", "stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, AtOnce)
    monkeypatch.setattr(torch.cuda, "current_stream", AtOnce)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: torch.set_rng_state(state))
    monkeypatch.setattr(cuda_graphs, "waiting_refused", AtOnce)
    monkeypatch.setattr(cuda_graphs, "Lane", ComputedLane)


def lanes_of(make_module) -> tuple[Replayed, nn.Module]:
    """Replays 19 rows, 3, and 5 with a smaller batch, and compares; returns what did so, and the loop's module."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(40, 6, generator=generator), torch.randint(0, 3, (40,), generator=generator)
    workload = Workload("own", make_module, nn.functional.cross_entropy, data, data)
    modules = [workload.module(0) for _ in range(2)]
    layout = layout_of((name, value, 0) for name, value in modules[0].named_parameters())
    parameters = torch.randn(19, layout.numel, generator=generator)
    samples = torch.randint(0, 40, (19, 5), generator=generator)
    called = parameters, data[0][samples], data[1][samples]
    replayed, loop = Replayed(workload, modules[0], layout), OneByOne(workload, modules[1], layout)
    smaller = parameters, called[1][:, :2], called[2][:, :2]
    for rows, parts in ((19, called), (3, called), (5, smaller)):
        drawn = torch.get_rng_state()
        ours = replayed(*(part[:rows] for part in parts))
        torch.set_rng_state(drawn)
        assert torch.allclose(ours, loop(*(part[:rows] for part in parts)), atol=1e-6)
    return replayed, modules[1]


def test_graphs_share_the_rows_and_each_row_gets_its_own_gradient(without_cuda) -> None:
    class Part(nn.Linear):
        """A layer of which one tensor has no gradient."""

        def __init__(self) -> None:
            super().__init__(6, 3)
            self.unused = nn.Parameter(torch.ones(2))

    replayed, _ = lanes_of(Part)
    assert [[lane.replays for lane in lanes] for lanes in replayed.lanes.values()] == [
        [4, 4, 4, 2, 2, 2, 2, 2],
        [1] * 5,
    ]


def test_one_graph_follows_the_other_where_a_module_keeps_statistics_or_draws(without_cuda) -> None:
    replayed, module = lanes_of(lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    assert [len(lanes) for lanes in replayed.lanes.values()] == [1, 1]
    for ours, theirs in zip(replayed.module.buffers(), module.buffers(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6), "what was computed before the recording has left no trace"
    replayed, _ = lanes_of(lambda: nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)))
    assert [len(lanes) for lanes in replayed.lanes.values()] == [1, 1]
