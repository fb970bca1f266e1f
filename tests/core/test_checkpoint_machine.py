"""When checkpoints are ordered, committed and given up: also in random runs in which servers die at any moment."""

from __future__ import annotations

import random

import pytest

from paceline.core.control.checkpoints import (
    AbandonCheckpoint,
    CheckpointEvent,
    CheckpointLost,
    CheckpointMachine,
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

EVERY_S = 5.0


def written(machine: CheckpointMachine, *shards: int) -> list[object]:
    return [order for shard in shards for order in machine.handle(PartWritten(machine.number, shard, 2, ""))]


def test_the_first_is_ordered_as_soon_as_it_can_be_and_committed_when_all_have_written() -> None:
    machine = CheckpointMachine(-1, 0.0)
    assert machine.handle(MomentCame(1.0, possible=False)) == []
    assert machine.handle(MomentCame(1.1, possible=True)) == [OrderCheckpoint(0)]
    assert machine.handle(CheckpointWanted(1.2)) == [], "one at a time"
    assert written(machine, 0, 0) == []
    assert machine.handle(PartWritten(7, 1, 2, "")) == [], "of another one"
    assert written(machine, 1) == [CommitCheckpoint(0)]
    assert machine.handle(CommitEnded(0, "")) == []
    assert not machine.under_way
    assert machine.handle(MomentCame(99.0, possible=True)) == []


def test_every_so_many_seconds_but_for_after_the_last() -> None:
    machine = CheckpointMachine(3, 0.0, EVERY_S, due=False)
    assert machine.handle(MomentCame(4.9, True)) == []
    assert machine.handle(MomentCame(5.0, True)) == [OrderCheckpoint(4)]
    machine.handle(OrderFailed(4))
    assert machine.handle(MomentCame(9.9, True)) == []
    assert machine.handle(CheckpointWanted(9.9, final=True)) == [OrderCheckpoint(5)]
    machine.handle(CommitEnded(5, ""))
    assert machine.handle(MomentCame(60.0, True)) == []
    machine.handle(TrainingContinued())
    assert machine.handle(MomentCame(60.0, True)) == [OrderCheckpoint(6)]


@pytest.mark.parametrize("kept", [True, False])
def test_a_server_that_dies_takes_the_checkpoint_with_it(kept: bool) -> None:
    machine = CheckpointMachine(-1, 0.0)
    machine.handle(MomentCame(0.0, True))
    written(machine, 0)
    assert machine.handle(WriterDied("server 1", kept)) == [AbandonCheckpoint(0, "server 1 died")]
    assert written(machine, 1) == []
    assert machine.handle(MomentCame(0.0, True)) == ([] if kept else [OrderCheckpoint(1)]), "there has to be one"


def test_one_that_cannot_be_written_is_given_up() -> None:
    machine = CheckpointMachine(-1, 0.0)
    machine.handle(MomentCame(0.0, True))
    assert machine.handle(PartWritten(0, 1, 2, "no space")) == [AbandonCheckpoint(0, "server 1: no space")]
    assert written(machine, 0) == []
    assert machine.handle(CheckpointWanted(1.0)) == [OrderCheckpoint(1)]
    written(machine, 0, 1)
    assert machine.handle(CommitEnded(1, "no space")) == [AbandonCheckpoint(1, "no space")]
    assert not machine.under_way


def test_what_is_lost_is_made_again() -> None:
    machine = CheckpointMachine(2, 0.0, due=False)
    machine.handle(CheckpointLost())
    assert machine.handle(MomentCame(0.0, True)) == [OrderCheckpoint(3)]


class Disk:
    """Servers that write what is ordered, late, not at all, or die; and the folder it comes into."""

    def __init__(self, seed: int, machine: CheckpointMachine) -> None:
        self.draw, self.machine = random.Random(seed), machine
        self.at, self.shards = 0.0, 3
        self.down: set[int] = set()
        self.faults = 0.3
        self.order: int | None = None
        """The number of the checkpoint under way."""
        self.to_write: list[tuple[int, int]] = []
        """(number, shard) on its way from a server that has written."""
        self.whole: set[int] = set()
        """Those of the one under way that have been heard."""
        self.kept: list[int] = []

    def deliver(self, event: CheckpointEvent) -> None:
        for order in self.machine.handle(event):
            match order:
                case OrderCheckpoint(number):
                    assert self.order is None, "one at a time"
                    assert not self.down, "an order to a server that is dead"
                    assert number > max(self.kept, default=-1), "numbered upwards"
                    self.order, self.whole = number, set()
                    if self.draw.random() < self.faults / 3:
                        self.order = None
                        self.deliver(OrderFailed(number))
                    else:
                        self.to_write += [(number, shard) for shard in range(self.shards)]
                case CommitCheckpoint(number):
                    assert number == self.order
                    assert self.whole == set(range(self.shards)), "a part is missing"
                    failed = self.draw.random() < self.faults / 3
                    if not failed:
                        self.order = None
                        self.kept.append(number)
                    self.deliver(CommitEnded(number, "no space" if failed else ""))
                case AbandonCheckpoint(number):
                    assert number == self.order
                    self.order = None

    def step(self) -> None:
        self.at += self.draw.random()
        draw = self.draw.random()
        if draw < 0.4:
            self.deliver(MomentCame(self.at, not self.down))
        elif draw < 0.5:
            self.deliver(CheckpointWanted(self.at, not self.down))
        elif draw < 0.8 and self.to_write:
            number, shard = self.to_write.pop(self.draw.randrange(len(self.to_write)))
            error = "no space" if self.draw.random() < self.faults / 5 else ""
            if not error and number == self.order:
                self.whole.add(shard)
            self.deliver(PartWritten(number, shard, self.shards, error))
        elif draw < 0.9 and self.draw.random() < self.faults:
            shard = self.draw.randrange(self.shards)
            self.to_write = [each for each in self.to_write if each[1] != shard]
            self.down.add(shard)
            self.deliver(WriterDied(f"server {shard}", bool(self.kept)))
        else:
            self.down.clear()

    def run(self) -> None:
        self.machine.checks = True
        for _ in range(300):
            self.step()
        self.faults, kept = 0.0, len(self.kept)
        for _ in range(200):
            self.step()
        assert len(self.kept) > kept, "none is made any more"


class Greedy(CheckpointMachine):
    """Orders another one while one is under way."""

    def order(self, at: float) -> None:
        self.under_way = False
        super().order(at)


class Forgetful(CheckpointMachine):
    """Does not notice that a server has died."""

    def take(self, event: CheckpointEvent) -> None:
        if not isinstance(event, WriterDied):
            super().take(event)


class Hasty(CheckpointMachine):
    """Commits without the last part."""

    def on_part_written(self, event: PartWritten) -> None:
        super().on_part_written(PartWritten(event.number, event.shard, event.shards - 1, event.error))


class Mixed(CheckpointMachine):
    """Takes parts of another checkpoint for those of this one."""

    def take(self, event: CheckpointEvent) -> None:
        if isinstance(event, PartWritten):
            event = PartWritten(self.number, event.shard, event.shards, event.error)
        super().take(event)


def test_random_runs() -> None:
    for seed in range(200):
        Disk(seed, CheckpointMachine(-1, 0.0, EVERY_S)).run()


@pytest.mark.parametrize("broken", [Greedy, Forgetful, Hasty, Mixed])
def test_broken_ones_are_noticed(broken: type[CheckpointMachine]) -> None:
    with pytest.raises(AssertionError):
        [Disk(seed, broken(-1, 0.0, EVERY_S)).run() for seed in range(200)]
