"""A server process: one shard's machine, its slice of the parameters, its optimizer.

It waits for messages, tells the machine, and does what the machine orders, one event at a time. Gradients are
read from, and parameters written to, the workers' segments (`storage/shared_memory.py`): a push is the message that
says the slice is there, whole. The loop never spins: cores are few.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import assert_never

import msgspec
from safetensors import SafetensorError

from paceline.core.events import (
    NormArrived,
    PlanArrived,
    TimerFired,
    ViewChanged,
)
from paceline.core.messages import Node, Pull, Push, View
from paceline.core.policy import Policy
from paceline.core.shard import Shard
from paceline.errors import PacelineError
from paceline.runtime.execution import MachineRunner
from paceline.runtime.live.messaging.senders import Process
from paceline.runtime.live.protocol import resizing_messages, script_calls, wire
from paceline.runtime.live.protocol.driver_texts import policy_of
from paceline.runtime.live.server.absences import Absences
from paceline.runtime.live.server.connection import ServerConnection
from paceline.runtime.live.server.device_steps import find_device
from paceline.runtime.live.server.journal import Journal, JournalingRunner
from paceline.runtime.live.server.log_replay import Rebuilt, rebuild
from paceline.runtime.live.server.remote_workers import RemoteWorkers, sender_of
from paceline.runtime.live.server.shard_executor import ShardExecutor
from paceline.runtime.live.server.shard_state import ShardState, may_share
from paceline.runtime.live.server.status_reports import StatusReports
from paceline.runtime.live.server.worker_buffer import WorkerBuffer
from paceline.runtime.live.server.worker_buffers import WorkerBuffers
from paceline.runtime.live.server.worker_requests import WorkerRequests
from paceline.runtime.live.storage import checkpoint, update_log
from paceline.tensors.shard_optimizer import ThreadCounts

logger = logging.getLogger(__name__)

IDLE_S = 0.5


class LiveServer:
    """A server that has its part of the parameters: it hears workers and the driver, and tells its machine."""

    def __init__(self, run: ServerConnection, order: wire.Configure) -> None:
        self.run = run
        run.epoch_s = order.epoch_s
        rebuilt = recover(run, order)
        policy = policy_of(order.policy, run.config)
        # Who waited for the last incarnation asks again; others still compute on what that one has stepped.
        share = run.incarnation == 0 and run.remote is None and may_share(order, policy)
        workers = run.config.members.workers
        device, self.problem = find_device(order, run.folder, run.shard, workers)
        self.state = ShardState(run.folder, run.shard, order, workers, rebuilt, may_share=share, device=device)
        self.machine = rebuilt.machine if rebuilt is not None else machine_of(run, order, policy)
        self.buffers = WorkerBuffers(self.open_buffer)
        self.executor = ShardExecutor(run, self.machine, self.state, self.buffers, order.journal is not None)
        self.executor.checkpoint_every = order.checkpoint_every if run.shard == 0 else None
        self.finished = False
        self.status = StatusReports(run, self.executor)
        self.absences = Absences(run, self.machine)
        self.journal: Journal | None = None
        """If this server is durable."""
        if order.journal is not None:
            self.journal = Journal(order.journal, order.policy, self.executor)
            self.runner: MachineRunner = self._begin_journal(self.journal, rebuilt)
        else:
            self.runner = MachineRunner(
                Node("server", run.shard), run.incarnation, self.machine, self.executor, run.trace.write
            )
        note_hyper = self.journal.note_hyper if self.journal is not None else lambda hyper: None
        self.requests = WorkerRequests(run, self.executor, self.runner, note_hyper)
        self.remote: RemoteWorkers | None = None
        """Workers on other hosts, if there may be any."""
        if run.remote is not None and run.config.multihost is not None:
            self.remote = RemoteWorkers(run, run.remote, run.config.multihost, self.state, self.buffers, self.requests)
        self.open_endpoint()
        if rebuilt is None and self.state.first is not None:
            self.runner.deliver(msgspec.structs.replace(self.state.first, at=run.now()))
        self.say_ready()

    def _begin_journal(self, journal: Journal, rebuilt: Rebuilt | None) -> JournalingRunner:
        if rebuilt is None:
            journal.begin()
            return JournalingRunner(journal, self.executor)
        executor = self.executor
        self.buffers.kept, executor.timers, executor.waits = rebuilt.kept, rebuilt.timers, rebuilt.waits
        journal.go_on(rebuilt)
        runner = JournalingRunner(journal, executor)
        if rebuilt.rise is not None:
            self.run.tell(wire.Ask(rebuilt.rise))
        for action in self.machine.reports_to_repeat():
            runner.execute_one(action)
        return runner

    def open_endpoint(self) -> None:
        """Says where the parameters are."""
        device = self.state.device.name if self.state.device is not None else ""
        self.run.endpoint = msgspec.structs.replace(self.run.endpoint, common=self.state.common, device=device)

    def say_ready(self) -> None:
        self.run.tell(wire.Ready(self.run.shard, True, self.run.endpoint, self.problem))

    def open_buffer(self, process: Process) -> WorkerBuffer:
        """Returns a worker's memory, of this host or, for one on another host, of this server's own."""
        buffer = self.remote.open_buffer(process) if self.remote is not None else None
        return buffer if buffer is not None else self.state.open_buffer(*process, self.run.answer)

    def serve(self) -> None:
        """Serves until the driver says that this server is not needed any more."""
        run, executor, clock = self.run, self.executor, self.executor.clock
        self.hear_driver()
        while not self.finished:
            ready = run.waiter.wait(executor.until_timer(IDLE_S))
            clock.begin()
            while (timer := executor.next_timer_due()) is not None:
                self.runner.deliver(TimerFired(run.now(), timer))
            if not ready:
                run.trace.flush()
                run.times.flush()
            # Views first: somebody may be waiting for the dead.
            if run.driver in ready:
                self.hear_driver()
            if run.listener in ready:
                self.take_messages()
            if self.remote is not None:
                if self.remote.listener in ready:
                    self.remote.hear()
                if self.remote.unsent:
                    self.remote.send_unsent()
            clock.end()
            if len(self.buffers.opened) > len(self.buffers.members):
                self.buffers.release_departed(self.machine.held_handles())
            self.status.tell()
            if self.absences.absent:
                self.absences.tell()
        if self.remote is not None:
            self.remote.close()

    # The driver's orders.

    def hear_driver(self) -> None:
        while (order := self.run.driver.receive()) is not None:
            self.handle_order(wire.decode_to_server(order))

    def handle_order(self, order: wire.ToServer) -> None:
        match order:
            case wire.Enrol():
                self.run.enrol(order)
            case wire.Configure():
                raise PacelineError("the driver has configured this server twice")
            case wire.StartClock(epoch_s):
                self.run.epoch_s = epoch_s
            case wire.NewView(view):
                self.see(view)
            case wire.Checkpoint():
                self.save(Path(order.folder))
            case wire.Planned(plan):
                self.runner.deliver(PlanArrived(self.run.now(), plan))
            case wire.Reduced(norm):
                self.runner.deliver(NormArrived(self.run.now(), norm))
            case resizing_messages.Survey(change):
                self.status.survey(change)
            case script_calls.Absent():
                self.absences.take(order)
            case resizing_messages.Give():
                self.give(order)
            case resizing_messages.Reslice():
                self.reslice(order)
            case resizing_messages.Retire():
                self.finished = True
            case wire.Finish():
                self.finish()
            case _:
                assert_never(order)

    def see(self, view: View) -> None:
        """Takes a newer view. Before the first one, what workers say waits: a server may have to be restored."""
        self.run.hear_workers()
        left, self.buffers.members = self.buffers.members, set(view.members)
        if self.remote is not None:
            self.remote.forget(left - self.buffers.members)
        self.runner.deliver(ViewChanged(self.run.now(), view))
        self.requests.adopt_hyper()

    def give(self, order: resizing_messages.Give) -> None:
        """Leave in the run's folder what is to be others'. A full memory is the driver's business."""
        error = ""
        try:
            self.state.give(order)
        except (OSError, SafetensorError) as problem:
            error = str(problem)
        self.run.tell(resizing_messages.Gave(self.run.shard, order.number, error))

    def reslice(self, order: resizing_messages.Reslice) -> None:
        """The number of servers has changed: go on with another part of the parameters."""
        self.state.reslice(order.give)
        self.open_endpoint()
        self.buffers.opened.clear()
        self.status.survey(None)
        self.runner.deliver(msgspec.structs.replace(order.event, at=self.run.now()))
        self.say_ready()

    def save(self, folder: Path) -> None:
        """Write this shard's part of a checkpoint. A full disk is the driver's business, not the training's end."""
        entry, error = None, ""
        try:
            V, version = self.machine.progress.V, self.machine.version
            optimizer = self.state.optimizer
            entry = checkpoint.write_shard(folder, self.run.shard, optimizer.values, optimizer.state(), V, version)
        except (OSError, SafetensorError) as problem:
            error = str(problem)
        self.run.tell(wire.Saved(str(folder), self.run.shard, entry, error))

    def finish(self) -> None:
        """Leave the final values where the driver finds them."""
        self.state.leave()
        cost = self.journal.close() if self.journal is not None else None
        self.run.tell(wire.Finished(self.run.shard, cost))
        self.finished = True

    # What workers say.

    def take_messages(self) -> None:
        """Takes what workers of this host have said. Steps on what came together may be taken together."""
        executor = self.executor
        if executor.pacing.patience_s:
            self.let_others_run()
        executor.deferred.taking = True
        while (received := self.run.listener.receive()) is not None:
            self.take(*received)
        executor.flush_deferred()
        executor.deferred.taking = False

    def let_others_run(self) -> None:
        """Waits for more pushes, of those who do not wait for others, where that is worth it."""
        most, run = len(self.buffers.members) - len(self.executor.waits), self.run
        self.executor.pacing.let_others_run(most, run.listener, run.waiter, run.driver)

    def take(self, peer: bytes, message: bytes) -> None:
        """A worker's message: tell the machine about the push, then about the pull."""
        try:
            request = wire.decode_to_shard(message)
        except wire.BAD_MESSAGE as error:
            logger.warning(f"server {self.run.shard}: refused a malformed message of {peer!r}: {error}")
            return
        if isinstance(request, wire.Fetch):
            self.executor.flush_deferred()
            fetched = wire.Fetched(request.file, self.state.hand_over(request.file))
            self.run.listener.send(peer, wire.encode(fetched))
            return
        for part in request.messages:
            if peer != b"%d:%d" % sender_of(part):
                logger.warning(f"server {self.run.shard}: {peer!r} spoke as worker {sender_of(part)}: refused")
                return
            match part:
                case Push():
                    self.requests.take_push(part, request)
                case Pull():
                    self.requests.take_pull(part)
                case _:
                    assert_never(part)


def recover(run: ServerConnection, order: wire.Configure) -> Rebuilt | None:
    """Everything the incarnation before this one knew, from its log; None if this server has no log to begin with."""
    if order.journal is None or not order.journal.recover:
        return None
    folder = Path(order.journal.folder)
    update_log.hold(folder)
    return rebuild(folder, ThreadCounts.of(len(order.assignment), run.config.members.workers))


def machine_of(run: ServerConnection, order: wire.Configure, policy: Policy) -> Shard:
    """A machine that has been told nothing yet."""
    machine = policy.machine("server", run.shard, run.config.members, run.config.seed)
    if not isinstance(machine, Shard):
        raise PacelineError(f"{policy} is no policy for a server")
    machine.clips_mean = order.optimizer.extras.clip_mean is not None
    return machine


def await_configuration(run: ServerConnection) -> wire.Configure | None:
    """The part of the parameters that the driver gives this server; None if it is to end instead."""
    run.tell(wire.Ready(run.shard, False, run.endpoint))
    while True:
        run.waiter.wait(IDLE_S)
        while (message := run.driver.receive()) is not None:
            match wire.decode_to_server(message):
                case wire.Configure() as order:
                    return order
                case wire.Enrol() as order:
                    run.enrol(order)
                case resizing_messages.Retire() | wire.Finish():
                    return None
                case order:
                    logger.warning(f"server {run.shard}: not configured yet, passed over {type(order).__name__}")


def serve(folder: Path, shard: int, incarnation: int) -> int:
    """Be a server until the driver says that the run is over; the exit code."""
    run = ServerConnection(folder, shard, incarnation)
    order = await_configuration(run)
    if order is not None:
        LiveServer(run, order).serve()
    run.close()
    return 0
