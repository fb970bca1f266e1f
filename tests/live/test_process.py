"""What a process of a live run asks of the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import paceline
from paceline.runtime.live.driver.script_workers import script_starter
from paceline.runtime.live.system.process_setup import give_way, others_run


def after(asking: Callable[[], object]) -> int:
    """How a thread is scheduled that has asked for this."""

    def ask() -> int:
        asking()
        return os.sched_getscheduler(0)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(ask).result()


def test_a_worker_gives_way_only_where_there_are_too_few_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert after(lambda: give_way(cores + 1)) == os.SCHED_BATCH
    assert after(lambda: give_way(cores)) == os.SCHED_OTHER


def test_a_thread_that_was_given_a_policy_keeps_it() -> None:
    def ask() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        give_way(1 << 20)

    assert after(ask) == os.SCHED_IDLE


def test_the_workers_of_a_run_ask_for_it() -> None:
    def work() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        model = torch.nn.Linear(2, 1)
        paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        paceline.log(loss=float(os.sched_getscheduler(0)))

    run = paceline.launch(work, workers=2, policy="asp")
    assert [point.loss for point in run.history] == [os.SCHED_BATCH] * 2


def test_somebody_who_computes_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        until = time.monotonic() + 30
        while not others_run():
            assert time.monotonic() < until
        other.kill()


@pytest.mark.parametrize(("told", "others"), [("0 0 0 1/99 7", False), ("0 0 0 2/99 7", True), ("nothing", False)])
def test_what_the_kernel_says_is_read(told: str, others: bool, monkeypatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: told)
    assert others_run() is others


def test_a_worker_whose_driver_is_gone_imports_nothing(tmp_path: Path, monkeypatch) -> None:
    """Importing takes seconds, and so long a worker would outlive its driver."""
    imported = tmp_path / "imported"
    (tmp_path / "paceline").mkdir()
    (tmp_path / "paceline" / "__init__.py").write_text(f"open({str(imported)!r}, 'w')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(os, "getpid", lambda: 1)  # the number it is given as its driver's
    worker = script_starter(["script.py"], 1, fresh=True).start(0, 0, tmp_path)
    assert worker.reap() == 1
    assert not imported.exists()
