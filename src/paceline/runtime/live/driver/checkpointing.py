"""Carries out the checkpoint orders of `core/control/checkpoints.py`, which decides when a run is checkpointed.

A checkpoint is ordered from all servers at once and committed when all have written. One that fails (a full
disk) is a loud line and nothing else: training goes on, and the last good checkpoint stays. The first, number 0, is
ordered before any worker begins, so that there always is one: what is restarted or resumed early goes on from that.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import assert_never

from paceline import private_files
from paceline.core.control.checkpoints import (
    AbandonCheckpoint,
    CheckpointEvent,
    CheckpointLost,
    CheckpointMachine,
    CheckpointOrder,
    CheckpointWanted,
    CommitCheckpoint,
    CommitEnded,
    MomentCame,
    OrderCheckpoint,
    OrderFailed,
    PartWritten,
    TrainingContinued,
    WriterDied,
)
from paceline.core.policy import PeerPolicy, Policy
from paceline.errors import ConfigError, Damaged, RunFailed
from paceline.runtime.live.driver.run_state import RunState
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.protocol.records import DurabilityOptions, ShardEntry
from paceline.runtime.live.storage import checkpoint
from paceline.runtime.live.storage.checksums import file_hash
from paceline.tensors.assignment import Assignment, Ranges
from paceline.tensors.layout import Layout


@dataclass(frozen=True)
class CheckpointOptions:
    """Where a run keeps its files, how often it is checkpointed, and from which checkpoint it starts."""

    folder: Path
    every_updates: int | None = None
    every_s: float | None = None
    resume: bool = False
    from_checkpoint: int | None = None
    """Resume from the checkpoint with this number; from the newest that is whole if none is named."""
    durable: DurabilityOptions | None = None
    """Servers log what they do, so that nothing acknowledged is lost with one."""
    against_loss: bool = False
    """Nobody asked for checkpoints, but hosts may be lost; there are none on the way if there are no servers."""

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


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run begins with, if with one, and what it says besides the model."""

    path: Path | None = None
    epochs: dict[int, int] = field(default_factory=dict)
    """Of each sampler: the oldest epoch that was not finished when the checkpoint was ordered."""
    schedulers: bytes = b""
    """The states of LR schedulers."""


def find_resumed(checkpointing: CheckpointOptions | None, say: Callable[[str], None]) -> Resumed:
    """Returns what a run with these options begins with."""
    if checkpointing is None or not checkpointing.resume:
        return Resumed()
    if checkpointing.from_checkpoint is not None:
        path, manifest = checkpoint.find(checkpointing.checkpoints, checkpointing.from_checkpoint)
    else:
        path, manifest = checkpoint.latest(checkpointing.checkpoints, say)
    return Resumed(path, manifest.epochs, manifest.schedulers)


class Checkpointer:
    """Does what the machine orders (`core/control/checkpoints.py`)."""

    def __init__(
        self,
        checkpointing: CheckpointOptions,
        resumed: Resumed,
        order: Callable[[Path], tuple[dict[int, int], bytes]],
        can_order: Callable[[], bool],
        others: Path,
        state: RunState,
        say: Callable[[str], None],
    ) -> None:
        """`order` has all servers write; it returns the samplers' epochs and the LR schedulers' states by then. It
        has no sense while `can_order` is false. `others` is the file with what is not trained."""
        self.checkpointing = checkpointing
        self.order = order
        self.can_order = can_order
        self.others = others
        self.state = state
        self.say = say
        self.last = resumed.path
        """The newest whole checkpoint."""
        self.part = Path()
        """What the checkpoint that was ordered last is written to."""
        self.entries: dict[int, ShardEntry] = {}
        """What the servers have written there."""
        self.assignment: Assignment = ()
        """Which server has which part."""
        self.epochs: dict[int, int] = {}
        self.schedulers = b""
        """What the samplers and the LR schedulers said when it was ordered."""
        number = checkpoint.next_number(checkpointing.checkpoints) - 1
        due = not checkpointing.resume
        self.machine = CheckpointMachine(number, time.monotonic(), checkpointing.every_s, due)

    @property
    def under_way(self) -> Path | None:
        """Where the checkpoint under way is written."""
        return self.part if self.machine.under_way else None

    @property
    def has_ordered_final(self) -> bool:
        return self.machine.final

    def resume_layout(self) -> Layout | None:
        """The layout a resumed model must have."""
        return checkpoint.read(self.last).layout if self.last is not None else None

    # What happens.

    def tick(self) -> None:
        if self.machine.due or self.machine.every_s is not None:
            self._deliver(MomentCame(time.monotonic(), self.can_order()))

    def begin_if_possible(self) -> None:
        """Order a checkpoint, unless a server that is being restarted would not hear of it."""
        self._deliver(CheckpointWanted(time.monotonic(), self.can_order()))

    def begin(self, final: bool = False) -> None:
        """Order a checkpoint, unless one is under way."""
        self._deliver(CheckpointWanted(time.monotonic(), final=final))

    def folder_was_lost(self) -> None:
        self._deliver(CheckpointLost())

    def worker_is_there(self) -> None:
        """Tells the machine that a worker trains, if the checkpoint at the end was ordered."""
        if self.machine.final:
            self._deliver(TrainingContinued())

    def close(self) -> None:
        """Removes what an incomplete checkpoint has left, once nobody writes to it any more."""
        if self.part != Path():
            checkpoint.discard(self.part)

    def server_died(self, name: str) -> None:
        """What it was to write will not come."""
        self._deliver(WriterDied(name, kept=self.last is not None))

    def saved(self, message: wire.Saved, assignment: Assignment) -> None:
        if message.folder != str(self.under_way):
            return
        if message.entry is not None:
            self.entries[message.shard] = message.entry
        self.assignment = assignment
        error = message.error if message.entry is None else ""
        self._deliver(PartWritten(self.machine.number, message.shard, len(assignment), error))

    # What is ordered.

    def _deliver(self, event: CheckpointEvent) -> None:
        for order in self.machine.handle(event):
            self._execute(order)

    def _execute(self, order: CheckpointOrder) -> None:
        match order:
            case OrderCheckpoint(number):
                self._order(number)
            case AbandonCheckpoint(_, why):
                kept = f"the last good one is {self.last}" if self.last is not None else "there is none yet"
                self.say(f"WARNING: the checkpoint failed ({why}); training goes on, {kept}")
                checkpoint.discard(self.part)
            case CommitCheckpoint(number):
                self._deliver(CommitEnded(number, self._commit(number)))
            case _:
                assert_never(order)

    def _order(self, number: int) -> None:
        self.part = self.checkpointing.checkpoints / f"{number:06d}{checkpoint.PART}"
        self.entries.clear()
        try:
            checkpoint.discard(self.part)
            private_files.make_folder(self.part)
        except OSError as error:
            self.say(f"WARNING: cannot checkpoint: {error}; training goes on")
            self._deliver(OrderFailed(number))
            return
        self.epochs, self.schedulers = self.order(self.part)

    def _commit(self, number: int) -> str:
        """Makes it whole; returns why it is not, or ""."""
        model = self.state.model
        try:
            shutil.copy(self.others, self.part / checkpoint.OTHERS)
            shards = tuple(self.entries[shard] for shard in range(len(self.assignment)))
            manifest = checkpoint.Manifest(
                number, str(model.policy), model.layout, shards,
                file_hash(self.part / checkpoint.OTHERS), self.epochs, self.assignment, self.schedulers,
            )  # fmt: skip
            self.last = checkpoint.commit(self.part, manifest)
        except OSError as error:
            return str(error)
        return ""

    def newest(self, part: Ranges) -> Path | None:
        """What a server with this part starts from when it died: the last checkpoint, or an older one if that was
        damaged since."""
        if self.last is not None:
            try:
                checkpoint.check(self.last, part)
            except Damaged:
                try:
                    self.last, _ = checkpoint.latest(self.checkpointing.checkpoints, self.say)
                except Damaged as problem:
                    self.say(f"WARNING: {problem}")
                    self.last = None
        return self.last

    def check_layout(self, layout: Layout) -> None:
        wanted = self.resume_layout()
        if self.checkpointing.resume and wanted != layout:
            raise RunFailed(f"the script's model is not the one in {self.last}: it cannot be resumed")
