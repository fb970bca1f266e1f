"""Compiled optimizers: the same as torch's own, whatever is stepped on, and however the steps are taken together."""

from __future__ import annotations

import copy

import pytest
import torch

from paceline.tensors import fused_kernels, fused_optimizers
from paceline.tensors.fused_optimizers import FusedPieceOptimizer
from paceline.tensors.layout import Entry, Layout
from paceline.tensors.optimizers import parse
from paceline.tensors.piece_optimizers import TorchPieceOptimizer
from paceline.tensors.shard_optimizer import ShardOptimizer, SlicedGradient

KINDS = [
    "sgd:lr=0.1,momentum=0.9",
    "sgd:lr=0.1,momentum=0.9,nesterov=true,weight_decay=0.01",
    "sgd:lr=0.1,momentum=0.9,dampening=0.3,maximize=true",
    "sgd:lr=0.1,weight_decay=0.01",
    "adam:lr=0.01,weight_decay=0.01",
    "adam:lr=0.01,amsgrad=true,betas=0.3:0.9",
    "adamw:lr=0.01,weight_decay=0.1",
    "adamw:lr=0.01,amsgrad=true,maximize=true",
    "adagrad:lr=0.1,lr_decay=0.1,initial_accumulator_value=0.5",
    "rmsprop:lr=0.01",
    "rmsprop:lr=0.01,centered=true,momentum=0.5,weight_decay=0.01",
    "adadelta:lr=1.0",
    "adamax:lr=0.01",
    "nadam:lr=0.01",
    "nadam:lr=0.01,weight_decay=0.1,decoupled_weight_decay=true",
    "radam:lr=0.01,weight_decay=0.01",
]
EXTRAS = ["", ",ema=0.9", ",clip_mean=0.5"]
LAYOUT = Layout((Entry("a", (1500,), 0), Entry("b", (40, 30), 0), Entry("c", (3,), 0)), "float32")
N = LAYOUT.numel

pytestmark = pytest.mark.skipif(not fused_kernels.are_compiled(), reason="there was no C compiler")


def vector(seed: int) -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed))


def make(text: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> ShardOptimizer:
    with monkeypatch.context() as patched:
        if not compiled:
            patched.setattr(fused_optimizers, "can_step", lambda name, values: False)
        made = ShardOptimizer(LAYOUT, ((0, N),), vector(0), parse(text))
    wanted = FusedPieceOptimizer if compiled else TorchPieceOptimizer
    assert all(isinstance(each, wanted) for each in made.piece_optimizers)
    return made


def assert_same(ours: ShardOptimizer, theirs: ShardOptimizer) -> None:
    torch.testing.assert_close(ours.values, theirs.values, rtol=1e-6, atol=1e-6)
    mine, others = ours.state(), theirs.state()
    assert mine.keys() == others.keys()
    for name, value in others.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-6, msg=lambda text: f"{name}: {text}")  # noqa: B023


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("text", KINDS)
def test_steps_are_torchs(text: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Means and single gradients, whole and weighted, some without a gradient for a tensor; over a checkpoint, too."""
    ours, theirs = make(text + extra, True, monkeypatch), make(text + extra, False, monkeypatch)
    for step in range(12):
        count, weight = (3, 1.0) if step % 3 == 0 else (1, 0.25)
        absent = [frozenset({1}) if step == 4 else frozenset()] * count
        for optimizer in (ours, theirs):
            gradients = [optimizer.cut_from(vector(100 * step + each)) for each in range(count)]
            targets = [gradients[-1], optimizer.cut(torch.zeros(N))]
            optimizer.apply(gradients, weight, absent, targets, spoil=step % 2 == 0)
            for target in targets:
                assert torch.equal(torch.cat(list(target)), optimizer.values)
        assert_same(ours, theirs)
        if step == 6:  # each goes on from the other's state
            kept, values = copy.deepcopy(ours.state()), ours.values.clone()
            ours = make(text + extra, True, monkeypatch)
            ours.values.copy_(theirs.values)
            ours.load_state(theirs.state())
            theirs = make(text + extra, False, monkeypatch)
            theirs.values.copy_(values)
            theirs.load_state(kept)


@pytest.mark.parametrize("text", [text for text in KINDS if text.startswith(("sgd:lr=0.1,momentum", "adam", "nadam"))])
def test_stretched_time_is_stretched_alike(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (make(text + ",stretch=true,ema=0.9", compiled, monkeypatch) for compiled in (True, False))
    for step in range(5):
        for optimizer in (ours, theirs):
            optimizer.apply([optimizer.cut_from(vector(step))], 0.25)
        assert_same(ours, theirs)


@pytest.mark.parametrize("text", [*KINDS, "adamw:lr=0.01,ema=0.9", "adam:lr=0.01,schedule=cosine(samples=100),batch=8"])
def test_steps_taken_together_are_steps_taken_one_by_one(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together, single = make(text, True, monkeypatch), make(text, True, monkeypatch)
    assert together.can_step_on_each
    weights = [0.25, 0.5, 0.125]
    for turn in range(3):
        mine: list[SlicedGradient] = [together.cut_from(vector(10 * turn + each)) for each in range(3)]
        others = [single.cut_from(vector(10 * turn + each)) for each in range(3)]
        together.apply_each(mine, weights)
        for gradient, weight in zip(others, weights, strict=True):
            single.apply([gradient], weight, targets=[gradient])
        assert all(torch.equal(torch.cat(list(a)), torch.cat(list(b))) for a, b in zip(mine, others, strict=True))
        assert torch.equal(together.values, single.values)
        assert {name: value.tolist() for name, value in together.state().items()} == {
            name: value.tolist() for name, value in single.state().items()
        }


def test_hyper_parameters_that_change_on_the_way_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule may change momentum, from nothing and back."""
    text = "sgd:lr=0.1,weight_decay=0.1,dampening=0.5"
    ours, theirs = (make(text, compiled, monkeypatch) for compiled in (True, False))
    for step, momentum in enumerate((0.0, 0.5, 0.9, 0.0, 0.7)):
        for optimizer in (ours, theirs):
            optimizer.set_hyper([{"lr": 0.1 / (step + 1), "momentum": momentum}])
            optimizer.apply([optimizer.cut_from(vector(step))], 0.5)
    torch.testing.assert_close(ours.values, theirs.values, rtol=1e-6, atol=1e-6)


def test_a_state_that_was_loaded_before_the_first_step_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "adagrad:lr=0.1,initial_accumulator_value=0.5"
    theirs = make(text, False, monkeypatch)
    assert theirs.state()["sum"].eq(0.5).all()
    for compiled in (True, False):
        ours = make("adagrad:lr=0.1", compiled, monkeypatch)
        ours.load_state(theirs.state())
        assert ours.state()["sum"].eq(0.5).all()


def test_an_optimizer_that_is_built_begins_as_the_scripts_own() -> None:
    tensor = torch.zeros(3, requires_grad=True)
    built = parse("adagrad:lr=0.1,initial_accumulator_value=0.5").build([[tensor]])
    assert built.state[tensor]["sum"].eq(0.5).all()


def test_a_gradient_that_lies_at_an_odd_address_is_stepped_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = make("adamw:lr=0.01", True, monkeypatch), make("adamw:lr=0.01", True, monkeypatch)
    frame = bytearray(4 * N + 1)
    frame[1:] = vector(1).numpy().tobytes()
    odd = [
        torch.frombuffer(frame, dtype=torch.float32, offset=1 + 4 * piece.offset, count=piece.length)
        for piece in ours.pieces
    ]
    ours.apply([odd], 1.0)
    theirs.apply([theirs.cut_from(vector(1))], 1.0)
    assert torch.equal(ours.values, theirs.values)


def test_values_leave_as_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """To other hosts."""
    for compiled in (True, False):
        optimizer, target = make("adamw:lr=0.01", compiled, monkeypatch), torch.zeros(N, dtype=torch.bfloat16)
        optimizer.apply([optimizer.cut_from(vector(1))], 1.0, targets=[optimizer.cut(target)])
        assert torch.equal(target, optimizer.values.to(torch.bfloat16))


def test_doubles_are_torchs_business() -> None:
    layout = Layout((Entry("a", (5,), 0),), "float64")
    slow = ShardOptimizer(layout, ((0, 5),), torch.zeros(5, dtype=torch.float64), parse("adamw:lr=0.1"))
    assert not slow.can_step_on_each
    slow.apply([slow.cut_from(torch.ones(5, dtype=torch.float64))], 1.0)
    assert torch.allclose(slow.values, torch.full((5,), -0.1, dtype=torch.float64))


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": 10}, {"kind": -1}, {"states": (0, 0)}, {"coefficients": (0.0,) * 13}, {"gradients": ()},
        {"coefficients": (1e39,) * 14}, {"values": 2}, {"gradients": 8}, {"each": True, "coefficients": ()},
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_the_compiled_step(wrong: dict[str, object]) -> None:
    values, gradient = torch.ones(4), torch.ones(4)
    given: dict[str, object] = {
        "kind": 0, "values": values.data_ptr(), "states": (0, 0, 0), "average": 0, "gradients": (gradient.data_ptr(),),
        "targets": (), "coefficients": (1.0,) * 14, "each": False, "count": 4,
    }  # fmt: skip
    with pytest.raises((TypeError, ValueError, OverflowError)):
        fused_kernels._passes.optimize(*(given | wrong).values())
    assert values.tolist() == [1.0] * 4
