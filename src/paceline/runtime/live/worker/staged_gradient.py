"""Gradients on their way while backward still runs (`paceline.Optimizer(..., overlap=True)`).

As soon as backward has a tensor's gradient, a hook begins to copy it to shared memory and to look for NaN and
Inf. It is only staged there: no shard reads it before the push, which `step` sends when all is there (`write`).
So a backward that fails, or is followed by `skip_step`, leaves nothing behind, and what it had staged is written
over by the next. Why it is so, and where it is staged: docs/decisions/0009. To servers on other hosts it leaves at
once, to be staged there (`worker/early_frames.py`).

What changes a gradient after its hook would change it here and not there. So that is refused: a second
gradient before the step, and a gradient that is another tensor at the step, or one written to since.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.runtime.live.worker.data_path import EarlySending, GradientCopies
from paceline.tensors.layout import Layout

INSTEAD = "overlap=True has sent it by then: leave overlap out"


class Staged(NamedTuple):
    gradient: Tensor
    version: int
    """How often it had been written to when it was staged."""


class StagedGradient:
    """Stages the gradients of `tensors` by hooks; the links in `early` are told at once."""

    def __init__(
        self, layout: Layout, tensors: Sequence[Tensor], copies: GradientCopies, early: Sequence[EarlySending]
    ) -> None:
        self.names = [entry.name for entry in layout.entries]
        self.tensors = tensors
        self.copies = copies
        self.early = early
        """Links to other hosts, as there are, that send what is staged."""
        self.thread = threading.get_ident()
        """Sockets belong to the thread that steps. In others gradients are copied, and leave at the step."""
        self.staged: dict[int, Staged] = {}
        self.pid = os.getpid()

    def begin(self) -> None:
        """Registers the hooks."""
        for index, tensor in enumerate(self.tensors):
            tensor.register_post_accumulate_grad_hook(partial(self.stage, index))

    def stage(self, index: int, tensor: Tensor) -> None:
        """The hook: on a GPU it runs in a thread of autograd's, so it copies and does nothing else."""
        gradient = tensor.grad
        if gradient is None or gradient.layout is not torch.strided or os.getpid() != self.pid:
            return  # `step` refuses sparse gradients; a forked child's backward is not ours
        before = self.staged.get(index)
        if before is not None and before.gradient is gradient:
            raise PacelineError(f"{self.names[index]} got a second gradient before step (accumulation?): {INSTEAD}")
        if before is not None:
            self.begin_attempt()  # one more backward, after the script has taken gradients away
        self.staged[index] = Staged(gradient, gradient._version)
        with torch.no_grad():
            self.copies.put({index: gradient})
        if self.early and threading.get_ident() == self.thread:
            for link in self.early:
                link.stage(index)

    def begin_attempt(self) -> None:
        for link in self.early:
            link.begin_attempt()

    def forget(self) -> None:
        """The next backward starts afresh."""
        if self.staged:
            self.begin_attempt()
        self.staged.clear()

    def write(self, gradients: Sequence[Tensor | None]) -> bool:
        late: dict[int, Tensor] = {}
        for index, gradient in enumerate(gradients):
            staged = self.staged.get(index)
            if gradient is None:
                continue
            if staged is None:
                # Not of this backward: set by the script, or left from the last step. Torch steps with it, so do we.
                late[index] = gradient
            elif gradient is not staged.gradient or gradient._version != staged.version:
                raise PacelineError(
                    f"the gradient of {self.names[index]} was changed after backward (clipping?): {INSTEAD}"
                )
        absent = [index for index, gradient in enumerate(gradients) if gradient is None]
        self.staged.clear()
        self.thread = threading.get_ident()
        for link in self.early:
            link.end_attempt([*late, *absent])
        self.copies.clear(absent)
        self.copies.put(late)
        return self.copies.finish()

    def release(self) -> None:
        """The segment keeps the gradient until the next backward."""
