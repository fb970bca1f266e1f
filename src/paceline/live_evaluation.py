"""Evaluation of a live comparison outside its clock: worker 0 keeps copies of the model, and others evaluate them.

A worker that evaluated would be late for all others, and the comparison would report a straggler it had made itself.
So copies of the parameters are kept at moments spaced in time, and evaluated when training is over. If there is a
target, a process that is no worker evaluates the newest copy meanwhile, with what the workers leave of the cores, and
worker 0 logs its results: these end the run. Decision 34.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from paceline.run import Point
from paceline.workloads.base import Workload

logger = logging.getLogger(__name__)

MOST = 64
"""So many copies are kept; when there is one more, every second one goes."""
MOST_BYTES = 256 * 2**20
SHARE = 0.01
"""Of a worker's time that copying may take."""
NICENESS = 19
HEAD = np.dtype([("number", np.int64), ("time_s", np.float64), ("updates", np.int64)])
"""What is known of a copy. Number 0 is none, or one that is being written."""


class ModelCopies:
    """Copies of a model's state from different moments of its training, in memory that forks share.

    One process writes. Another may read meanwhile: a copy counts if its number is the same before and after.
    """

    def __init__(self, state: dict[str, Tensor]) -> None:
        aligned = [-(-tensor.nbytes // 64) * 64 for tensor in state.values()]
        self._size = max(64, sum(aligned))
        self._count = max(4, min(MOST, MOST_BYTES // self._size))
        self._heads = np.frombuffer(mmap.mmap(-1, self._count * HEAD.itemsize), HEAD)
        self._gap_s = np.frombuffer(mmap.mmap(-1, 8), np.float64)
        """The least time between two copies. It is here and not with worker 0, which may be started again."""
        self._rest_s = 0.0
        """The same, for what the last copy has cost."""
        self._slots: list[dict[str, Tensor]] = []
        memory = torch.frombuffer(mmap.mmap(-1, self._count * self._size), dtype=torch.uint8)
        for slot in memory.split(self._size):
            parts = slot[: sum(aligned)].split(aligned)
            self._slots.append(
                {
                    name: part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                    for (name, tensor), part in zip(state.items(), parts, strict=True)
                }
            )

    def keep(self, module: nn.Module, time_s: float, updates: int) -> bool:
        """Copies the model as it is now, unless the last copy is too recent. Whether it did."""
        latest = float(self._heads["time_s"].max())
        if latest > 0 and time_s - latest < max(self._gap_s[0], self._rest_s):
            return False
        began = time.thread_time()
        if all(self._heads["number"]):
            self._thin()
        (index, *_) = np.flatnonzero(self._heads["number"] == 0)
        with torch.no_grad():
            for name, tensor in module.state_dict().items():
                self._slots[index][name].copy_(tensor)
        head = self._heads[index]
        head["time_s"], head["updates"] = time_s, updates
        head["number"] = self._heads["number"].max() + 1
        self._rest_s = (time.thread_time() - began) / SHARE
        return True

    def _thin(self) -> None:
        """Drops every second copy, and has later ones come half as often."""
        ordered = np.argsort(self._heads["number"])
        times = self._heads["time_s"][ordered]
        self._gap_s[0] = max(self._gap_s[0], 2 * (times[-1] - times[0]) / (self._count - 1))
        for index in ordered[-2::-2]:
            self._heads[index]["number"] = 0

    def numbers(self) -> list[int]:
        """The copies there are, the oldest first."""
        return sorted(int(number) for number in self._heads["number"] if number)

    def load(self, number: int, module: nn.Module) -> tuple[float, int] | None:
        """Has the module hold a copy; returns its time and its updates, or None if it is gone."""
        for index in np.flatnonzero(self._heads["number"] == number):
            head = self._heads[index]
            time_s, updates = float(head["time_s"]), int(head["updates"])
            module.load_state_dict(self._slots[index])
            if head["number"] == number:
                return time_s, updates
        return None


class LiveEvaluation:
    """Evaluates a live run of a workload. It is made before the run's processes, which are forks, and shared by them.

    Worker 0 calls `observe` after its iterations. Results are lines of a file without a name.
    """

    def __init__(self, workload: Workload, seed: int) -> None:
        self.workload = workload
        self._module = workload.module(seed)
        self._copies = ModelCopies(self._module.state_dict())
        self._file = os.memfd_create("paceline-evaluation", os.MFD_CLOEXEC)
        self._news = os.eventfd(0, os.EFD_CLOEXEC)
        """Counts the copies the evaluator has not heard of."""
        self._read = 0
        """How much of the file has been read in this process."""

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Has a process evaluate the newest copy whenever there is one."""
        from paceline.runtime.live.driver.children import fork

        evaluator = fork("driver", 0, 0, self._evaluate_newest)
        try:
            yield
        finally:
            evaluator.kill()
            evaluator.reap()

    def _evaluate_newest(self) -> int:
        os.nice(NICENESS)
        try:
            while True:
                os.eventfd_read(self._news)
                if numbers := self._copies.numbers():
                    self._evaluate(numbers[-1])
        except Exception as error:
            logger.warning(f"evaluating failed, so the run will not end at its target: {error!r}")
            return 1

    def _evaluate(self, number: int) -> Point | None:
        """What a copy is worth, which is written down; nothing if it is gone."""
        if (moment := self._copies.load(number, self._module)) is None:
            return None
        point = Point(*moment, self.workload.evaluate(self._module))
        os.write(self._file, f"{json.dumps([number, point.plain()])}\n".encode())
        return point

    def observe(self, module: nn.Module, time_s: float, updates: int) -> list[Point]:
        """Keeps a copy if one is due, and returns what has been evaluated since the last call."""
        if self._copies.keep(module, time_s, updates):
            os.eventfd_write(self._news, 1)
        return list(self._results().values())

    def _results(self) -> dict[int, Point]:
        """What has been written since the last call, by the number of the copy."""
        data = os.pread(self._file, os.fstat(self._file).st_size - self._read, self._read)
        lines, _, _ = data.rpartition(b"\n")
        self._read += len(lines) + bool(lines)
        return {number: Point.from_plain(plain) for number, plain in map(json.loads, lines.splitlines())}

    def history(self) -> list[Point]:
        """Returns the run's history when training is over. What has not been evaluated yet is, here."""
        points = self._results()
        for number in self._copies.numbers():
            if number not in points and (point := self._evaluate(number)) is not None:
                points[number] = point
        return [points[number] for number in sorted(points)]

    def of_model(self, model: dict[str, Tensor]) -> dict[str, float]:
        """Evaluates the model that a run has left."""
        self._module.load_state_dict(model)
        return self.workload.evaluate(self._module)

    def close(self) -> None:
        os.close(self._file)
        os.close(self._news)
