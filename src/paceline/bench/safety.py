"""`paceline bench safety`: what acknowledgements, deduplication, finite checks and the trace cost without any fault.

A real run under `TimedASP`, which is ASP with machines that measure themselves, where and when they are: the time they
take to handle an event, to write the step to a trace file of their own, and to copy a gradient and look at it. Times
are CPU time of the calling thread, so what other processes do on the machine is not counted. Workers sleep as long as
an iteration computes, so caches are as cold as they would be. The machines' time counts in whole, although deciding is
their main business: acknowledging and recognizing copies is spread through them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from paceline.api import launch
from paceline.core.actions import Action
from paceline.core.events import Event, GradientReady
from paceline.core.machine import Machine
from paceline.core.messages import Members, Node, Role
from paceline.core.shard import Shard
from paceline.core.spec import parameter
from paceline.core.trace import Record
from paceline.core.worker import Worker
from paceline.optim import Optimizer
from paceline.policies import ASP
from paceline.runtime.live.storage.trace_files import TraceFile
from paceline.tensors import fused_kernels

WORKERS = 4
PARTS = ("finite check, with the copy it is part of", "acknowledgements, deduplication", "trace")
FINITE, MACHINE, TRACE = range(3)
SPENT = ".spent"


@dataclass
class Row:
    part: str
    worker_us: float
    """CPU time of an iteration, on the worker."""
    server_us: float
    """And on the server, for one push."""
    share: float
    """Of the iteration, both together."""


class Timed(Machine):
    """A machine that adds up, in a file of its folder, the seconds of each part."""

    def measure_in(self, folder: Path, node: Node) -> None:
        self.node = node
        self.own_trace = TraceFile(folder, node, 0)
        self.spent = np.memmap(folder / f"{node.role}-{node.rank}{SPENT}", np.float64, "w+", shape=len(PARTS))

    def handle(self, event: Event) -> list[Action]:
        if isinstance(event, GradientReady):
            gradient = torch.full((event.nbytes[0] // 4,), 1e-6)
            segment = torch.ones_like(gradient)
            began = time.thread_time()
            fused_kernels.copy_and_check_finite(gradient, segment)
            self.spent[FINITE] += time.thread_time() - began
        began = time.thread_time()
        actions = super().handle(event)
        decided = time.thread_time()
        self.own_trace.write(Record(self.node, 0, event, tuple(actions)))
        written = time.thread_time()
        self.spent[MACHINE] += decided - began
        self.spent[TRACE] += written - decided
        return actions


class TimedWorker(Timed, Worker):
    """A worker's machine that measures itself."""


class TimedShard(Timed, Shard):
    """A shard's machine that measures itself."""


@dataclass(frozen=True)
class TimedASP(ASP):
    """ASP, measured."""

    folder: str = parameter("", doc="where processes leave what they measured")

    def machine(self, role: Role, rank: int, members: Members, seed: int) -> Machine:
        machine = TimedWorker(rank, members) if role == "worker" else TimedShard(self, rank, members, seed)
        machine.measure_in(Path(self.folder), Node(role, rank))
        return machine


def run(params: int, iteration_s: float, iterations: int) -> list[Row]:
    def work() -> None:
        parameter = torch.nn.Parameter(torch.zeros(params))
        opt = Optimizer(torch.optim.SGD([parameter], lr=0.1))
        for _ in range(iterations):
            parameter.grad = torch.full((params,), 1e-6)
            time.sleep(iteration_s)
            opt.step()

    with TemporaryDirectory() as folder:
        launch(work, workers=WORKERS, servers=1, policy=f"{__file__}:TimedASP:folder={folder}")
        us = 1e6 / (iterations * WORKERS)
        worker, server = (
            us * np.sum([np.fromfile(path) for path in Path(folder).glob(f"{role}-*{SPENT}")], axis=0)
            for role in ("worker", "server")
        )
    rows = [Row(part, float(worker[at]), float(server[at]), 0.0) for at, part in enumerate(PARTS)]
    rows.append(Row("together", sum(row.worker_us for row in rows), sum(row.server_us for row in rows), 0.0))
    for row in rows:
        row.share = 1e-6 * (row.worker_us + row.server_us) / iteration_s
    return rows
