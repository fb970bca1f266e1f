"""`overlap=True`: the same numbers as without, and a clear line for what it cannot do."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline import workloads
from paceline.errors import PacelineError
from paceline.runtime.live.driver.checkpointing import CheckpointOptions
from paceline.runtime.live.worker import stream_copies
from paceline.runtime.live.worker.staged_gradient import StagedGradient
from paceline.runtime.live.worker.stream_copies import StreamCopies
from paceline.sample_order import SampleOrder
from paceline.tensors.layout import layout_of
from tests.live.late_copy_stream import LateCopyStream
from tests.live.test_recovery import driver_of, last_iterations, meanwhile


def noise(step: int, *shape: int) -> torch.Tensor:
    rank = paceline.init().rank
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + rank))


class Tied(nn.Module):
    """Odd in many ways: a tied weight, used detached as well; a frozen layer; a tensor that is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 6))
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.seldom = nn.Parameter(torch.randn(6))
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Backward needs the weight for `first`, after it has the weight's own gradient.
        hidden = (x @ self.first) @ self.weight.detach()
        hidden = checkpoint(
            lambda h: torch.tanh(h @ self.weight) @ self.weight, self.frozen(hidden), use_reentrant=False
        )
        self.steps += 1
        return hidden * self.seldom if self.steps % 3 else hidden

    def twice(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden @ self.weight) @ self.weight


class Mixed(nn.Module):
    """A gradient that is not contiguous, and one that is expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(5, 6))
        self.summed = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.turned.t()).sum() + self.summed.sum() * x.sum()


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Flatten(), nn.Linear(64, 3),
    )  # fmt: skip


def train(make, shape: tuple[int, ...], overlap: bool, optimizer: str = "SGD", policy: str = "bsp") -> paceline.Run:
    def work() -> None:
        torch.manual_seed(0)
        model = make()
        inner = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
        opt = paceline.Optimizer(inner, model=model, overlap=overlap)
        for step in range(9):
            opt.zero_grad()
            model(noise(step, *shape)).pow(2).mean().backward()
            opt.step()

    run = paceline.launch(work, workers=2, servers=3, policy=policy, timeout_s=60)
    assert run.failures == []
    return run


def assert_equal(one: paceline.Run, other: paceline.Run) -> None:
    a, b = one.model(), other.model()
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize(
    ("make", "shape", "optimizer"),
    [(Tied, (4, 6), "Adam"), (Mixed, (4, 6), "SGD"), (conv_net, (8, 1, 8, 8), "SGD")],
)
def test_bsp_gives_the_same_bits(make, shape: tuple[int, ...], optimizer: str) -> None:
    assert_equal(train(make, shape, False, optimizer), train(make, shape, True, optimizer))


def test_bsp_gives_the_same_bits_on_digits() -> None:
    def train_digits(overlap: bool) -> paceline.Run:
        workload = workloads.load("digits-mlp")

        def work() -> None:
            world = paceline.init()
            module = workload.module(0)
            inner = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            opt = paceline.Optimizer(inner, model=module, overlap=overlap and world.rank != 1)
            order = SampleOrder(len(workload.train[0]), world.size, 32, 0)
            inputs, labels = workload.train
            for step in range(30):
                samples = torch.from_numpy(order.of_worker(world.rank, step))

                def closure(samples: torch.Tensor = samples) -> torch.Tensor:
                    opt.zero_grad()
                    loss = workload.loss(module(inputs[samples]), labels[samples])
                    loss.backward()
                    return loss

                opt.step(closure)

        return paceline.launch(work, workers=3, servers=2, policy="bsp", timeout_s=60)

    assert_equal(train_digits(False), train_digits(True))


@pytest.mark.parametrize("policy", ["asp", "ssp:staleness=1", "backup:extra=1"])
def test_it_trains_under_every_policy(policy: str) -> None:
    run = train(conv_net, (8, 1, 8, 8), True, policy=policy)
    assert all(torch.isfinite(value).all() for value in run.parameters.values())


def staged(tensors: list[torch.Tensor]) -> tuple[StagedGradient, list[torch.Tensor], LateCopyStream]:
    views, copy_stream = [torch.full_like(tensor, 7.0) for tensor in tensors], LateCopyStream()
    with torch.no_grad():
        copies = StreamCopies(
            tensors, views, [tensor.clone() for tensor in tensors], {torch.device("cpu"): copy_stream}
        )
    layout = layout_of([("a", tensors[0], 0), ("b", tensors[1], 0)])
    overlap = StagedGradient(layout, tensors, copies, early=[])
    overlap.begin()
    return overlap, views, copy_stream


def two() -> list[torch.Tensor]:
    return [torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)]


def test_gradients_are_on_their_way_before_backward_is_over(monkeypatch) -> None:
    monkeypatch.setattr(stream_copies, "TOGETHER", 1)
    a, b = two()
    overlap, views, copy_stream = staged([a, b])
    waiting: list[int] = []
    hidden = a.sum()
    hidden.register_hook(lambda gradient: waiting.append(len(copy_stream.queue)))
    (hidden * b).sum().backward()
    assert waiting == [1], "b is, a has no gradient yet"
    assert len(copy_stream.queue) == 2
    assert views[1].tolist() == [7.0, 7.0], "nobody has waited for it"
    assert overlap.write([a.grad, b.grad])
    assert torch.equal(views[0], a.grad)
    assert torch.equal(views[1], b.grad)


def test_a_second_gradient_before_the_step_is_refused_where_it_happens() -> None:
    a, b = two()
    overlap, _, _ = staged([a, b])
    a.sum().backward()
    b.sum().backward()  # of other tensors: nothing is accumulated
    with pytest.raises(PacelineError, match="a got a second gradient before step") as caught:
        a.sum().backward()
    assert "\n" not in str(caught.value)
    overlap.forget()
    a.sum().backward()
    assert overlap.write([a.grad, b.grad])


def clip_norm(a: torch.Tensor) -> None:
    nn.utils.clip_grad_norm_([a], 0.1)


def clip_value(a: torch.Tensor) -> None:
    nn.utils.clip_grad_value_([a], 0.1)


def replace(a: torch.Tensor) -> None:
    other = torch.zeros_like(a.grad)
    while other._version < a.grad._version:
        other += 1
    a.grad = other


def write(a: torch.Tensor) -> None:
    a.grad[0] = 0


@pytest.mark.parametrize("change", [clip_norm, clip_value, replace, write])
def test_a_gradient_changed_after_backward_is_refused(change) -> None:
    a, b = two()
    overlap, _, _ = staged([a, b])
    (a.sum() + b.sum()).backward()
    change(a)
    with pytest.raises(PacelineError, match=r"the gradient of a was changed after backward \(clipping\?\)"):
        overlap.write([a.grad, b.grad])


def test_what_torch_steps_with_is_what_is_pushed() -> None:
    """A gradient left from the last step, one set by hand, one that was taken away again, a NaN that was too."""
    a, b = two()
    overlap, views, _ = staged([a, b])
    (a.sum() + b.sum()).backward()
    assert overlap.write([a.grad, b.grad])
    (2 * a).sum().backward()  # on top of the last
    b.grad = torch.tensor([5.0, 6.0])
    assert overlap.write([a.grad, b.grad])
    assert views[0].tolist() == [3.0, 3.0, 3.0]
    assert views[1].tolist() == [5.0, 6.0]
    a.grad = b.grad = None
    (a.sum() * float("nan") + b.sum()).backward()
    a.grad = None
    assert overlap.write([None, b.grad])
    assert views[0].tolist() == [0.0, 0.0, 0.0]


def test_a_forked_childs_backward_is_not_staged() -> None:
    a, b = two()
    overlap, _, copy_stream = staged([a, b])
    pid = os.fork()
    if pid == 0:
        a.sum().backward()
        os._exit(len(copy_stream.queue))
    assert os.waitpid(pid, 0)[1] == 0
    assert overlap.staged == {}


def small(overlap: bool = True) -> tuple[nn.Module, paceline.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, overlap=overlap)


def accumulates() -> None:
    model, opt = small()
    for _ in range(2):
        model(noise(0, 5, 3)).sum().backward()
    opt.step()


def clips() -> None:
    model, opt = small()
    model(noise(0, 5, 3)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    opt.step()


def scales() -> None:
    model, opt = small()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(noise(0, 5, 3)).sum()).backward()
    scaler.step(opt)


def unscales() -> None:
    model, opt = small()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(noise(0, 5, 3)).sum()).backward()
    scaler.unscale_(opt)
    scaler.step(opt)


def has_a_sparse_gradient() -> None:
    model = nn.Embedding(4, 3, sparse=True)
    opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, overlap=True)
    model(torch.tensor([1])).sum().backward()
    opt.step()


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (accumulates, "2.bias got a second gradient before step (accumulation?): overlap=True has sent it by then"),
        (clips, "was changed after backward (clipping?): overlap=True has sent it by then: leave overlap out"),
        (scales, "a GradScaler changes gradients after backward: overlap=True has sent them by then"),
        (unscales, "a GradScaler changes gradients after backward: overlap=True has sent them by then"),
        (has_a_sparse_gradient, "has a sparse gradient: only dense ones can be used"),
    ],
)
def test_refused_with_one_line(work, said: str, capfd) -> None:
    run = paceline.launch(work, workers=1, timeout_s=30)
    assert run.failures == ["worker 0 failed with exit code 1"]
    err = capfd.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_a_backward_that_fails_midway_leaves_nothing_and_the_next_starts_afresh() -> None:
    def train_with(failing: bool, overlap: bool) -> paceline.Run:
        def work() -> None:
            model, opt = small(overlap)

            def closure(step: int, fails: bool, zero: bool) -> torch.Tensor:
                if zero:
                    opt.zero_grad()
                hidden = model[0](noise(step, 5, 3))
                if fails:
                    hidden.register_hook(lambda gradient: 1 / 0)
                loss = model[2](model[1](hidden)).pow(2).sum()
                loss.backward()
                return loss

            for step in range(6):
                if failing and step in (2, 4):
                    with pytest.raises(ZeroDivisionError):
                        opt.step(lambda step=step: closure(step, True, True))
                    assert opt.global_step == step
                opt.step(lambda step=step: closure(step, False, zero=step != 4))

        run = paceline.launch(work, workers=2, servers=2, policy="bsp", timeout_s=60)
        assert run.failures == []
        return run

    # At step 4 nobody zeroes: what the failed backward left adds up, as in torch.
    assert_equal(train_with(True, overlap=False), train_with(True, overlap=True))
    assert_equal(train_with(False, overlap=False), train_with(False, overlap=True))


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_after_a_backward_without_a_step_starts_afresh(to_none: bool) -> None:
    def train_with(overlap: bool) -> paceline.Run:
        def work() -> None:
            model, opt = small(overlap)
            for step in range(5):
                for attempt in range(1 + step % 2):
                    opt.zero_grad(set_to_none=to_none)
                    model(noise(step + attempt, 5, 3)).pow(2).sum().backward()
                opt.step()

        run = paceline.launch(work, workers=2, servers=2, policy="bsp", timeout_s=60)
        assert run.failures == []
        return run

    assert_equal(train_with(False), train_with(True))


def test_skip_step_after_backward_commits_nothing() -> None:
    def train_with(overlap: bool) -> paceline.Run:
        def work() -> None:
            model, opt = small(overlap)
            for step in range(6):
                if step != 3:
                    opt.zero_grad()  # at 3 what was skipped at 2 adds up
                model(noise(step, 5, 3)).pow(2).sum().backward()
                opt.skip_step() if step == 2 else opt.step()

        run = paceline.launch(work, workers=2, servers=2, policy="bsp", timeout_s=60)
        assert run.failures == []
        return run

    assert_equal(train_with(False), train_with(True))


def test_a_gradient_that_is_not_finite_is_rejected() -> None:
    def work() -> None:
        model, opt = small()
        for step in range(5):
            opt.zero_grad()
            bad = float("nan") if step == 2 and paceline.init().rank == 0 else 1.0
            (model(noise(step, 5, 3)).pow(2).sum() * bad).backward()
            opt.step()
            assert opt.step_was_dropped == (bad != 1.0)

    run = paceline.launch(work, workers=2, servers=2, policy="bsp", timeout_s=60)
    assert run.failures == []
    assert all(torch.isfinite(value).all() for value in run.parameters.values())


@pytest.mark.parametrize("overlap", [False, True])
def test_the_model_is_as_it_was_after_a_gradient_that_did_not_count(overlap: bool) -> None:
    def work() -> None:
        model, opt = small(overlap)
        for bad in (1.0, float("nan"), float("inf"), 1.0):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            opt.zero_grad()
            (model(noise(0, 5, 3)).pow(2).sum() * bad).backward()
            opt.step()
            same = [torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
            assert all(same) if bad != 1.0 else not any(same)

    assert paceline.launch(work, workers=1, servers=2, policy="asp", timeout_s=60).failures == []


def test_a_killed_server_comes_back_and_reads_what_was_staged(tmp_path: Path) -> None:
    def work() -> None:
        model, opt = small()
        while opt.global_step < 200:
            opt.zero_grad()
            model(noise(opt.global_step, 5, 3)).pow(2).sum().backward()
            opt.step()
            paceline.log(loss=0.0)

    driver, said = driver_of(work, "bsp", checkpointing=CheckpointOptions(tmp_path, every_updates=20))

    def kill() -> None:
        while driver.parts.checkpointer is None or driver.parts.checkpointer.last is None:
            time.sleep(0.001)
        next(c for c in driver.parts.children.values() if c.role == "server" and c.rank == 1).kill()

    run = meanwhile(driver, kill)
    assert any("server 1 was killed by SIGKILL; restarting it from" in line for line in said), said
    assert set(last_iterations(run).values()) == {199}
    assert all(torch.isfinite(value).all() for value in run.parameters.values())


def test_in_a_world_of_one_it_changes_nothing() -> None:
    def train_alone(overlap: bool) -> dict[str, torch.Tensor]:
        model, opt = small(overlap)
        for step in range(3):
            opt.zero_grad()
            for part in noise(step, 6, 3).chunk(2):
                model(part).pow(2).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
        return model.state_dict()

    plain, overlapped = train_alone(False), train_alone(True)
    assert all(torch.equal(plain[name], overlapped[name]) for name in plain)
