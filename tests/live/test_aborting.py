"""Giving up a forward or backward pass: it ends soon, and its second run is as if there had not been a first."""

from __future__ import annotations

import copy
import gc
import io
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.api import Job, train_job_live
from paceline.cluster import Fault
from paceline.cluster.models import LogNormal
from paceline.core.actions import AbortCompute, Compute, Send
from paceline.core.events import ComputeAborted, GradientReady, PullArrived, PushArrived
from paceline.core.messages import Resync, View
from paceline.runtime.live.storage import abort_flag
from paceline.runtime.live.storage.abort_flag import AbortFlag, AbortFlags
from paceline.runtime.live.system.training_end import TrainingEnd
from paceline.runtime.live.trainer.sample_leases import SampleLeases
from paceline.runtime.live.worker.abortable_step import AbortableStep, Aborted

ITERATION = 3


class Alone:
    """A worker without a run: `begin_again` puts the fresh parameters into the model."""

    def __init__(self, folder: Path, begin_again: Callable[[], None] = lambda: None) -> None:
        self.run = SimpleNamespace(folder=folder, rank=0, incarnation=0)
        self.ordered = Compute(ITERATION, 0)
        self.times_begun = 1
        self.end = TrainingEnd()
        self.leases = SampleLeases(self.run, self.end, lambda: None)  # type: ignore[arg-type]
        self.fresh = begin_again

    def begin_again(self) -> None:
        assert self.times_begun == 1, "aborted twice"
        self.times_begun += 1
        self.ordered = Compute(ITERATION, 1)
        self.fresh()

    def stretch(self, started: float, look: Callable[[], None] | None = None) -> None:
        """No scenario."""


def abortable(live: Alone, tensors: list[torch.Tensor], module: nn.Module | None) -> AbortableStep:
    flag = AbortFlag(abort_flag.path(live.run.folder, 0, 0), create=True)
    return AbortableStep(live, live.leases, flag, 0, tensors, module)


class Mark(torch.autograd.Function):
    """The identity, which says when backward passes it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, passed: Callable[[], None]) -> torch.Tensor:
        ctx.passed = passed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.passed()
        return gradient, None


class Layer(nn.Module):
    """A layer that says when it runs, forward and backward."""

    def __init__(self, inner: nn.Module, note: Callable[[str], None]) -> None:
        super().__init__()
        self.inner = inner
        self.note = note

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note("forward")
        y = self.inner(x)
        return Mark.apply(y, lambda: self.note("backward")) if torch.is_grad_enabled() else y


class Net(nn.Module):
    """Batch norm, in-place ReLU, dropout and both kinds of checkpointing."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self.stem = nn.Sequential(Layer(nn.Conv2d(1, 4, 3), note), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                Layer(nn.Conv2d(4, 4, 3, padding=1), note), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3)
            )
            for _ in range(3)
        )
        self.head = nn.Sequential(nn.Flatten(), Layer(nn.Linear(144, 8), note), nn.ReLU(inplace=True), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.blocks[0](x)
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        x = checkpoint(self.blocks[2], x, use_reentrant=True)
        return self.head(x) * (1 + random.random() + float(np.random.random()))


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Tiny tensors, and other tests on the machine: one thread. Generators are left as they were."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


X, Y = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0, 1, 2])


def make(note: Callable[[str], None], parameters_of: int) -> Net:
    """Buffers are always the same; parameters are those of a seed."""
    torch.manual_seed(parameters_of)
    net = Net(note)
    with torch.no_grad():
        for buffer in net.buffers():
            buffer.fill_(2)
    return net


def seed_all() -> None:
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)


def everything(net: nn.Module, loss: torch.Tensor) -> list[Any]:
    """What must come out equal."""
    gradients = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    buffers = [buffer.clone() for buffer in net.buffers()]
    states = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]
    return [loss.detach().clone(), gradients, buffers, states]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def close_over(net: nn.Module, zero: Callable[[], None]) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        zero()
        loss = nn.functional.cross_entropy(net(X), Y)
        loss.backward()
        return loss

    return closure


def run_plain(parameters_of: int, zero: bool) -> tuple[list[Any], list[str]]:
    """One pass that nobody interrupts, and the layers it passes."""
    passed: list[str] = []
    net = make(passed.append, parameters_of)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    seed_all()
    return everything(net, close_over(net, net.zero_grad if zero else lambda: None)()), passed


@pytest.mark.parametrize("clears", ["the model", "the optimizer", "nobody"])
def test_the_second_run_equals_one_that_began_with_the_fresh_parameters(tmp_path: Path, clears: str) -> None:
    """Interrupted at every layer, forward, recomputed and backward. And at most one further layer runs then."""
    expected, layers = run_plain(parameters_of=9, zero=clears != "nobody")
    assert Counter(layers) == {"forward": 5 + 2, "backward": 5}, "two blocks are computed again"
    for place in range(len(layers)):
        passed: list[str] = []

        def note(direction: str, passed: list[str] = passed, place: int = place) -> None:
            passed.append(direction)
            if len(passed) == place + 1:
                AbortFlag(abort_flag.path(tmp_path, 0, 0)).set(ITERATION)

        stale, fresh = make(note, 1), make(passed.append, 9)

        def refresh(stale: Net = stale, fresh: Net = fresh, passed: list[str] = passed, place: int = place) -> None:
            assert len(passed) <= place + 2, "at most one further layer ran"
            for parameter in stale.parameters():
                before = None if clears == "the optimizer" else torch.ones_like(parameter)
                assert equal(parameter.grad, before), "no half gradient"
            with torch.no_grad():
                for mine, theirs in zip(stale.parameters(), fresh.parameters(), strict=True):
                    mine.copy_(theirs)

        live = Alone(tmp_path, refresh)
        aborting = abortable(live, list(stale.parameters()), stale)
        for parameter in stale.parameters():
            parameter.grad = torch.ones_like(parameter)
        seed_all()

        def zero(stale: Net = stale, aborting: AbortableStep = aborting) -> None:
            if clears == "the optimizer":
                aborting.rewind.before_clearing()
            if clears != "nobody":
                stale.zero_grad()

        loss = aborting.run(close_over(stale, zero), time.monotonic())
        assert live.times_begun == 2
        assert equal(everything(stale, loss), expected), place
        aborting.close()
        abort_flag.path(tmp_path, 0, 0).unlink()


def linear_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(8, 2))


def ringing(net: nn.Module, folder: Path, tensor: bool) -> Callable[[], torch.Tensor]:
    """A closure that is interrupted at its first run: in forward, or in backward at a tensor's hook."""
    inputs, rung = torch.randn(5, 4), []

    def closure() -> torch.Tensor:
        if not rung and not tensor:
            rung.append(AbortFlag(abort_flag.path(folder, 0, 0)).set(ITERATION))
        output = net(inputs)
        if not rung:
            rung.append(output.register_hook(lambda gradient: AbortFlag(abort_flag.path(folder, 0, 0)).set(ITERATION)))
        output.sum().backward()
        return output.sum()

    return closure


class TestAborting:
    def test_without_the_model_backward_is_interrupted(self, tmp_path: Path) -> None:
        net = linear_net()
        live = Alone(tmp_path)
        aborting = abortable(live, list(net.parameters()), None)
        aborting.run(ringing(net, tmp_path, tensor=False), 0.0)
        assert live.times_begun == 2
        aborting.close()

    def test_a_word_for_another_iteration_means_nothing(self, tmp_path: Path) -> None:
        net, live = linear_net(), Alone(tmp_path)
        aborting = abortable(live, list(net.parameters()), net)
        for iteration in (ITERATION - 1, ITERATION + 1):
            aborting.flag.set(iteration)
            aborting.run(close_over_sum(net), 0.0)
        assert live.times_begun == 1
        aborting.close()

    def test_outside_of_step_nothing_is_raised(self, tmp_path: Path) -> None:
        net, live = linear_net(), Alone(tmp_path)
        aborting = abortable(live, list(net.parameters()), net)
        aborting.flag.set(ITERATION)
        net(torch.zeros(3, 4)).sum().backward()
        aborting.close()
        net(torch.zeros(3, 4)).sum().backward()

    @pytest.mark.parametrize("way", ["goes on", "wraps", "returns"])
    def test_a_script_that_catches_everything_does_not_push_half_a_gradient(self, tmp_path: Path, way: str) -> None:
        net, live = linear_net(), Alone(tmp_path)
        aborting = abortable(live, list(net.parameters()), net)
        inner, runs = ringing(net, tmp_path, tensor=True), []

        def closure() -> Any:
            runs.append(1)
            try:
                return inner()
            except BaseException:
                if way == "wraps":
                    raise RuntimeError("something went wrong") from None
                return inner() if way == "goes on" else "half"

        assert isinstance(aborting.run(closure, 0.0), torch.Tensor)
        assert (live.times_begun, len(runs)) == (2, 2)
        aborting.close()

    def test_an_error_of_the_script_is_its_own(self, tmp_path: Path) -> None:
        net, live = linear_net(), Alone(tmp_path)
        aborting = abortable(live, list(net.parameters()), net)
        with pytest.raises(ZeroDivisionError):
            aborting.run(lambda: 1 / 0, 0.0)
        net(torch.zeros(3, 4))
        assert aborting.awaited == -1
        aborting.close()

    def test_after_an_error_in_the_second_run_a_further_one_is_not_given_up(self, tmp_path: Path) -> None:
        net, live = linear_net(), Alone(tmp_path)
        aborting = abortable(live, list(net.parameters()), net)
        aborting.flag.set(ITERATION)

        def closure() -> None:
            net(torch.ones(3, 4))
            raise StopIteration

        with pytest.raises(StopIteration):
            aborting.run(closure, 0.0)
        assert live.times_begun == 2
        aborting.run(close_over_sum(net), 0.0)
        assert live.times_begun == 2
        aborting.close()

    def test_a_buffer_that_was_replaced_is_put_back(self, tmp_path: Path) -> None:
        net = linear_net()
        net.register_buffer("seen", torch.zeros(1))
        net.register_forward_pre_hook(lambda module, inputs: setattr(net, "seen", net.seen + 1))
        seen = net.seen
        aborting = abortable(Alone(tmp_path), list(net.parameters()), net)
        aborting.run(ringing(net, tmp_path, tensor=True), 0.0)
        assert (float(seen), float(net.seen)) == (0, 1)
        aborting.close()

    @pytest.mark.parametrize("to_none", [True, False])
    def test_gradients_that_are_added_to_and_cleared_later_are_put_back(self, tmp_path: Path, to_none: bool) -> None:
        """The closure takes what it has added up of one layer, and the other layer's as they were."""

        def run(folder: Path, rung: bool) -> list[torch.Tensor]:
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
            folder.mkdir()
            live = Alone(folder)
            aborting = abortable(live, list(net.parameters()), net)
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter)

            def closure() -> None:
                net[1](torch.ones(1, 2)).sum().backward()
                taken = [parameter.grad.clone() for parameter in net.parameters()]
                aborting.rewind.before_clearing()
                net.zero_grad(to_none)
                if rung and live.times_begun == 1:
                    aborting.flag.set(ITERATION)
                net(torch.ones(1, 2)).pow(2).sum().backward()
                for parameter, before in zip(net.parameters(), taken, strict=True):
                    parameter.grad += before

            aborting.run(closure, 0.0)
            assert live.times_begun == 1 + rung
            aborting.close()
            return [parameter.grad for parameter in net.parameters()]

        assert equal(run(tmp_path / "plain", False), run(tmp_path / "aborted", True))

    @pytest.mark.parametrize("changes", [False, True])
    def test_a_buffer_whose_elements_share_memory(self, tmp_path: Path, changes: bool) -> None:
        net = linear_net()
        place = torch.ones(1, 1)
        net.register_buffer("mask", place.expand(3, 4))
        if changes:
            net[0].register_forward_hook(lambda module, inputs, output: output + 0 * place.add_(1))
        aborting = abortable(Alone(tmp_path), list(net.parameters()), net)
        aborting.run(ringing(net, tmp_path, tensor=True), 0.0)
        assert equal(net.mask, torch.full((3, 4), 2.0 if changes else 1.0)), "of two passes one counts"
        assert net.mask.data_ptr() == place.data_ptr()
        aborting.close()

    @pytest.mark.parametrize("way", ["average", "copy", "save"])
    def test_the_model_is_copied_without_the_run(self, tmp_path: Path, way: str) -> None:
        net, live = linear_net(), Alone(tmp_path)
        aborting = abortable(live, list(net.parameters()), net)
        aborting.computation.run.driver = socket.socket()
        if way == "average":
            other: nn.Module = AveragedModel(net)
        elif way == "copy":
            other = copy.deepcopy(net)
        else:
            file = io.BytesIO()
            torch.save(net, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
        aborting.flag.set(ITERATION)

        def evaluate() -> str:
            other(torch.zeros(3, 4)).sum().backward()
            return "done"

        assert aborting.run(evaluate, 0.0) == "done"
        assert live.times_begun == 1, "a copy's computations are not the run's"
        aborting.run(close_over_sum(net), 0.0)
        assert live.times_begun == 2, "the model's are"
        aborting.computation.run.driver.close()
        aborting.close()

    @pytest.mark.parametrize("tensor", [False, True], ids=["forward", "backward"])
    def test_three_thousand_aborts_leave_nothing(self, tmp_path: Path, tensor: bool) -> None:
        net = linear_net()
        live = Alone(tmp_path)
        aborting = abortable(live, list(net.parameters()), net)

        def abort() -> None:
            live.ordered, live.times_begun = Compute(ITERATION, 0), 1
            aborting.flag.set(0)
            aborting.run(ringing(net, tmp_path, tensor), 0.0)
            assert live.times_begun == 2

        def things() -> tuple[int, int]:
            gc.collect()
            found = gc.get_objects()
            return len(found), sum(issubclass(type(thing), torch.Tensor) for thing in found)

        for _ in range(100):
            abort()
        before, resident = things(), resident_kb()
        for _ in range(1500):
            abort()
        after = things()
        assert after[1] == before[1], "tensors"
        assert after[0] <= before[0] + 20, "objects"
        assert resident_kb() < resident + 4_000
        aborting.close()


def resident_kb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def close_over_sum(net: nn.Module) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        loss = net(torch.ones(3, 4)).sum()
        loss.backward()
        return loss

    return closure


class TestBells:
    def test_ring_who_is_there(self, tmp_path: Path) -> None:
        mine = AbortFlag(abort_flag.path(tmp_path, 1, 2), create=True)
        flags = AbortFlags(tmp_path)
        flags.set(Resync(1, 1, 5))
        assert mine.word[0] == 0
        flags.set(Resync(1, 2, 5))
        assert mine.word[0] == 6
        flags.announce(View(2, ((0, 0),)))
        assert not flags.flags
        mine.close()


def slow_net() -> nn.Module:
    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.002)
            return x

    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.ReLU(inplace=True), Slow())]
    return nn.Sequential(*layers, nn.BatchNorm1d(6), nn.Linear(6, 1))


def work(iterations: int, closed: bool = True, overlap: bool = False) -> Callable[[], None]:
    def train() -> None:
        torch.manual_seed(0)
        model = slow_net()
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model, overlap=overlap)
        for step in range(iterations):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                opt.zero_grad()
                loss = model(x).pow(2).mean()
                loss.backward()
                return loss

            if closed:
                opt.step(closure)
            else:
                closure()
                opt.step()

    return train


SPECULATIVE = "specsync:abort_time=0.003,abort_rate=0"


@pytest.mark.parametrize("policy", [SPECULATIVE, "specsync:base=ssp(staleness=2),abort_time=0.003,abort_rate=0"])
def test_in_a_run_computations_are_given_up_and_done_again(policy: str) -> None:
    run = paceline.launch(work(25), workers=3, servers=2, policy=policy)
    assert run.failures == []
    assert run.replay() == []
    aborts = [r for r in run.trace if isinstance(r.event, ComputeAborted)]
    assert len(aborts) > 5
    ready = Counter((r.node.rank, r.event.iteration) for r in run.trace if isinstance(r.event, GradientReady))
    assert set(ready.values()) == {1}
    assert len(ready) == 3 * 25
    given: dict[tuple[int, int], int] = {}
    for record in run.trace:
        if record.node.role != "server":
            continue
        if isinstance(record.event, PushArrived):
            handle = record.event.push.handle
            assert handle.version == given[record.node.rank, handle.source], "computed on what was given last"
        for action in record.actions:
            if (parameters := getattr(action, "parameters", None)) is not None:
                given[record.node.rank, parameters.worker] = parameters.version
    again = [r for r in run.trace if isinstance(r.event, PullArrived) and r.event.pull.attempt]
    assert len(again) == 2 * len(aborts)


def test_a_sleep_that_stands_for_computing_is_cut_short() -> None:
    """The workload computes for a millisecond; the rest of its 60 or so is the scenario's."""
    policy = "specsync:abort_time=0.01,abort_rate=0"
    uneven = LogNormal(compute_s=0.06, sigma=0.3)  # in step, nobody would push while another is looked at
    run = train_job_live(Job("quadratic", policy, 3, 1, uneven, 25, None, None, None, 0))
    assert run.failures == []
    assert run.replay() == []
    aborted = [r for r in run.trace if isinstance(r.event, ComputeAborted)]
    assert len(aborted) > 5
    begun = {
        (r.node.rank, a.iteration): r.event.at
        for r in run.trace
        for a in r.actions
        if isinstance(a, Compute) and a.attempt == 0
    }
    lost = [r.event.at - begun[r.node.rank, r.event.iteration] for r in aborted if isinstance(r.event, ComputeAborted)]
    assert 0.01 <= sorted(lost)[len(lost) // 2] < 0.06, "after ABORT_TIME, before it would have been done"


def test_workers_may_die_and_come_back() -> None:
    faults = (Fault("restart", 1, at_iteration=5, for_s=0.1), Fault("crash", 2, at_iteration=8))
    cluster = LogNormal(compute_s=0.03, sigma=0.2, faults=faults)
    policy = "specsync:base=ssp(staleness=3),abort_time=0.01,abort_rate=0"
    run = train_job_live(Job("quadratic", policy, 4, 2, cluster, 15, None, None, None, 0))
    assert run.replay() == []
    lives = {(r.node.rank, r.incarnation) for r in run.trace if isinstance(r.event, GradientReady)}
    assert lives >= {(0, 0), (1, 1), (3, 0)}, "of the killed ones the last records are lost"
    assert sum(isinstance(r.event, ComputeAborted) for r in run.trace) > 5


@pytest.mark.parametrize(
    ("closed", "overlap", "line"),
    [(False, False, "step() without a closure"), (True, True, "overlap=True")],
    ids=["no closure", "overlap"],
)
def test_what_cannot_be_interrupted_is_said_once_and_left_alone(
    capfd: pytest.CaptureFixture[str], closed: bool, overlap: bool, line: str
) -> None:
    run = paceline.launch(work(30, closed, overlap), workers=3, servers=1, policy=SPECULATIVE)
    assert run.failures == []
    told = [action for r in run.trace for action in r.actions if isinstance(action, Send)]
    assert any(isinstance(send.message, Resync) for send in told), "they were told to"
    assert not any(isinstance(action, AbortCompute) for r in run.trace for action in r.actions)
    assert capfd.readouterr().err.count(f"specsync cannot interrupt {line}: its re-syncs are ignored") == 1


def test_aborted_is_no_exception_that_a_script_would_catch() -> None:
    assert not issubclass(Aborted, Exception)
