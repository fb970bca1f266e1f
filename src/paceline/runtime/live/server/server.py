"""A server process: one shard's machine, its slice of the parameters, its optimizer.

It waits for messages, tells the machine, and does what the machine orders, one event at a time. Gradients are
read from, and parameters written to, the workers' segments (`memory.py`): a push is the message that says the
slice is there, whole. The loop never spins: cores are few.
"""

from __future__ import annotations

import sys
import time
from heapq import heappop, heappush
from pathlib import Path
from typing import assert_never

import msgspec
from safetensors import SafetensorError
from torch import Tensor

from paceline import policies
from paceline.core.actions import Answer, Apply, Drop, Park, Send, SetTimer
from paceline.core.events import (
    PlanArrived,
    PullArrived,
    PullRepeated,
    PushArrived,
    PushRejected,
    TimerFired,
    ViewChanged,
)
from paceline.core.messages import Handle, Node, Pull, Push, Rise
from paceline.core.shard import Shard
from paceline.runtime.driver import NoSuchAction, Seat, ServerCarrier
from paceline.runtime.live import checkpoint, wire
from paceline.runtime.live.across import doors
from paceline.runtime.live.configuration import Door, LiveConfig
from paceline.runtime.live.recording import TraceFile
from paceline.runtime.live.server.holding import Holding, may_share
from paceline.runtime.live.server.journal import Journal
from paceline.runtime.live.server.mapped import Segment
from paceline.runtime.live.server.receiving import FarSegment, Receiving, sender_of
from paceline.runtime.live.server.together import Together
from paceline.runtime.live.sockets import Link, Listener, Waiter, server_path
from paceline.tensors.significance import significance
from paceline.tensors.steppers import Hyper

IDLE_S = 0.5
STATUS_S = 0.5


class LiveServer(ServerCarrier):
    """Carries out the actions of one shard's machine."""

    def __init__(self, folder: Path, shard: int, life: int) -> None:
        self.folder = folder
        self.shard = shard
        self.life = life
        self.config = msgspec.json.decode((folder / "config").read_bytes(), type=LiveConfig)
        self.listener = Listener(server_path(folder, shard, life))
        self.driver = Link(folder / "driver", b"server:%d" % shard)
        self.receiving = Receiving(self, self.config.abroad) if self.config.abroad is not None else None
        """From workers on other hosts, if there may be any."""
        address, key = ("", "") if self.receiving is None else (self.receiving.address, self.receiving.key)
        self.door = Door(life, str(folder), doors.read_nonce(folder), address, key)
        self.waiter = Waiter()
        self.waiter.watch(self.driver)
        self.trace = TraceFile(Path(self.config.output), Node("server", shard), life)
        self.segments: dict[tuple[int, int], Segment] = {}
        """By (worker, incarnation)."""
        self.alive: set[tuple[int, int]] = set()
        self.finished = False
        self.waits: dict[int, str] = {}
        """Why each parked worker waits."""
        self.staleness: dict[int, int] = {}
        self.told_status_s = 0.0
        self.said_hyper: dict[tuple[int, int], tuple[Hyper, ...]] = {}
        """What each worker's schedulers have changed the hyper-parameters to."""
        self.kept: dict[Handle, tuple[list[Tensor], frozenset[int]]] = {}
        """Gradients that are not used yet although their worker goes on: copies, with the tensors that have none."""
        self.together = Together(self)
        self.checkpoint_every: int | None = None
        self.journal: Journal | None = None
        """If this server is durable."""
        self.heard: set[tuple[int, int]] = set()
        """Who has asked for parameters in this life."""
        self.timers: list[tuple[float, int]] = []
        """(when, which), the next first."""
        self.surveyed: wire.Standing | None = None
        """What the driver was told last of how everybody stands, and for which change it wants to know."""
        self.surveying: int | None = None
        self.holding: Holding
        self.seat: Seat
        self.machine: Shard

    def now(self) -> float:
        return time.monotonic() - self.epoch_s

    def run(self) -> None:
        self.driver.send(wire.encode(wire.Ready(self.shard, False, self.door)))
        while not self.finished:
            ready = self.waiter.wait(self.until_timer())
            if self.timers:
                self.fire_timers()
            if not ready:
                self.trace.flush()
            # Views first: somebody may be waiting for the dead.
            while self.driver in ready and (order := self.driver.receive()) is not None:
                self.obey(wire.decode_to_server(order))
            if self.listener in ready:
                self.together.take_messages()
            if self.receiving is not None:
                if self.receiving.listener in ready:
                    self.receiving.hear()
                if self.receiving.unsent:
                    self.receiving.catch_up()
            if len(self.segments) > len(self.alive):
                self.let_go()
            self.tell_status()
            if self.surveying is not None:
                self.tell_standing(self.surveying)
        self.trace.close()
        self.driver.close()
        self.listener.close()
        if self.receiving is not None:
            self.receiving.close()
        self.waiter.close()

    def until_timer(self) -> float:
        """How long to wait for a message at most."""
        return min(IDLE_S, max(0.001, self.timers[0][0] - self.now())) if self.timers else IDLE_S

    def fire_timers(self) -> None:
        while self.timers and self.timers[0][0] <= self.now():
            self.seat.tell(TimerFired(self.now(), heappop(self.timers)[1]))

    def obey(self, order: wire.ToServer) -> None:
        match order:
            case wire.Enrol():
                if self.receiving is not None:
                    self.receiving.enrol(order)
            case wire.Configure():
                self.configure(order)
            case wire.NewView():
                if self.listener.waiter is None:
                    # Only now: what workers said before, to a server that was not restored yet, waits until we are.
                    self.waiter.watch(self.listener)
                    if self.receiving is not None:
                        self.waiter.watch(self.receiving.listener)
                left, self.alive = self.alive, set(order.view.members)
                if self.receiving is not None:
                    self.receiving.forget(left - self.alive)
                self.seat.tell(ViewChanged(self.now(), order.view))
                self.adopt_hyper()
            case wire.Checkpoint():
                self.save(Path(order.folder))
            case wire.Planned(plan):
                self.seat.tell(PlanArrived(self.now(), plan))
            case wire.Survey(change):
                self.surveying, self.surveyed = change, None
            case wire.Give():
                self.give(order)
            case wire.Reslice():
                self.reslice(order)
            case wire.Retire():
                self.finished = True
            case wire.Finish():
                self.finish()
            case _:
                assert_never(order)

    def configure(self, order: wire.Configure) -> None:
        self.epoch_s = order.epoch_s
        self.checkpoint_every = order.checkpoint_every if self.shard == 0 else None
        self.policy = order.policy
        if order.journal is not None:
            self.journal = Journal(self, order.journal)
        if self.journal is not None and self.journal.recovers:
            self.journal.bring_back(order)
        else:
            self.begin(order)
        self.driver.send(wire.encode(wire.Ready(self.shard, True, self.door)))

    def begin(self, order: wire.Configure) -> None:
        """With a machine that has been told nothing."""
        policy = policies.parse(order.policy)
        # Who waited for the last life of this server asks again; others still compute on what that one has stepped.
        share = self.life == 0 and self.receiving is None and may_share(order, policy)
        self.holding = Holding(self.folder, self.shard, order, self.config.members.workers, may_share=share)
        self.open_door()
        machine = policy.machine("server", self.shard, self.config.members, self.config.seed)
        assert isinstance(machine, Shard)
        self.machine = machine
        if self.journal is not None:
            self.seat = self.journal.begin(machine)
        else:
            self.seat = Seat(Node("server", self.shard), self.life, machine, self, self.trace.write)
        if self.holding.first is not None:
            self.seat.tell(msgspec.structs.replace(self.holding.first, at=self.now()))

    def open_door(self) -> None:
        """Say where the parameters are."""
        self.door = msgspec.structs.replace(self.door, common=self.holding.common)

    def give(self, order: wire.Give) -> None:
        """Leave in the run's folder what is to be others'. A full memory is the driver's business."""
        error = ""
        try:
            self.holding.give(order)
        except (OSError, SafetensorError) as problem:
            error = str(problem)
        self.driver.send(wire.encode(wire.Gave(self.shard, order.number, error)))

    def reslice(self, order: wire.Reslice) -> None:
        """The number of servers has changed: go on with another part of the parameters."""
        self.holding.reslice(order.give)
        self.open_door()
        self.segments.clear()
        self.surveying = None
        self.seat.tell(msgspec.structs.replace(order.event, at=self.now()))
        self.driver.send(wire.encode(wire.Ready(self.shard, True, self.door)))

    def tell_standing(self, change: int) -> None:
        """Tell the driver, while it wants to know because of this change, how everybody stands here."""
        machine, progress = self.machine, self.machine.progress
        standing = wire.Standing(
            change, self.shard, machine.view.number, progress.V, machine.version, dict(progress.next),
            tuple(machine.waiting), bool(machine.held), self.holding.hyper,
        )  # fmt: skip
        if standing != self.surveyed:
            self.surveyed = standing
            self.driver.send(wire.encode(standing))

    def save(self, folder: Path) -> None:
        """Write this shard's part of a checkpoint. A full disk is the driver's business, not the training's end."""
        entry, error = None, ""
        try:
            V, version = self.machine.progress.V, self.machine.version
            optimizer = self.holding.optimizer
            entry = checkpoint.write_shard(folder, self.shard, optimizer.values, optimizer.state(), V, version)
        except (OSError, SafetensorError) as problem:
            error = str(problem)
        self.driver.send(wire.encode(wire.Saved(str(folder), self.shard, entry, error)))

    def tell_status(self) -> None:
        """Tell the driver, twice a second, how the workers look from here; of the other shards, when somebody waits."""
        now = time.monotonic()
        if self.alive and (self.shard == 0 or self.waits) and now - self.told_status_s >= STATUS_S:
            self.told_status_s = now
            status = {
                worker: wire.WorkerStatus(pushed, self.waits.get(worker, ""), self.staleness.get(worker, 0))
                for worker, pushed in self.machine.progress.next.items()
            }
            self.driver.send(wire.encode(wire.Status(self.shard, status, self.holding.hyper)))

    def finish(self) -> None:
        """Leave the final values where the driver finds them."""
        self.holding.leave()
        cost = self.journal.close() if self.journal is not None else None
        self.driver.send(wire.encode(wire.Finished(self.shard, cost)))
        self.finished = True

    def take(self, peer: bytes, message: bytes) -> None:
        """A worker's message: tell the machine about the push, then about the pull."""
        try:
            request = wire.decode_to_shard(message)
        except wire.BAD_MESSAGE as error:
            print(f"server {self.shard}: refused a malformed message of {peer!r}: {error}", file=sys.stderr)
            return
        if isinstance(request, wire.Fetch):
            self.together.catch_up()
            self.listener.send(peer, wire.encode(wire.Fetched(request.file, self.holding.hand_over(request.file))))
            return
        for part in request.messages:
            if peer != b"%d:%d" % sender_of(part):
                print(f"server {self.shard}: {peer!r} spoke as worker {sender_of(part)}: refused", file=sys.stderr)
                return
            match part:
                case Push():
                    self.take_push(part, request)
                case Pull():
                    self.take_pull(part)
                case _:
                    assert_never(part)

    def take_push(self, push: Push, exchange: wire.Exchange) -> None:
        handle = push.handle
        if exchange.hyper is not None:
            self.together.catch_up()
            self.said_hyper[handle.source, handle.incarnation] = exchange.hyper
            self.adopt_hyper()
        try:
            segment = self.segment(handle.source, handle.incarnation)
        except FileNotFoundError:
            self.seat.tell(PushRejected(self.now(), push, "the worker is gone, and its memory"))
            return
        segment.absent = frozenset(exchange.absent)
        if segment.gradient is segment.pieces:
            segment.holds = -1
        if exchange.refusal:
            self.seat.tell(PushRejected(self.now(), push, exchange.refusal))
        else:
            measured = None
            if self.machine.gate.wants_significance:
                self.together.catch_up()
                measured = significance(segment.gradient, self.holding.optimizer.values)
            self.seat.tell(PushArrived(self.now(), push, measured))

    def take_pull(self, pull: Pull) -> None:
        """In its first word to a new life of the server, a worker asks what it may have asked the last one."""
        sender = (pull.worker, pull.incarnation)
        again = self.life > 0 and sender not in self.heard
        self.heard.add(sender)
        self.seat.tell((PullRepeated if again else PullArrived)(self.now(), pull))

    def adopt_hyper(self) -> None:
        """One voice, the lowest rank's: the schedulers of workers that joined late, or run ahead, stand elsewhere."""
        said = self.said_hyper.get(min(self.alive, default=(0, 0)))
        if said is not None and said != self.holding.hyper:
            if self.journal is not None:
                self.journal.note_hyper(said)
            self.holding.set_hyper(said)

    def segment(self, worker: int, incarnation: int) -> Segment:
        segment = self.segments.get((worker, incarnation))
        if segment is None:
            if self.receiving is not None:
                segment = self.receiving.segment((worker, incarnation))
            if segment is None:
                segment = self.holding.segment(worker, incarnation)
            self.segments[worker, incarnation] = segment
        return segment

    def apply(self, action: Apply) -> None:
        if self.together.put_off(action):
            return
        self.together.catch_up()
        gradients: list[list[Tensor]] = []
        absent: list[frozenset[int]] = []
        used: list[Segment] = []
        for handle in action.handles:
            kept = self.kept.pop(handle, None)
            if kept is not None:
                gradients.append(kept[0])
                absent.append(kept[1])
            else:
                used.append(self.segments[handle.source, handle.incarnation])
                gradients.append(used[-1].gradient)
                absent.append(used[-1].absent)
        # The gradients are used up, and the segments are ours until we answer: the new values may go there at once.
        targets = [segment.pieces for segment in used if not segment.shows_servers]
        own = bool(used) and gradients[0] is used[0].pieces
        self.holding.optimizer.apply(gradients, action.weight, absent, targets, spoil=own)
        for segment in used:
            segment.holds = action.version
        self.note(action)

    def note(self, action: Apply) -> None:
        """The step is taken."""
        for handle in action.handles:
            self.staleness[handle.source] = action.staleness(handle)
        if self.checkpoint_every and action.version % self.checkpoint_every == 0:
            self.driver.send(wire.encode(wire.Due()))

    def drop(self, action: Drop) -> None:
        self.kept.pop(action.handle, None)

    def let_go(self) -> None:
        """Unmap the segments of workers that are gone, once their last gradient is used."""
        held = {(handle.source, handle.incarnation) for handle in self.machine.held_handles()}
        for sender in self.segments.keys() - self.alive - held:
            del self.segments[sender]

    def keep_held(self, segment: Segment, worker: int, incarnation: int) -> None:
        """A policy lets a worker go on whose gradient waits for its iteration's mean: keep a copy of it."""
        for handle in self.machine.held_handles():
            if (handle.source, handle.incarnation) == (worker, incarnation) and handle not in self.kept:
                self.kept[handle] = (segment.keep(), segment.absent)

    def answer(self, action: Answer) -> None:
        if self.together.put_off_answer(action):
            return
        parameters = action.parameters
        self.waits.pop(parameters.worker, None)
        if (parameters.worker, parameters.incarnation) not in self.heard:
            return  # it asked another life of this server, and asks again
        try:
            segment = self.segment(parameters.worker, parameters.incarnation)
        except FileNotFoundError:
            return  # it is gone, and a view will say so
        if self.machine.held:
            self.keep_held(segment, parameters.worker, parameters.incarnation)
        if segment.holds != parameters.version and not segment.shows_servers:
            segment.fill(self.holding.optimizer.values)
            segment.holds = parameters.version
        if isinstance(segment, FarSegment) and self.receiving is not None:
            self.receiving.answer(parameters)
            return
        peer = b"%d:%d" % (parameters.worker, parameters.incarnation)
        # A peer that is gone is not our business: the driver notices, and a view will say so.
        self.listener.send(peer, wire.encode(parameters))

    def park(self, action: Park) -> None:
        self.waits[action.pull.worker] = action.reason

    def send(self, action: Send) -> None:
        if not isinstance(action.message, Rise):
            raise NoSuchAction(f"a server cannot {action}")
        self.driver.send(wire.encode(wire.Ask(action.message)))

    def set_timer(self, action: SetTimer) -> None:
        heappush(self.timers, (self.now() + action.after_s, action.timer))


def serve(folder: Path, shard: int, life: int) -> int:
    """Be a server until the driver says that the run is over; the exit code."""
    LiveServer(folder, shard, life).run()
    return 0
