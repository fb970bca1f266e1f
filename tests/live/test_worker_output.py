"""What workers print comes through the driver as a terminal would show it in the end, under their rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.runtime.live.driver import worker_output
from paceline.runtime.live.driver.children import Child
from paceline.runtime.live.driver.worker_output import WorkerOutput
from paceline.runtime.live.messaging.unix_sockets import Waiter
from tests import forked

SCRIPT = """
import os, sys, time
import torch, paceline
world = paceline.init()
model = torch.nn.Linear(2, 1)
opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(30):
    opt.zero_grad()
    model(torch.ones(4, 2)).square().mean().backward()
    opt.step()
    for word in ("this", "is", "step"):  # a write each, as print does it without a buffer
        os.write(1, word.encode() + b" ")
    print(step)
print("of", "rank", world.rank, file=sys.stderr)
"""


def child_of(*pipes: int, rank: int = 3) -> Child:
    return Child("worker", rank, 0, 0, 0, lambda: 0, pipes)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"\r0/50\r1/50\r50/50\nnext", ["50/50", "next"]),
        (b"\r10 %\r20 %", ["20 %"]),
        (b"from Windows\r\n", ["from Windows"]),
        (b"\n\xff\n", ["", "\ufffd"]),
    ],
)
@pytest.mark.parametrize("at_once", [1, 1 << 16])
def test_lines_and_progress_bars(
    written: bytes, said: list[str], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_output, "AT_ONCE", at_once)
    heard: list[str] = []
    waiter = Waiter()
    echo = WorkerOutput(waiter, heard.append, heard.append)
    reading, writing = os.pipe()
    echo.listen(child_of(reading))
    os.write(writing, written)
    os.close(writing)
    while echo.begun:
        echo.hear(reading)
        assert all(len(line) <= 13 for line in echo.begun.values()), "a progress bar is not kept for hours"
    waiter.close()
    assert heard == [f"worker 3: {line}" for line in said]


def test_who_is_named_already_is_not_named_again_and_stderr_is_apart() -> None:
    out: list[str] = []
    err: list[str] = []
    waiter = Waiter()
    echo = WorkerOutput(waiter, out.append, err.append)
    (first, into_first), (second, into_second) = os.pipe(), os.pipe()
    echo.listen(child_of(first, second))
    os.write(into_first, b"worker 3 is at work\nworker 31: me\n")
    os.write(into_second, b"worker 3 failed:\nTraceback\n")
    os.close(into_first)
    os.close(into_second)
    echo.close_all()
    waiter.close()
    assert out == ["worker 3 is at work", "worker 3: worker 31: me"]
    assert err == ["worker 3 failed:", "worker 3: Traceback"]


def test_lines_without_an_end_are_said_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_output, "LONGEST_LINE", 10)
    heard: list[str] = []
    waiter = Waiter()
    echo = WorkerOutput(waiter, heard.append, heard.append)
    reading, writing = os.pipe()
    echo.listen(child_of(reading))
    os.write(writing, b"x" * 25)
    echo.hear(reading)
    os.close(writing)
    echo.close_all()
    waiter.close()
    assert heard == [f"worker 3: {'x' * 25}"]


def test_without_a_terminal_each_line_is_whole_and_has_a_rank(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ["run", "--workers", "3", "--policy", "asp", "--dir", tmp_path / "run", script]
    done = forked.run(["-m", "paceline", *options])
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stdout.splitlines() if "step" in line]
    assert sorted(printed) == sorted(f"worker {rank}: this is step {step}" for rank in range(3) for step in range(30))
    said = [line for line in done.stderr.splitlines() if "rank" in line]
    assert sorted(said) == [f"worker {rank}: of rank {rank}" for rank in range(3)]
