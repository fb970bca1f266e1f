"""What iterations and servers spend their time on is measured, kept beside the trace, and bounded."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
import torch

import paceline
from paceline import run_folder
from paceline.core.messages import Node
from paceline.core.step_times import ProcessRow, StepRow, TurnRow, encode_rows, read_rows
from paceline.errors import PacelineError
from paceline.runtime.live.storage.trace_files import BLOCK, WHOLE, TimesFile, gather_times

STEPS = 4
LOADING_S, COMPUTING_S = 0.02, 0.03


def work() -> None:
    model = torch.nn.Linear(3, 2)
    opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
    for _ in range(STEPS):
        time.sleep(LOADING_S)
        opt.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        time.sleep(COMPUTING_S)
        opt.step()


@pytest.mark.parametrize("policy", ["bsp", "hop"])
def test_the_parts_of_each_iteration_are_where_they_were_spent(policy: str, tmp_path: Path) -> None:
    run = paceline.launch(work, workers=2, policy=policy)
    run_folder.save(tmp_path / "run", run)
    rows = run_folder.load(tmp_path / "run").times
    steps = [row for row in rows if isinstance(row, StepRow)]
    assert sorted((row.rank, row.iteration) for row in steps) == [(r, i) for r in range(2) for i in range(STEPS)]
    for row in steps:
        assert row.data_s >= LOADING_S
        assert row.compute_s >= COMPUTING_S
        assert row.injected_s < LOADING_S
        assert row.cpu_s < COMPUTING_S  # it slept
    for rank in range(2):
        mine = [row for row in steps if row.rank == rank]
        for before, after in itertools.pairwise(mine):
            assert after.at - before.at == pytest.approx(after.seconds, abs=1e-6)  # nothing is left out
    turns = [row for row in rows if isinstance(row, TurnRow)]
    if policy == "bsp":
        assert [sum(getattr(row, name) for row in turns) for name in ("pushes", "steps", "gradients")] == [8, 4, 8]
        assert all(row.busy_s > 0 for row in turns)
    here = {row.node.role for row in rows if isinstance(row, ProcessRow)}
    assert here == ({"worker", "server"} if policy == "bsp" else {"peer"} | here & {"server"})


def test_rows_of_a_long_run_are_fewer_and_fewer(tmp_path: Path) -> None:
    file = TimesFile(tmp_path, Node("server", 0), 0)
    count, kept = 40 * WHOLE * BLOCK, []
    for number in range(count):
        file.write(TurnRow(0, 0, float(number), 0.1, 0.1, 1, 1, 1, 1))
    file.close()
    kept = [int(row.at) for row in gather_times(tmp_path) if isinstance(row, TurnRow)]
    assert kept[: WHOLE * BLOCK] == list(range(WHOLE * BLOCK))
    doublings = [sum(start <= at < 2 * start for at in kept) for start in (WHOLE * BLOCK << n for n in range(5))]
    assert doublings == [WHOLE * BLOCK // 2] * 5
    blocks = [at // BLOCK for at in kept]
    assert all(blocks.count(block) == BLOCK for block in set(blocks[-1000:-BLOCK]))  # runs of neighbours stay whole


def test_rows_are_read_as_they_were_written_but_for_a_torn_end() -> None:
    rows = [
        ProcessRow(Node("worker", 1), 0, "here", 2, 1, ("memory", "tcp")),
        StepRow(1, 0, *map(float, range(1, 2)), 7, *(0.5,) * 8),
        TurnRow(0, 0, 1.0, 0.1, 0.1, 1, 0, 0, 0),
    ]
    data = encode_rows(rows)
    assert read_rows(data) == rows
    assert read_rows(data[:-3]) == rows[:-1]
    with pytest.raises(PacelineError, match="not times of a run"):
        read_rows(b'["step",1]\n')


def test_the_whole_time_of_a_run_is_accounted_for(tmp_path: Path) -> None:
    before = time.monotonic()
    run = paceline.launch(work, workers=2, policy="asp")
    run_folder.save(tmp_path / "run", run)
    whole_s = time.monotonic() - before
    wall = run_folder.load(tmp_path / "run").wall
    assert list(wall) == ["startup_s", "training_s", "ending_s", "reporting_s"]
    assert wall["training_s"] == run.time_s
    assert sum(wall.values()) == pytest.approx(whole_s, abs=0.1)
    assert run.time_s >= STEPS * (LOADING_S + COMPUTING_S)
