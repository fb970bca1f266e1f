"""What rounds of local steps learn, computed late and together, as single gradients are (`gradients.py`).

A round is put aside when it begins, and each of its steps with the samples it takes. When a shard first needs the outer
gradient of one, all steps that have begun, of whatever worker, are computed: the first of each that is not computed
yet together, then the next. Each worker has an inner optimizer of its own, whose state outlives its rounds: of a round
that was dropped as well, since its steps were taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.messages import Handle
from paceline.runtime.virtual.backend import Process
from paceline.runtime.virtual.gradients import Gradients, Key, clip_rows
from paceline.tensors.device_optimizer import SliceOptimizer


@dataclass
class Round:
    """A round that has begun: what with, the samples of its steps, and what came of it."""

    anchor: Tensor
    uses: int
    """How many shards have not consumed their slice yet."""
    steps: list[NDArray[np.int64]] = field(default_factory=list)
    computed: int = 0
    """How many of the steps are computed."""
    outer_gradient: Tensor | None = None


class OuterGradients(Gradients):
    """Takes orders for rounds and hands their outer gradients out. `inner` makes a worker's own optimizer."""

    def __init__(self, *given: Any, inner: Callable[[Tensor], SliceOptimizer]) -> None:
        super().__init__(*given)
        self.make_inner = inner
        self.inner: dict[Process, SliceOptimizer] = {}
        self.rounds: dict[Key, Round] = {}
        """Those that somebody still needs."""
        self.running: dict[Process, Round] = {}
        """The last that each worker has begun."""

    def begin(self, key: Key, anchor: Tensor) -> None:
        """A worker begins a round with these parameters, which nobody writes any more."""
        process = key[:2]
        self.settle(process)
        if process in self.inner:
            self.inner[process].values.copy_(anchor)
        else:
            self.inner[process] = self.make_inner(anchor.clone())
        self.rounds[key] = self.running[process] = Round(anchor, len(self.shards))

    def step(self, key: Key, samples: NDArray[np.int64]) -> None:
        """A worker begins the next step of its round, on these samples."""
        self.rounds[key].steps.append(samples)

    def cancel(self, key: Key) -> None:
        """Forgets a round that died with its worker."""
        self.rounds.pop(key, None)

    def forget(self, process: Process) -> None:
        """Forgets a worker that is gone; what it has pushed may still be needed."""
        if process in self.running and any(each is self.running[process] for each in self.rounds.values()):
            self.settle(process)
        self.running.pop(process, None)
        self.inner.pop(process, None)

    def look(self, handle: Handle, shard: int) -> Tensor:
        key = (handle.source, handle.incarnation, handle.iteration)
        if self.rounds[key].outer_gradient is None:
            self.settle(key[:2])
        gradient = self.rounds[key].outer_gradient
        assert gradient is not None
        return gradient[self.shards[shard]]

    def discard(self, handle: Handle) -> None:
        key = (handle.source, handle.incarnation, handle.iteration)
        self.rounds[key].uses -= 1
        if self.rounds[key].uses == 0:
            del self.rounds[key]

    def settle(self, process: Process) -> None:
        """Has the worker's last round be computed to its end."""
        running = self.running.get(process)
        if running is None or running.outer_gradient is not None:
            return
        self.catch_up()
        running.outer_gradient = running.anchor - self.inner[process].values

    def catch_up(self) -> None:
        """Computes all steps that have begun."""
        while behind := [each for each, part in self.running.items() if part.computed < len(part.steps)]:
            behind.sort(key=lambda each: len(self.next_samples(each)))
            while behind:
                size = len(self.next_samples(behind[0]))
                together = [each for each in behind[: self.at_once] if len(self.next_samples(each)) == size]
                try:
                    self.step_together(together)
                except torch.OutOfMemoryError as error:
                    if len(together) == 1:
                        raise self._failure(error) from error
                    self.at_once = len(together) // 2
                    continue
                behind = behind[len(together) :]

    def next_samples(self, process: Process) -> NDArray[np.int64]:
        running = self.running[process]
        return running.steps[running.computed]

    def step_together(self, processes: list[Process]) -> None:
        """Takes the next step of some workers."""
        samples = torch.from_numpy(np.stack([self.next_samples(each) for each in processes])).to(self.device)
        parameters = torch.stack([self.inner[each].values for each in processes])
        gradients = self._gradients(parameters, self.x[samples], self.y[samples])
        if self.clip is not None:
            clip_rows(gradients, self.clip)
        for process, gradient in zip(processes, gradients, strict=True):
            optimizer = self.inner[process]
            optimizer.apply([optimizer.cut(gradient)], 1.0)
            self.running[process].computed += 1
