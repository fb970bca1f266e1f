"""`paceline.BatchSampler` in live runs: sizes follow speeds, no sample is lost, what makes no sense is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.core.events import GradientReady
from paceline.errors import ConfigError
from paceline.run import Run

BATCH = 24
SPEEDS = "factors:by_worker=1:2:4,compute_s=0.012"


def work(size: int, folder: Path | None = None, loaders: int = 0, epochs: int = 1, **sampler: object) -> None:
    """Trains on batches, and writes down which samples each epoch had."""
    data = TensorDataset(torch.arange(size))
    model = nn.Linear(1, 1)
    opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=1e-9))
    drawn = paceline.BatchSampler(data, **{"batch_size": BATCH, "balance": True, **sampler})  # type: ignore[arg-type]
    loader = DataLoader(data, batch_sampler=drawn, num_workers=loaders)
    for epoch in range(epochs):
        for (batch,) in loader:
            opt.zero_grad()
            model(batch[:, None].float()).mean().backward()
            opt.step()
            if folder is not None:
                with (folder / f"{paceline.init().rank}").open("a") as file:
                    file.writelines(f"{epoch} {sample}\n" for sample in batch.tolist())


def launch(fn: Callable[[], None], policy: str = "bsp", cluster: str = SPEEDS) -> Run:
    return paceline.launch(fn, workers=3, policy=policy, cluster=cluster, timeout_s=100)


def sizes(run: Run) -> list[list[int]]:
    """How many samples each worker's pushes stood for, in order."""
    found: dict[int, list[int]] = {}
    for record in run.trace:
        if isinstance(record.event, GradientReady):
            found.setdefault(record.node.rank, []).append(int(record.event.weight))
    return [found[rank] for rank in sorted(found)]


def used(folder: Path) -> list[tuple[int, int]]:
    return sorted(
        (int(epoch), int(sample))
        for path in folder.iterdir()
        for epoch, sample in (line.split() for line in path.read_text().splitlines())
    )


@pytest.mark.parametrize("policy", ["bsp", "ssp:staleness=2", "backup:extra=1", "deadline", "hop:graph=ring"])
def test_sizes_follow_speeds_and_every_sample_is_used_once(policy: str, tmp_path: Path) -> None:
    """Generous, for a machine that others use: 4 : 2 : 1 is 41, 21 and 10 of 72."""
    size = 3 * BATCH * 24 + 31
    run = launch(partial(work, size, tmp_path), policy)
    fast, middle, slow = [each[len(each) // 2 :] for each in sizes(run)]
    assert sum(fast) / len(fast) > 1.3 * sum(middle) / len(middle)
    assert sum(middle) / len(middle) > 1.3 * sum(slow) / len(slow)
    if policy in ("bsp", "ssp:staleness=2", "hop:graph=ring"):
        assert used(tmp_path) == [(0, sample) for sample in range(size)]
    if policy == "bsp":
        joined = [sum(each) for each in zip(*sizes(run), strict=False)]
        assert joined[:20] == [3 * BATCH] * 20, "the joined batch stays what it is"


def test_batches_that_were_drawn_ahead_keep_their_size_and_weigh_what_is_in_them(tmp_path: Path) -> None:
    size = 3 * BATCH * 30
    run = launch(partial(work, size, tmp_path, loaders=1))
    assert sum(map(sum, sizes(run))) == size
    assert used(tmp_path) == [(0, sample) for sample in range(size)]
    assert sizes(run)[0][-4] > 1.5 * sizes(run)[2][-4]


def test_epochs_end_together_and_limits_of_a_worker_hold(tmp_path: Path) -> None:
    def limited() -> None:
        rank = paceline.init().rank
        work(3 * BATCH * 10, tmp_path, epochs=3, max_batch=30 if rank == 0 else None, min_batch=16 if rank == 2 else 1)

    run = launch(limited)
    assert used(tmp_path) == [(epoch, sample) for epoch in range(3) for sample in range(3 * BATCH * 10)]
    first, _, last = sizes(run)
    assert max(first) <= 30
    ends = {len(each) for each in sizes(run)}
    assert max(ends) - min(ends) <= 3
    assert sum(size < 16 for size in last) <= 6, "only where an epoch ends"


def test_equal_batches_are_those_of_a_sampler(tmp_path: Path) -> None:
    size = 3 * BATCH * 5
    run = launch(partial(work, size, tmp_path, balance=False), cluster="steady")
    assert sizes(run) == [[BATCH] * 5] * 3
    assert used(tmp_path) == [(0, sample) for sample in range(size)]


@pytest.mark.parametrize("policy", ["asp", "elastic:lookahead=4", "specsync", "adpsgd:graph=ring"])
def test_where_nobody_waits_there_is_nothing_to_balance(policy: str, capfd: pytest.CaptureFixture[str]) -> None:
    with suppress(paceline.RunFailed):
        launch(partial(work, 1000), policy)
    said = [line for line in capfd.readouterr().err.splitlines() if "balance=True" in line]
    assert said[0].startswith("worker ")
    assert "is for policies under which workers wait for slower ones" in said[0]
    with pytest.raises(ConfigError, match="balance=True is for policies under which workers wait for slower ones"):
        paceline.simulate(policy=policy, workers=3, iterations=3, balance=True)


def test_workers_that_disagree_are_told_so(capfd: pytest.CaptureFixture[str]) -> None:
    def differ() -> None:
        work(1000, batch_size=BATCH + paceline.init().rank)

    assert launch(differ).failures
    assert "give batch_size and balance alike on every worker" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch_size": 0}, "batch_size=0 is out of range"),
        ({"batch_size": 8, "max_batch": 3.5}, "max_batch=3.5 is out of range"),
        ({"batch_size": 8, "balance": True, "min_batch": 9, "max_batch": 8}, "max_batch=8 is out of range: 9"),
        ({"batch_size": 8, "max_batch": 9}, "min_batch and max_batch are for balance=True"),
    ],
)
def test_sizes_that_cannot_be_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        paceline.BatchSampler(range(10), **given)  # type: ignore[arg-type]


def test_in_a_world_of_one_batches_are_equal() -> None:
    sampler = paceline.BatchSampler(range(10), 4, balance=True)
    assert [len(batch) for batch in sampler] == [4, 4, 2]
    assert sorted(sample for batch in sampler for sample in batch) == list(range(10))
    assert len(sampler) == 3
