"""A durable server's log, played again: the machine, the parameters and the optimizer as they were.

The newest snapshot is loaded, and what was logged since is told to the machine again. What it orders comes out as it
did: steps are taken on the logged gradients, timers are set and have fired. Nothing is sent. What may have been on its
way when the server was killed is the business of those who wait: they ask again (`PullRepeated`); only where the shard
stands is said again to the scheduler, which cannot know that it missed something.

    rebuilt = rebuild(folder)      # runs/.../durable/shard-0
    rebuilt.optimizer.values       # bit for bit what the server had after its last record
"""

from __future__ import annotations

from heapq import heapify, heappush
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from paceline import policies
from paceline.core.actions import Action, Apply, Park, Send, SetTimer
from paceline.core.events import Event, PushArrived, TimerFired
from paceline.core.freezing import thaw
from paceline.core.messages import Handle, Node, Rise
from paceline.core.shard import Shard
from paceline.core.trace import Record
from paceline.errors import PacelineError
from paceline.runtime.live.server import durable
from paceline.runtime.live.server.durable import Entry, Kept, Logged, Meta, Rated
from paceline.tensors.slices import ONE_THREAD, SliceOptimizer, Threads
from paceline.tensors.steppers import Hyper, State

Gradient = tuple[list[Tensor], frozenset[int]]
"""In pieces, with the tensors that have none."""


class Rebuilt:
    """A server's memory at a snapshot; `replay` brings it to the end of the log."""

    def __init__(self, meta: Meta, values: Tensor, learned: State, threads: Threads = ONE_THREAD) -> None:
        self.meta = meta
        machine = policies.parse(meta.policy).machine("server", meta.shard, meta.members, meta.seed)
        assert isinstance(machine, Shard)
        if meta.machine is not None:
            thaw(machine, meta.machine)
        self.machine = machine
        part = meta.assignment[meta.shard]
        self.optimizer = SliceOptimizer(meta.layout, part, values, meta.optimizer, threads)
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
        self.segment = 0
        self.end = 0
        """Where the log goes on: the number of its last segment, and the length of what is whole there."""

    def take(self, entry: Entry) -> None:
        match entry.said:
            case Rated(hyper):
                self.hyper = hyper
                self.optimizer.set_hyper(hyper)
            case Kept(handle, absent):
                self.kept[handle] = self.gradient(entry, absent)
            case Logged(event, version, absent):
                if isinstance(event, PushArrived) and len(entry.gradient):
                    self.kept[event.push.handle] = self.gradient(entry, absent)
                self.tell(event)
                if self.machine.version != version:
                    raise PacelineError(
                        f"the log says version {version} where this machine comes to {self.machine.version}: "
                        "it was written by another version of paceline"
                    )

    def gradient(self, entry: Entry, absent: tuple[int, ...]) -> Gradient:
        flat = torch.frombuffer(entry.gradient, dtype=self.meta.layout.torch_dtype)
        return self.optimizer.cut(flat), frozenset(absent)

    def tell(self, event: Event) -> None:
        """Tell the machine, and do what it orders as far as it concerns this server alone."""
        if isinstance(event, TimerFired):
            self.timers = [each for each in self.timers if each[1] != event.timer]
            heapify(self.timers)
        actions = self.machine.handle(event)
        self.told += 1
        self.records.append(Record(Node("server", self.meta.shard), self.meta.life, event, tuple(actions)))
        for action in actions:
            self.carry_out(action, event.at)

    def carry_out(self, action: Action, at: float) -> None:
        match action:
            case Apply(handles, weight):
                gradients = [self.kept.pop(handle) for handle in handles]
                self.optimizer.apply([each for each, _ in gradients], weight, [absent for _, absent in gradients])
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


def rebuild(folder: Path, threads: Threads = ONE_THREAD) -> Rebuilt:
    """Everything a durable server knew after its last whole record."""
    number, rebuilt = _newest(folder, threads)
    segments = [each for each in durable.numbers(folder, durable.LOG) if each >= number]
    if segments != list(range(number, number + len(segments))):
        raise PacelineError(f"{folder} lacks a segment of its log: it has {segments} after snapshot {number}")
    rebuilt.segment = number
    for segment in segments:
        path = durable.log_path(folder, segment)
        rebuilt.segment, rebuilt.end = segment, 0
        for entry in durable.read(folder, segment):
            rebuilt.take(entry)
            rebuilt.end = entry.end
        if segment != segments[-1] and rebuilt.end != path.stat().st_size:
            raise PacelineError(f"{path} is damaged at byte {rebuilt.end}: what came after it cannot be replayed")
    rebuilt.settle()
    return rebuilt


def _newest(folder: Path, threads: Threads) -> tuple[int, Rebuilt]:
    for number in reversed(durable.numbers(folder, durable.SNAPSHOT)):
        try:
            return number, Rebuilt(*durable.read_snapshot(durable.snapshot_path(folder, number)), threads)
        except (OSError, SafetensorError):
            continue
    raise PacelineError(f"there is no whole snapshot in {str(folder)!r}")
