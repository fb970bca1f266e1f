"""`paceline bench safety`: what acknowledgements, deduplication, finite checks and the trace cost without any fault.

A real run, with the parts timed inside its processes: every call of a part is measured in CPU time of the calling
thread, so what other processes do on the machine is not counted. Workers sleep as long as an iteration computes, so
caches are as cold as they would be. The machines' time counts in whole, although deciding is their main business:
acknowledging and recognizing copies is spread through them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch

from paceline.api import launch
from paceline.core.shard import Shard
from paceline.core.worker import Worker
from paceline.optim import Optimizer
from paceline.runtime.live.recording import TraceFile
from paceline.runtime.live.server.server import LiveServer
from paceline.runtime.live.worker.worker import LiveWorker
from paceline.tensors import passes

WORKERS = 4
WARM = 10
PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "finite check, with the copy it is part of": ((passes, "copy_and_look"),),
    "acknowledgements, deduplication": ((Worker, "handle"), (Shard, "handle")),
    "trace": ((TraceFile, "write"), (TraceFile, "flush")),
}


@dataclass
class Row:
    part: str
    worker_us: float
    """CPU time of an iteration, on the worker."""
    server_us: float
    """And on the server, for one push."""
    share: float
    """Of the iteration, both together."""


class Meter:
    """Times every call of the parts in the processes that are forked while it is open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spent: dict[str, float] = {}
        self.originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Meter:
        for part, places in PARTS.items():
            for place, name in places:
                self._replace(place, name, partial(self._timed, part))
        self._replace(LiveWorker, "leave", partial(self._writing, "worker"))
        self._replace(LiveServer, "finish", partial(self._writing, "server"))
        return self

    def __exit__(self, *_: object) -> None:
        for place, name, original in self.originals:
            setattr(place, name, original)

    def _replace(self, place: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(place, name)
        self.originals.append((place, name, original))
        setattr(place, name, make(original))

    def _timed(self, part: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return original(*arguments, **named)
            finally:
                self.spent[part] = self.spent.get(part, 0.0) + time.thread_time() - began

        return timed

    def _writing(self, role: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """At its end a process leaves what it measured."""

        def writing(carrier: Any, *arguments: Any) -> Any:
            rank = getattr(carrier, "rank", 0)
            (self.folder / f"{role}-{rank}").write_bytes(msgspec.json.encode(self.spent))
            return original(carrier, *arguments)

        return writing

    def read(self, role: str) -> dict[str, float]:
        """Seconds of each part, of all processes of this role."""
        total: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        for path in self.folder.glob(f"{role}-*"):
            for part, seconds in msgspec.json.decode(path.read_bytes(), type=dict[str, float]).items():
                total[part] += seconds
        return total


def run(params: int, iteration_s: float, iterations: int) -> list[Row]:
    def work() -> None:
        parameter = torch.nn.Parameter(torch.zeros(params))
        opt = Optimizer(torch.optim.SGD([parameter], lr=0.1))
        for _ in range(iterations):
            parameter.grad = torch.full((params,), 1e-6)
            time.sleep(iteration_s)
            opt.step()

    with TemporaryDirectory() as folder, Meter(Path(folder)) as meter:
        launch(work, workers=WORKERS, servers=1, policy="asp")
        pushes = iterations * WORKERS
        sides = [{part: 1e6 * s / pushes for part, s in meter.read(role).items()} for role in ("worker", "server")]
    rows = [Row(part, sides[0][part], sides[1][part], 0.0) for part in PARTS]
    rows.append(Row("together", sum(row.worker_us for row in rows), sum(row.server_us for row in rows), 0.0))
    for row in rows:
        row.share = 1e-6 * (row.worker_us + row.server_us) / iteration_s
    return rows
