"""Gradients on their way while backward still runs (`paceline.Optimizer(..., overlap=True)`).

As soon as backward has a tensor's gradient, a hook begins to copy it to shared memory and to look for NaN and
Inf. It is only staged there: no shard reads it before the push, which `step` sends when all is there (`commit`).
So a backward that fails, or is followed by `skip_step`, leaves nothing behind, and what it had staged is written
over by the next. Why it is so, and where it is staged: docs/decisions/0009. To servers on other hosts it leaves at
once, to be staged there (`early.py`).

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
from paceline.runtime.live.worker.early import Sending
from paceline.runtime.live.worker.staging import Transfer

INSTEAD = "overlap=True has sent it by then: leave overlap out"


class Staged(NamedTuple):
    gradient: Tensor
    version: int
    """How often it had been written to when it was staged."""


class Overlap:
    """Stages the gradients of `tensors` through `transfer`, by hooks; on the CPU, `sending` is told at once."""

    def __init__(
        self, tensors: Sequence[Tensor], names: Sequence[str], transfer: Transfer, sending: Sending | None = None
    ) -> None:
        self.names = names
        self.transfer = transfer
        self.sending = sending
        self.thread = threading.get_ident()
        """Sockets belong to the thread that steps. In others gradients are copied, and leave at the step."""
        self.staged: dict[int, Staged] = {}
        self.pid = os.getpid()
        for index, tensor in enumerate(tensors):
            tensor.register_post_accumulate_grad_hook(partial(self.stage, index))

    def stage(self, index: int, tensor: Tensor) -> None:
        """The hook: on a GPU it runs in a thread of autograd's, so it copies and does nothing else."""
        gradient = tensor.grad
        if gradient is None or gradient.layout is not torch.strided or os.getpid() != self.pid:
            return  # `step` refuses sparse gradients; a forked child's backward is not ours
        before = self.staged.get(index)
        if before is not None and before.gradient is gradient:
            raise PacelineError(f"{self.names[index]} got a second gradient before step (accumulation?): {INSTEAD}")
        if before is not None and self.sending is not None:
            self.sending.begin_attempt()  # one more backward, after the script has taken gradients away
        self.staged[index] = Staged(gradient, gradient._version)
        with torch.no_grad():
            self.transfer.put({index: gradient})
        if self.sending is not None and threading.get_ident() == self.thread:
            self.sending.stage(index)

    def forget(self) -> None:
        """What is staged will not be pushed: the next backward starts afresh."""
        if self.staged and self.sending is not None:
            self.sending.begin_attempt()
        self.staged.clear()

    def commit(self, gradients: Sequence[Tensor | None]) -> bool:
        """Return when the whole gradient is in the segment; whether it is finite."""
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
        if self.sending is not None:
            self.thread = threading.get_ident()
            self.sending.end_attempt([*late, *absent])
        self.transfer.clear(absent)
        self.transfer.put(late)
        return self.transfer.finish()
