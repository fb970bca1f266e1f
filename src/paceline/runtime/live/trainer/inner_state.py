"""The state of a worker's inner optimizer, kept beside the run's checkpoints, on the worker's own host.

It is written at the ends of rounds, now and then, and when the worker leaves. A run that is resumed has each worker go
on with what its rank had there. Who joins, or is started again, begins afresh with the present anchor, and so does a
worker of another host, whose files the run does not keep.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec import structs
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.runtime.live.trainer.run_connection import RunConnection
from paceline.tensors import state
from paceline.tensors.layout import Layout
from paceline.tensors.shard_optimizer import THERE

logger = logging.getLogger(__name__)

FOLDER = "inner-states"
SAVE_S = 10.0
"""How often the state is written, at most."""
MOST_STEPS = 1 << 48


class InnerState:
    """What one worker's inner optimizer has learned, on disk."""

    def __init__(
        self, run: RunConnection, inner: torch.optim.Optimizer, tensors: Sequence[Tensor], layout: Layout
    ) -> None:
        """Of the tensors, which lie as `layout` says, the first ones are those that `inner` trains; buffers follow."""
        self.rank = run.rank
        self.inner = inner
        count = sum(entry.group < len(inner.param_groups) for entry in layout.entries)
        self.tensors = tensors[:count]
        self.layout = structs.replace(layout, entries=layout.entries[:count])
        self.kind = type(inner).__name__
        traces = Path(run.config.output)
        self.path: Path | None = None
        """Its file, if the run keeps a folder on this host."""
        if traces.is_symlink():
            self.path = traces.resolve().parent / FOLDER / f"{self.rank}.safetensors"
        self.saved_s = time.monotonic()
        self.steps = 0
        """The local steps that the restored state has behind it."""

    def restore(self) -> None:
        """Has the optimizer go on with what was kept; says so if that is nothing."""
        why_not = "the run keeps no folder on this host" if self.path is None else self._restore(self.path)
        if why_not:
            logger.warning(f"worker {self.rank}: its inner optimizer begins afresh: {why_not}")

    def _restore(self, path: Path) -> str:
        """Restores what is in the file; returns why it cannot, or ""."""
        try:
            with safe_open(path, "pt") as file:
                said = file.metadata() or {}
                kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            return "nothing was kept for this rank"
        except (OSError, SafetensorError) as error:
            return f"{path.name} cannot be read: {error}"
        if (said.get("layout"), said.get("kind")) != (self.layout.digest(), self.kind):
            return "what was kept is of another model or optimizer"
        entries, steps = len(self.layout.entries), said.get("steps", "")
        fits = all(len(value) in (self.layout.numel, entries) for value in kept.values() if value.dim() == 1)
        if THERE not in kept or len(kept[THERE]) != entries or not fits or not steps.isdecimal():
            return f"{path.name} is damaged"
        for tensor, each in zip(self.tensors, state.to_torch(kept, self.layout), strict=True):
            if each:  # counts of steps stay on the CPU, where torch keeps them
                moved = {name: value.to(tensor.device) if value.dim() else value for name, value in each.items()}
                self.inner.state[tensor] = moved
        self.steps = min(int(steps[:20]), MOST_STEPS)
        return ""

    def save_if_due(self, steps: int) -> None:
        """A round has ended, with so many local steps behind it: writes the state, if that was long ago."""
        if time.monotonic() - self.saved_s > SAVE_S:
            self.save(steps)

    def save(self, steps: int) -> None:
        """Writes the state, whole or not at all."""
        if self.path is None:
            return
        self.saved_s = time.monotonic()
        said = {"layout": self.layout.digest(), "kind": self.kind, "steps": str(steps)}
        part = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            save_file(state.from_torch(self.inner, self.tensors, self.layout), part, said)
            part.chmod(0o600)
            part.replace(self.path)
        except (OSError, SafetensorError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            logger.warning(f"worker {self.rank}: the state of its inner optimizer is not kept: {error}")
            part.unlink(missing_ok=True)
            self.path = None
