"""`paceline bench start`: how soon many workers have taken their first step, beside torchrun with the same script.

Both are measured from the start of the command to the first step of the last worker. Under torchrun every rank is
alone: it imports what a worker imports, takes a step by itself and meets nobody.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from paceline.bench.first_step import MARK
from paceline.bench.rounds import in_turn
from paceline.errors import PacelineError

FIRST_STEP = str(Path(__file__).with_name("first_step.py"))


@dataclass
class Row:
    workers: int
    first_step_s: float
    """From the start of `paceline run` to the first step of the last worker."""
    torchrun_s: float
    """The same under torchrun."""
    worker_mb: float
    """The memory of a worker after its first step, what is shared counted in parts."""
    torchrun_mb: float


class Started(NamedTuple):
    """When the last worker had taken its first step, and the memory of one."""

    seconds: float
    megabytes: float


def run(
    sizes: Sequence[int], script: Sequence[str], preload: Sequence[str], rounds: int, say: Callable[[str], None]
) -> list[Row]:
    def told(workers: int, number: int, found: dict[str, list[Started]]) -> None:
        latest = ", ".join(f"{name} {values[-1].seconds:.2f} s" for name, values in found.items())
        say(f"{workers} workers, round {number}/{rounds}: {latest}")

    rows = []
    for workers in sizes:
        ways = {
            "paceline": partial(start_paceline, workers, script, preload),
            "torchrun": partial(start_torchrun, workers, script),
        }
        found = in_turn(ways, rounds, partial(told, workers))
        seconds = {name: statistics.median(one.seconds for one in values) for name, values in found.items()}
        memory = {name: statistics.median(one.megabytes for one in values) for name, values in found.items()}
        rows.append(Row(workers, seconds["paceline"], seconds["torchrun"], memory["paceline"], memory["torchrun"]))
    return rows


def start_paceline(workers: int, script: Sequence[str], preload: Sequence[str]) -> Started:
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        options = ["--workers", str(workers), "--policy", "bsp", "--dir", f"{folder}/run"]
        if preload:
            options += ["--preload", *preload]
        return _measure(["-m", "paceline", "run", *options, FIRST_STEP, *script], workers)


def start_torchrun(workers: int, script: Sequence[str]) -> Started:
    options = ["--standalone", "--nproc-per-node", str(workers)]
    return _measure(["-m", "torch.distributed.run", *options, FIRST_STEP, *script], workers)


def _measure(arguments: Sequence[str], workers: int) -> Started:
    began = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    said = [line.partition(MARK)[2].split() for line in done.stdout.splitlines() if MARK in line]
    if done.returncode or len(said) != workers:
        last = done.stdout.strip().splitlines()[-1:]
        raise PacelineError(f"{len(said)} of {workers} workers have taken a step, exit code {done.returncode}: {last}")
    steps = [float(at) for at, _ in said]
    return Started(max(steps) - began, statistics.median(float(size) for _, size in said))
