"""When a run is checkpointed, and what becomes of it.

    due          as soon as it can be: at the beginning of a run, and when the last one was lost; every so many seconds;
                 when somebody wants one (a server by the number of updates, the run at its end)
    under way    all servers have been told to write their parts, at once; one at a time
    committed    all have written, and it is whole
    given up     one could not write, or has died: the last one stays, and training goes on

The one at the end is ordered once; if a worker comes or a server dies after that, it was not the last.
"""

from __future__ import annotations

from typing import assert_never

from msgspec import Struct

from paceline.core.control.machine import ControlMachine
from paceline.core.machine import require


class MomentCame(Struct, frozen=True):
    """It is `at`. `possible` tells whether all servers would hear an order."""

    at: float
    possible: bool


class CheckpointWanted(Struct, frozen=True):
    """Somebody wants one now. `final` is the one at the end."""

    at: float
    possible: bool = True
    final: bool = False


class CheckpointLost(Struct, frozen=True):
    """What was kept is gone: another is due."""


class OrderFailed(Struct, frozen=True):
    """There is no place for this checkpoint: no server was told."""

    number: int


class PartWritten(Struct, frozen=True):
    """A server has written its part of a checkpoint that `shards` have to write, or could not."""

    number: int
    shard: int
    shards: int
    error: str


class CommitEnded(Struct, frozen=True):
    """The answer to `CommitCheckpoint`: why it failed, or ""."""

    number: int
    error: str


class WriterDied(Struct, frozen=True):
    """A server died, so its part will not be written. `kept` tells whether there is any checkpoint."""

    name: str
    kept: bool


class TrainingContinued(Struct, frozen=True):
    """A worker trains after the checkpoint at the end was ordered: that was not the last, so `final` is cancelled."""


class OrderCheckpoint(Struct, frozen=True):
    """Have all servers write; say at once if that fails."""

    number: int


class CommitCheckpoint(Struct, frozen=True):
    """All parts are there: make it whole, and say at once whether it is."""

    number: int


class AbandonCheckpoint(Struct, frozen=True):
    """Forget what was written, and say why."""

    number: int
    why: str


CheckpointEvent = (
    MomentCame
    | CheckpointWanted
    | CheckpointLost
    | OrderFailed
    | PartWritten
    | CommitEnded
    | WriterDied
    | TrainingContinued
)
CheckpointOrder = OrderCheckpoint | CommitCheckpoint | AbandonCheckpoint


class CheckpointMachine(ControlMachine[CheckpointEvent, CheckpointOrder]):
    """Orders checkpoints one at a time, numbered upwards from `number` + 1."""

    def __init__(self, number: int, at: float, every_s: float | None = None, due: bool = True) -> None:
        super().__init__()
        self.number = number
        """Of the last checkpoint that was ordered."""
        self.ordered_at = at
        self.every_s = every_s
        self.due = due
        """One is to be ordered as soon as it can be."""
        self.under_way = False
        self.final = False
        """The checkpoint at the end has been ordered, and nobody has come or died since."""
        self.written: set[int] = set()

    def take(self, event: CheckpointEvent) -> None:
        match event:
            case MomentCame():
                timed = self.every_s is not None and not self.final and event.at - self.ordered_at >= self.every_s
                if event.possible and (timed or self.due):
                    self.order(event.at)
            case CheckpointWanted():
                self.final = self.final or event.final
                if event.possible:
                    self.order(event.at)
            case CheckpointLost():
                self.due = True
            case OrderFailed():
                self.under_way = False
            case PartWritten():
                if self.under_way and event.number == self.number:
                    self.on_part_written(event)
            case CommitEnded():
                if event.error:
                    self.abandon(event.error)
                self.under_way = False
            case WriterDied():
                self.final = False
                if self.under_way:
                    self.abandon(f"{event.name} died")
                    self.due = not event.kept
            case TrainingContinued():
                self.final = False
            case _:
                assert_never(event)

    def order(self, at: float) -> None:
        if self.under_way:
            return
        self.ordered_at = at
        self.due = False
        self.number += 1
        self.under_way = True
        self.written.clear()
        self.orders.append(OrderCheckpoint(self.number))

    def on_part_written(self, event: PartWritten) -> None:
        if event.error:
            self.abandon(f"server {event.shard}: {event.error}")
            return
        self.written.add(event.shard)
        if len(self.written) == event.shards:
            self.orders.append(CommitCheckpoint(self.number))

    def abandon(self, why: str) -> None:
        self.under_way = False
        self.orders.append(AbandonCheckpoint(self.number, why))

    def check(self) -> None:
        require(self.number >= -1, f"checkpoint {self.number}")
