"""A durable server's side of its log: what is written when, and when a snapshot is taken.

Every event goes through `JournalingRunner.deliver`: the machine decides, the event is logged, and only then is anything
done. A snapshot is begun between two events: values and state are copied, a new segment is opened, and a thread writes
the copy while training goes on. The log before it is removed when it is whole, and not before.

If the log cannot be written (a full disk) training goes on without it: the driver is told, says so loudly, and from
then on restarts this server as one that is not durable.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from torch import Tensor

from paceline import private_files
from paceline.core.actions import Action, Answer, Apply, Measure, Send
from paceline.core.events import Event, PushArrived
from paceline.core.messages import Handle, Node
from paceline.core.state_snapshot import CannotSnapshot, take_snapshot
from paceline.runtime.execution import MachineRunner
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.server.log_replay import Rebuilt
from paceline.runtime.live.server.shard_executor import ShardExecutor
from paceline.runtime.live.storage import update_log
from paceline.runtime.live.storage.update_log import (
    HeldGradient,
    LogEnd,
    LoggedEvent,
    LoggedHyper,
    LogSegment,
    SnapshotMeta,
    raw,
)
from paceline.tensors.piece_optimizers import Hyper
from paceline.tensors.shard_optimizer import AVERAGE


class JournalingRunner(MachineRunner):
    """Runs a shard's machine, and has every event written down before anything is done."""

    def __init__(self, journal: Journal, executor: ShardExecutor) -> None:
        run = executor.run
        super().__init__(Node("server", run.shard), journal.incarnation, executor.machine, executor, run.trace.write)
        self.journal = journal

    def deliver(self, event: Event) -> None:
        actions = self.machine.handle(event)
        self.journal.note(event, actions)
        self.execute(event, actions)
        self.journal.tidy()


class JournalCost:
    """What a log has cost since its server began."""

    def __init__(self) -> None:
        self.nbytes = self.pushes = self.snapshots = 0
        self.seconds = 0.0
        self.began_s = time.monotonic()

    def message(self) -> wire.Cost:
        alive_s = time.monotonic() - self.began_s
        return wire.Cost(self.nbytes, self.pushes, self.snapshots, self.seconds, alive_s)


class Journal:
    """The log of one server, in one of its incarnations."""

    def __init__(self, order: wire.Journalled, policy: str, executor: ShardExecutor) -> None:
        self.how = order.durable
        self.folder = Path(order.folder)
        self.policy = policy
        self.executor = executor
        self.machine, self.state, self.buffers = executor.machine, executor.state, executor.buffers
        self.open = False
        self.incarnation = executor.run.incarnation
        """The incarnation of the server in which the machine began."""
        self.told = 0
        self.segment = self.events = 0
        self.writing: threading.Thread | None = None
        """A snapshot that is being written, and why that failed, if it did."""
        self.failed = ""
        self.endless = False
        """The machine cannot be written down: the whole log is needed."""
        self.cost = JournalCost()

    def begin(self) -> None:
        """A machine that has been told nothing yet begins: its first snapshot, and an empty log."""
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
            private_files.make_folder(self.folder)
            update_log.hold(self.folder)
            optimizer = self.state.optimizer
            update_log.write_snapshot(self.folder, 0, self.describe(None, 0), optimizer.values, optimizer.state())
            self.log = LogSegment(self.folder, 0)
            self.open = True
        except (OSError, SafetensorError) as error:
            self.give_up(error)

    def go_on(self, rebuilt: Rebuilt) -> None:
        """The log goes on where the incarnation before this one ended, which `rebuilt` comes from."""
        self.segment, self.told, self.incarnation = rebuilt.segment, rebuilt.told, rebuilt.meta.incarnation
        end = LogEnd(rebuilt.serial, rebuilt.machine.version)
        self.log = LogSegment(self.folder, self.segment, rebuilt.position, end)
        self.events = len(rebuilt.records)
        self.open = True
        trace = self.executor.run.trace
        traced = trace.follow(self.incarnation) - rebuilt.meta.told
        for record in rebuilt.records[max(traced, 0) :]:
            trace.write(record)

    def describe(self, machine: object, serial: int) -> SnapshotMeta:
        state, run = self.state, self.executor.run
        spec = state.spec
        if state.hyper is not None:
            spec = msgspec.structs.replace(spec, groups=state.hyper)
        return SnapshotMeta(
            run.shard, self.incarnation, self.policy, run.config.members, run.config.seed, state.layout,
            state.assignment, spec, state.hyper, machine, self.told, tuple(self.executor.timers), serial,
        )  # fmt: skip

    # What is written.

    def note(self, event: Event, actions: list[Action]) -> None:
        """The machine was told this, and has ordered that; nothing of it is done yet."""
        self.told += 1
        if not self.open:
            return
        gradient: Sequence[memoryview] = ()
        absent: tuple[int, ...] = ()
        if isinstance(event, PushArrived) and self.counts(event.push.handle, actions):
            handle = event.push.handle
            buffer = self.buffers.holding(handle)
            gradient, absent = buffer.gradient_bytes, tuple(buffer.absent)
            self.cost.pushes += 1
        leaves = any(isinstance(action, Answer | Send | Measure) for action in actions)
        self.write(LoggedEvent(event, self.machine.version, absent), gradient, leaves)

    def counts(self, handle: Handle, actions: list[Action]) -> bool:
        """Whether this gradient is used, now or later."""
        if any(isinstance(action, Apply) and handle in action.handles for action in actions):
            return True
        return handle not in self.buffers.kept and handle in self.machine.held.get(handle.iteration, ())

    def note_hyper(self, hyper: tuple[Hyper, ...]) -> None:
        if self.open:
            self.write(LoggedHyper(hyper))

    def write(
        self, said: LoggedEvent | LoggedHyper | HeldGradient, gradient: Sequence[memoryview] = (), leaves: bool = False
    ) -> None:
        """Log it. If something `leaves` because of it and a power failure is to be survived: to the disk."""
        started = time.perf_counter()
        try:
            self.cost.nbytes += self.log.append(said, gradient)
            if not self.how.fsync:
                self.log.note_end()
            elif leaves:
                self.log.sync()
        except OSError as error:
            self.give_up(error)
        self.events += 1
        self.cost.seconds += time.perf_counter() - started

    def give_up(self, error: Exception) -> None:
        """Go on without a log, and say so."""
        if self.open:
            with contextlib.suppress(OSError):
                self.log.give_up()
        self.open = False
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        self.executor.run.tell(wire.Undurable(self.executor.run.shard, why, lost=True))

    # Snapshots.

    def tidy(self) -> None:
        """Between two events: begin a snapshot, if the log has become long."""
        if not self.open or self.endless:
            return
        if self.writing is not None and not self.writing.is_alive():
            self.writing = None
            if self.failed:
                self.complain(self.failed)
                self.failed = ""
        shard_bytes = self.state.optimizer.values.nbytes
        long = self.log.position > self.how.longest(shard_bytes) or self.events > self.how.events
        if long and self.writing is None:
            self.snapshot()

    def snapshot(self) -> None:
        started = time.perf_counter()
        optimizer = self.state.optimizer
        self.events = 0
        try:
            meta = self.describe(take_snapshot(self.machine), self.log.serial)
        except CannotSnapshot as error:
            self.endless = True
            self.complain(str(error))
            return
        try:
            if self.how.fsync:
                self.log.sync()
            self.log.close()  # before there is a next one: of several segments only the last may end anywhere
            self.log = LogSegment(self.folder, self.segment + 1, end=self.log.end)
        except OSError as error:
            self.give_up(error)
            return
        # Records that are in the trace's buffer now will not be in the log any more.
        self.executor.run.trace.flush()
        self.segment += 1
        for handle in list(self.machine.held_handles()):
            pieces, absent = self.held(handle)
            self.write(HeldGradient(handle, tuple(absent)), pieces)
        learned = optimizer.state()
        if AVERAGE in learned:
            learned[AVERAGE] = learned[AVERAGE].clone()
        arguments = (self.segment, meta, optimizer.values.clone(), learned)
        self.writing = threading.Thread(target=self._write_snapshot, args=arguments)
        self.writing.start()
        self.cost.snapshots += 1
        self.cost.seconds += time.perf_counter() - started

    def complain(self, why: str) -> None:
        """A snapshot could not be made: the log grows on."""
        self.executor.run.tell(wire.Undurable(self.executor.run.shard, why, lost=False))

    def held(self, handle: Handle) -> tuple[list[memoryview], Iterable[int]]:
        """A gradient that waits for its iteration's mean."""
        kept = self.buffers.kept.get(handle)
        if kept is not None:
            return [raw(piece) for piece in kept[0]], kept[1]
        buffer = self.buffers.holding(handle)
        return buffer.gradient_bytes, buffer.absent

    def _write_snapshot(self, number: int, meta: SnapshotMeta, values: Tensor, learned: dict[str, Tensor]) -> None:
        try:
            update_log.write_snapshot(self.folder, number, meta, values, learned)
        except (OSError, SafetensorError) as error:
            self.failed = str(error)

    def close(self) -> wire.Cost | None:
        """The run is over: what it has cost."""
        if self.writing is not None:
            self.writing.join()
        if not self.open:
            return None
        try:
            if self.how.fsync:
                self.log.sync()
            self.log.close()
            (self.folder / update_log.SPARE).unlink(missing_ok=True)
        except OSError as error:
            self.give_up(error)
            return None
        self.open = False
        return self.cost.message()
