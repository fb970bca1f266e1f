"""A durable server's side of its log: what is written when, and when a snapshot is taken.

Every event goes through `JournalSeat.tell`: the machine decides, the event is logged, and only then is anything done.
A snapshot is begun between two events: values and state are copied, a new segment is opened, and a thread writes the
copy while training goes on. The log before it is removed when it is whole, and not before.

If the log cannot be written (a full disk) training goes on without it: the driver is told, says so loudly, and from
then on restarts this server as one that is not durable.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from safetensors import SafetensorError
from torch import Tensor

from paceline.core.actions import Action, Answer, Apply, Send
from paceline.core.events import Event, PushArrived
from paceline.core.freezing import CannotFreeze, freeze
from paceline.core.messages import Handle, Node
from paceline.core.shard import Shard
from paceline.runtime.driver import Seat
from paceline.runtime.live import wire
from paceline.runtime.live.server import durable
from paceline.runtime.live.server.durable import Kept, Log, Logged, Meta, Rated, raw
from paceline.runtime.live.server.holding import Holding
from paceline.runtime.live.server.replaying import rebuild
from paceline.tensors.slices import AVERAGE, Threads
from paceline.tensors.steppers import Hyper

if TYPE_CHECKING:
    from paceline.runtime.live.server.server import LiveServer


class JournalSeat(Seat):
    """A seat at which everything is written down first."""

    def __init__(self, journal: Journal, machine: Shard) -> None:
        server = journal.server
        super().__init__(Node("server", server.shard), journal.life, machine, server, server.trace.write)
        self.journal = journal

    def tell(self, event: Event) -> None:
        actions = self.machine.handle(event)
        self.journal.note(event, actions)
        self.carry_out(event, actions)
        self.journal.tidy()


class Journal:
    """The log of one server, in one of its lives."""

    def __init__(self, server: LiveServer, order: wire.Journalled) -> None:
        self.server = server
        self.how = order.durable
        self.folder = Path(order.folder)
        self.recovers = order.recover
        """An earlier life of the server has begun this log."""
        self.open = False
        self.life = server.life
        """In which the machine began."""
        self.told = 0
        self.segment = self.events = 0
        self.writing: threading.Thread | None = None
        """A snapshot that is being written, and why that failed, if it did."""
        self.failed = ""
        self.endless = False
        """The machine cannot be written down: the whole log is needed."""
        self.nbytes = self.pushes = self.snapshots = 0
        self.seconds = 0.0
        self.began_s = time.monotonic()

    def bring_back(self, order: wire.Configure) -> None:
        """Have the server know everything the life before this one knew; the log goes on where that ended."""
        durable.hold(self.folder)
        workers = self.server.config.members.workers
        rebuilt = rebuild(self.folder, Threads.of(len(order.assignment), workers))
        self.segment, self.told, self.life = rebuilt.segment, rebuilt.told, rebuilt.meta.life
        self.log = Log(self.folder, self.segment, rebuilt.end)
        self.events = len(rebuilt.records)
        self.open = True
        server = self.server
        server.holding = Holding(server.folder, server.shard, order, workers, rebuilt)
        server.kept, server.timers, server.waits = rebuilt.kept, rebuilt.timers, rebuilt.waits
        server.machine = rebuilt.machine
        server.seat = JournalSeat(self, rebuilt.machine)
        traced = server.trace.follow(self.life) - rebuilt.meta.told
        for record in rebuilt.records[max(traced, 0) :]:
            server.trace.write(record)
        if rebuilt.rise is not None:
            server.driver.send(wire.encode(wire.Ask(rebuilt.rise)))

    def begin(self, machine: Shard) -> JournalSeat:
        """A machine that has been told nothing yet begins: its first snapshot, and an empty log."""
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            durable.hold(self.folder)
            optimizer = self.server.holding.optimizer
            durable.write_snapshot(self.folder, 0, self.describe(None), optimizer.values, optimizer.state())
            self.log = Log(self.folder, 0)
            self.open = True
        except (OSError, SafetensorError) as error:
            self.give_up(error)
        return JournalSeat(self, machine)

    def describe(self, machine: object) -> Meta:
        server, holding = self.server, self.server.holding
        spec = holding.spec
        if holding.hyper is not None:
            spec = msgspec.structs.replace(spec, groups=holding.hyper)
        return Meta(
            server.shard, self.life, server.policy, server.config.members, server.config.seed, holding.layout,
            holding.assignment, spec, holding.hyper, machine, self.told, tuple(server.timers),
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
            segment = self.server.segments[handle.source, handle.incarnation]
            gradient, absent = segment.arrived, tuple(segment.absent)
            self.pushes += 1
        leaves = any(isinstance(action, Answer | Send) for action in actions)
        self.write(Logged(event, self.server.machine.version, absent), gradient, leaves)

    def counts(self, handle: Handle, actions: list[Action]) -> bool:
        """Whether this gradient is used, now or later."""
        if any(isinstance(action, Apply) and handle in action.handles for action in actions):
            return True
        return handle not in self.server.kept and handle in self.server.machine.held.get(handle.iteration, ())

    def note_hyper(self, hyper: tuple[Hyper, ...]) -> None:
        if self.open:
            self.write(Rated(hyper))

    def write(self, said: Logged | Rated | Kept, gradient: Sequence[memoryview] = (), leaves: bool = False) -> None:
        """Log it. If something `leaves` because of it and a power failure is to be survived: to the disk."""
        started = time.perf_counter()
        try:
            self.nbytes += self.log.append(said, gradient)
            if leaves and self.how.fsync:
                self.log.sync()
        except OSError as error:
            self.give_up(error)
        self.events += 1
        self.seconds += time.perf_counter() - started

    def give_up(self, error: Exception) -> None:
        """Go on without a log, and say so."""
        self.open = False
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        self.server.driver.send(wire.encode(wire.Undurable(self.server.shard, why, lost=True)))

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
        shard_bytes = self.server.holding.optimizer.values.nbytes
        long = self.log.position > self.how.longest(shard_bytes) or self.events > self.how.events
        if long and self.writing is None:
            self.snapshot()

    def snapshot(self) -> None:
        started = time.perf_counter()
        server, optimizer = self.server, self.server.holding.optimizer
        self.events = 0
        try:
            meta = self.describe(freeze(server.machine))
        except CannotFreeze as error:
            self.endless = True
            self.complain(str(error))
            return
        try:
            if self.how.fsync:
                self.log.sync()
            self.log.close()  # before there is a next one: of several segments only the last may end anywhere
            self.log = Log(self.folder, self.segment + 1)
        except OSError as error:
            self.give_up(error)
            return
        # Records that are in the trace's buffer now will not be in the log any more.
        server.trace.flush()
        self.segment += 1
        for handle in list(server.machine.held_handles()):
            pieces, absent = self.held(handle)
            self.write(Kept(handle, tuple(absent)), pieces)
        learned = optimizer.state()
        if AVERAGE in learned:
            learned[AVERAGE] = learned[AVERAGE].clone()
        arguments = (self.segment, meta, optimizer.values.clone(), learned)
        self.writing = threading.Thread(target=self._write_snapshot, args=arguments)
        self.writing.start()
        self.snapshots += 1
        self.seconds += time.perf_counter() - started

    def complain(self, why: str) -> None:
        """A snapshot could not be made: the log grows on."""
        self.server.driver.send(wire.encode(wire.Undurable(self.server.shard, why, lost=False)))

    def held(self, handle: Handle) -> tuple[list[memoryview], Iterable[int]]:
        """A gradient that waits for its iteration's mean."""
        kept = self.server.kept.get(handle)
        if kept is not None:
            return [raw(piece) for piece in kept[0]], kept[1]
        segment = self.server.segments[handle.source, handle.incarnation]
        return segment.arrived, segment.absent

    def _write_snapshot(self, number: int, meta: Meta, values: Tensor, learned: dict[str, Tensor]) -> None:
        try:
            durable.write_snapshot(self.folder, number, meta, values, learned)
        except (OSError, SafetensorError) as error:
            self.failed = str(error)

    def close(self) -> wire.Cost | None:
        """The run is over: what it has cost."""
        if self.writing is not None:
            self.writing.join()
        if not self.open:
            return None
        self.open = False
        if self.how.fsync:
            self.log.sync()
        self.log.close()
        (self.folder / durable.SPARE).unlink(missing_ok=True)
        alive_s = time.monotonic() - self.began_s
        return wire.Cost(self.nbytes, self.pushes, self.snapshots, self.seconds, alive_s)
