"""A durable server's log, played again: the machine, the parameters and the optimizer as they were.

The newest snapshot is loaded, and what was logged since is told to the machine again. What it orders comes out as it
did: steps are taken on the logged gradients, timers are set and have fired. Nothing is sent. What may have been on its
way when the server was killed is the business of those who wait: they ask again (`PullRepeated`); only where the shard
stands is said again to the scheduler, which cannot know that it missed something.

    rebuilt = rebuild(folder)      # runs/.../durable/shard-0
    rebuilt.optimizer.values       # bit for bit what the server had after its last record
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappush
from pathlib import Path

import torch
from torch import Tensor

from paceline import policies
from paceline.core.actions import Action, Apply, Park, Send, SetTimer
from paceline.core.events import Event, PushArrived, TimerFired
from paceline.core.messages import Handle, Node, Rise
from paceline.core.push_weights import shares_of
from paceline.core.shard import Shard
from paceline.core.state_snapshot import restore_snapshot
from paceline.core.trace import Record
from paceline.errors import Damaged
from paceline.runtime.live.storage import update_log
from paceline.runtime.live.storage.update_log import (
    HeldGradient,
    LogEnd,
    LogEntry,
    LoggedEvent,
    LoggedHyper,
    LogReader,
    SnapshotMeta,
)
from paceline.tensors.piece_optimizers import Hyper, State
from paceline.tensors.shard_optimizer import ONE_THREAD, ShardOptimizer, ThreadCounts

Gradient = tuple[Sequence[Tensor], frozenset[int]]
"""In pieces, with the tensors that have none."""


class Rebuilt:
    """A server's memory at a snapshot; `replay` brings it to the end of the log."""

    def __init__(self, meta: SnapshotMeta, values: Tensor, learned: State, threads: ThreadCounts = ONE_THREAD) -> None:
        self.meta = meta
        machine = policies.parse(meta.policy).machine("server", meta.shard, meta.members, meta.seed)
        assert isinstance(machine, Shard)
        machine.clips_mean = meta.optimizer.extras.clip_mean is not None
        if meta.machine is not None:
            restore_snapshot(machine, meta.machine)
        self.machine = machine
        part = meta.assignment[meta.shard]
        self.optimizer = ShardOptimizer(meta.layout, part, values, meta.optimizer, threads)
        if learned:
            self.optimizer.load_state(learned)
        self.hyper: tuple[Hyper, ...] | None = meta.hyper
        self.kept: dict[Handle, Gradient] = {}
        """Gradients that are not used yet."""
        self.timers: list[tuple[float, int]] = list(meta.timers)
        heapify(self.timers)
        self.waits = dict.fromkeys(machine.waiting, "")
        self.rise: Rise | None = None
        """What the scheduler was told last."""
        self.told = meta.told
        self.records: list[Record] = []
        """What the machine was told since the snapshot, with what it ordered."""
        self.serial = meta.serial
        """Of the record that comes next."""
        self.segment = 0
        self.position = 0
        """Where the log goes on: the number of its last segment, and the length of what is whole there."""

    def take(self, entry: LogEntry) -> None:
        match entry.said:
            case LoggedHyper(hyper):
                self.hyper = hyper
                self.optimizer.set_hyper(hyper)
            case HeldGradient(handle, absent):
                self.kept[handle] = self.gradient(entry, absent)
            case LoggedEvent(event, version, absent):
                if isinstance(event, PushArrived) and len(entry.gradient):
                    self.kept[event.push.handle] = self.gradient(entry, absent)
                self.tell(event)
                if self.machine.version != version:
                    raise Damaged(
                        f"the log of server {self.meta.shard} says version {version} where this machine comes to "
                        f"{self.machine.version}: "
                        "it was written by another version of paceline"
                    )

    def gradient(self, entry: LogEntry, absent: tuple[int, ...]) -> Gradient:
        flat = torch.frombuffer(entry.gradient, dtype=self.meta.layout.torch_dtype)
        return self.optimizer.cut(flat), frozenset(absent)

    def tell(self, event: Event) -> None:
        """Tell the machine, and do what it orders as far as it concerns this server alone."""
        if isinstance(event, TimerFired):
            self.timers = [each for each in self.timers if each[1] != event.timer]
            heapify(self.timers)
        actions = self.machine.handle(event)
        self.told += 1
        self.records.append(Record(Node("server", self.meta.shard), self.meta.incarnation, event, tuple(actions)))
        for action in actions:
            self.carry_out(action, event.at)

    def carry_out(self, action: Action, at: float) -> None:
        match action:
            case Apply(handles, weight, norm=norm):
                gradients = [self.kept.pop(handle) for handle in handles]
                absent = [each for _, each in gradients]
                pieces = [each for each, _ in gradients]
                self.optimizer.apply(pieces, weight, absent, norm=norm, shares=shares_of(handles))
            case SetTimer(timer, after_s):
                heappush(self.timers, (at + after_s, timer))
            case Park(pull=pull, reason=reason):
                self.waits[pull.worker] = reason
            case Send(message=Rise() as rise):
                self.rise = rise

    def settle(self) -> None:
        """Let go of the log's memory, and of what nobody holds any more."""
        held = set(self.machine.held_handles())
        self.kept = {
            handle: ([piece.clone() for piece in pieces], absent)
            for handle, (pieces, absent) in self.kept.items()
            if handle in held
        }
        self.waits = {worker: why for worker, why in self.waits.items() if worker in self.machine.waiting}


def rebuild(folder: Path, threads: ThreadCounts = ONE_THREAD) -> Rebuilt:
    """Everything a durable server knew after its last whole record; raises `Damaged` if some of it cannot be read."""
    end = update_log.read_end(folder)
    number, rebuilt = _newest(folder, threads, end)
    segments = [each for each in update_log.numbers(folder, update_log.LOG) if each >= number]
    if segments != list(range(number, number + max(1, len(segments)))):
        have = ", ".join(map(str, segments)) or "none"
        raise Damaged(f"{folder} lacks a segment of its log: after snapshot {number} it has {have}")
    stopped: LogReader | None = None
    for segment in segments:
        reader = LogReader(folder, segment, rebuilt.serial)
        for entry in reader:
            rebuilt.take(entry)
        if reader.position < reader.size and stopped is None:
            stopped = reader
        rebuilt.segment, rebuilt.position, rebuilt.serial = segment, reader.position, reader.serial
    if rebuilt.serial < end.serial:
        where = f"{(stopped or reader).path} is damaged at byte {(stopped or reader).position}"
        lost = end.version - rebuilt.machine.version
        raise Damaged(
            f"{where}: {end.serial - rebuilt.serial} records cannot be read, and with them {lost} of the "
            f"{end.version} updates of server {rebuilt.meta.shard}"
        )
    rebuilt.settle()
    return rebuilt


def _newest(folder: Path, threads: ThreadCounts, end: LogEnd) -> tuple[int, Rebuilt]:
    """The newest snapshot that can be read, with its number: the log goes on from any of them."""
    problems = []
    for number in reversed(update_log.numbers(folder, update_log.SNAPSHOT)):
        try:
            return number, Rebuilt(*update_log.read_snapshot(update_log.snapshot_path(folder, number)), threads)
        except Damaged as problem:
            problems.append(str(problem))
    why = "; ".join(problems) or f"{folder} has no snapshot"
    raise Damaged(f"{why}: none of the {end.version} updates in that log can be replayed")
