"""Steps on a device, all tensors at once, are those of `ShardOptimizer`, piece by piece."""

from __future__ import annotations

import pytest
import torch

from paceline.tensors import shard_optimizer
from paceline.tensors.device_optimizer import DeviceOptimizer
from paceline.tensors.layout import Entry, Layout
from paceline.tensors.optimizers import parse
from paceline.tensors.shard_optimizer import ShardOptimizer

ENTRIES = (Entry("a", (40,), 0), Entry("b", (6, 5), 0), Entry("c", (12,), 0))
N = 82
TEXTS = [
    "sgd:lr=0.1",
    "sgd:lr=0.1,momentum=0.9,nesterov=true,weight_decay=0.01",
    "sgd:lr=0.1,momentum=0.9,stretch=true,ema=0.9",
    "adam:lr=0.01,stretch=true",
    "adamw:lr=0.01,ema=0.9",
    "adagrad:lr=0.1",
    "rmsprop:lr=0.01",
    "adadelta:lr=1",
    "adamax:lr=0.01",
    "nadam:lr=0.01",
    "radam:lr=0.01",
    "asgd:lr=0.01",
    "rprop:lr=0.01",
    "lars:lr=0.1",
    "adafactor:lr=0.01",
    "adamw:lr=0.01,clip_mean=0.5",
    "sgd:lr=0.1,schedule=cosine(samples=100),batch=8",
]


def vector(seed: int) -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("ranges", [((0, N),), ((5, 30), (35, 82))], ids=["whole", "two ranges"])
def test_it_steps_as_piece_by_piece(text: str, ranges, monkeypatch) -> None:
    """Single gradients of weight 1/3, means of two, a tensor without a gradient; then from the state of the other."""
    monkeypatch.setattr(shard_optimizer, "PIECE", 16)
    monkeypatch.setattr("paceline.tensors.device_optimizer.PIECE", 16)
    spec = parse(text)
    layout = Layout(ENTRIES, "float64", spec.borders)
    if spec.borders == "tensors":
        ranges = ((0, N),)
    part = torch.cat([vector(0)[start:stop] for start, stop in ranges])
    made = [ShardOptimizer(layout, ranges, part.clone(), spec), DeviceOptimizer(layout, ranges, part.clone(), spec)]

    def step(optimizer, number: int) -> list[torch.Tensor]:
        target = vector(7)
        gradients = [vector(10 * number + each) for each in range(1 + number % 2)]
        absent = [frozenset({1})] if number == 2 else [frozenset()] * len(gradients)
        pieces = [optimizer.cut_from(each) for each in gradients]
        kept = [each.clone() for each in gradients]
        shares = (0.25, 0.75) if number == 3 else ()
        optimizer.apply(pieces, 1.0 if number % 2 else 1 / 3, absent, [optimizer.cut_from(target)], shares=shares)
        assert number == 1 or isinstance(optimizer, ShardOptimizer) or all(map(torch.equal, gradients, kept))
        written = torch.cat([target[start:stop] for start, stop in ranges])
        assert torch.equal(written, optimizer.values), "the targets have the new values"
        return [optimizer.values, *([optimizer.average] if optimizer.average is not None else [])]

    def same(numbers: range) -> None:
        for number in numbers:
            for ours, theirs in zip(step(made[1], number), step(made[0], number), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)

    same(range(5))
    states = [each.state() for each in made]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name].double(), value.double(), rtol=1e-6, atol=1e-9, msg=name)
    made = [ShardOptimizer(layout, ranges, made[0].values, spec), DeviceOptimizer(layout, ranges, made[1].values, spec)]
    made[0].load_state(states[1])
    made[1].load_state(states[0])
    same(range(5, 9))
    gradients = [vector(90), vector(91)]
    assert made[0].measure([made[0].cut_from(each) for each in gradients]) == pytest.approx(
        made[1].measure([made[1].cut_from(each) for each in gradients])
    )
