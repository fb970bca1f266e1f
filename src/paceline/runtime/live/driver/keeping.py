"""When a live run is checkpointed, and what becomes of it: the driver's side of `checkpoint.py`.

A checkpoint is ordered from all servers at once and committed when all have written. One that fails (a full
disk) is a loud line and nothing else: training goes on, and the last good checkpoint stays.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.core.policy import PeerPolicy, Policy
from paceline.errors import ConfigError, RunFailed
from paceline.runtime.live import checkpoint, wire
from paceline.runtime.live.server.durable import Durable
from paceline.tensors.assignment import Assignment
from paceline.tensors.layout import Layout


@dataclass(frozen=True)
class Keeping:
    """Where a run keeps its files, how often it is checkpointed, and from which checkpoint it starts."""

    folder: Path
    every_updates: int | None = None
    every_s: float | None = None
    resume: bool = False
    durable: Durable | None = None
    """Servers log what they do, so that nothing acknowledged is lost with one."""
    against_loss: bool = False
    """Nobody asked for checkpoints, but hosts may be lost: one at the beginning too, none if there are no servers."""

    def check(self, policy: Policy) -> None:
        """Refuse what this policy cannot do."""
        asked = not self.against_loss and (self.every_updates is not None or self.every_s is not None)
        if isinstance(policy, PeerPolicy) and asked:
            raise ConfigError(
                f"{policy} has no servers that could write checkpoints on the way, only one at the end: "
                "leave out --checkpoint-updates and --checkpoint-s"
            )
        if isinstance(policy, PeerPolicy) and self.durable is not None:
            raise ConfigError(f"{policy} has no servers that could be durable: leave out --durable")

    @property
    def checkpoints(self) -> Path:
        return self.folder / checkpoint.FOLDER


class Keeper:
    def __init__(self, keeping: Keeping, order: Callable[[Path], dict[int, int]], say: Callable[[str], None]) -> None:
        self.keeping = keeping
        self.order = order
        self.say = say
        self.last: Path | None = None
        """The newest whole checkpoint."""
        self.under_way: Path | None = None
        self.written: dict[int, checkpoint.Shard] = {}
        self.number = 0
        self.epochs: dict[int, int] = {}
        """Of each sampler: the oldest epoch that was not finished when the checkpoint was ordered."""
        self.resumed_epochs: dict[int, int] = {}
        """The same of the checkpoint this run began with."""
        self.ordered_s = -math.inf if keeping.against_loss else time.monotonic()
        if keeping.resume:
            self.last, manifest = checkpoint.latest(keeping.checkpoints)
            self.number = manifest.number
            self.resumed_epochs = manifest.epochs

    def resume_layout(self) -> Layout | None:
        """The layout a resumed model must have."""
        return checkpoint.read(self.last).layout if self.last is not None else None

    def tick(self) -> None:
        every = self.keeping.every_s
        if every is not None and time.monotonic() - self.ordered_s >= every:
            self.begin()

    def begin(self) -> None:
        """Order a checkpoint, unless one is under way."""
        if self.under_way is not None:
            return
        self.ordered_s = time.monotonic()
        self.number += 1
        self.written.clear()
        part = self.keeping.checkpoints / f"{self.number:06d}{checkpoint.PART}"
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        except OSError as error:
            self.say(f"WARNING: cannot checkpoint: {error}; training goes on")
            return
        self.under_way = part
        self.epochs = self.order(part)

    def saved(self, message: wire.Saved, policy: str, layout: Layout, assignment: Assignment, others: Path) -> None:
        part = self.under_way
        if part is None or message.folder != str(part):
            return
        if message.entry is None:
            self.give_up(f"server {message.shard}: {message.error}")
            return
        self.written[message.shard] = message.entry
        if len(self.written) < len(assignment):
            return
        try:
            shutil.copy(others, part / "others.safetensors")
            shards = tuple(self.written[shard] for shard in range(len(assignment)))
            manifest = checkpoint.Manifest(
                self.number, policy, layout, shards, "others.safetensors", self.epochs, assignment
            )
            self.last = checkpoint.commit(part, manifest)
            self.under_way = None
        except OSError as error:
            self.give_up(str(error))

    def give_up(self, why: str) -> None:
        """The checkpoint under way will not be: say so, and forget it."""
        kept = f"the last good one is {self.last}" if self.last is not None else "there is none yet"
        self.say(f"WARNING: the checkpoint failed ({why}); training goes on, {kept}")
        if self.under_way is not None:
            shutil.rmtree(self.under_way, ignore_errors=True)
        self.under_way = None

    def check_layout(self, layout: Layout) -> None:
        wanted = self.resume_layout()
        if self.keeping.resume and wanted != layout:
            raise RunFailed(f"the script's model is not the one in {self.last}: it cannot be resumed")
