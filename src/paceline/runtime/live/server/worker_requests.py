"""What workers ask of a server, wherever they are: the machine is told of pushes and pulls."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.events import PullArrived, PullRepeated, PushArrived, PushRejected
from paceline.core.messages import Pull, Push
from paceline.runtime.execution import MachineRunner
from paceline.runtime.live.messaging.senders import Process
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.server.connection import ServerConnection
from paceline.runtime.live.server.shard_executor import ShardExecutor
from paceline.tensors.piece_optimizers import Hyper
from paceline.tensors.significance import significance


class WorkerRequests:
    """Tells the machine of one shard what workers ask for."""

    def __init__(
        self,
        run: ServerConnection,
        executor: ShardExecutor,
        runner: MachineRunner,
        note_hyper: Callable[[tuple[Hyper, ...]], None],
    ) -> None:
        self.run = run
        self.executor = executor
        self.machine, self.state, self.buffers = executor.machine, executor.state, executor.buffers
        self.runner = runner
        self.note_hyper = note_hyper
        """Called before hyper-parameters are changed."""
        self.hyper: dict[Process, tuple[Hyper, ...]] = {}
        """What each worker's schedulers have changed the hyper-parameters to."""

    def take_push(self, push: Push, exchange: wire.Exchange) -> None:
        process = (push.handle.source, push.handle.incarnation)
        self.executor.clock.pushes += 1
        if exchange.hyper is not None:
            self.executor.flush_deferred()
            self.hyper[process] = exchange.hyper
            self.adopt_hyper()
        try:
            buffer = self.buffers.of(process)
        except FileNotFoundError:
            self.runner.deliver(PushRejected(self.run.now(), push, "the worker is gone, and its memory"))
            return
        buffer.begin_push(frozenset(exchange.absent))
        if exchange.refusal:
            self.runner.deliver(PushRejected(self.run.now(), push, exchange.refusal))
            return
        measured = None
        if self.machine.gate.wants_significance:
            self.executor.flush_deferred()
            measured = significance(buffer.gradient, self.state.optimizer.values)
        self.runner.deliver(PushArrived(self.run.now(), push, measured))

    def take_pull(self, pull: Pull) -> None:
        """In its first word to a new incarnation of the server, a worker asks what it may have asked the last one."""
        sender = (pull.worker, pull.incarnation)
        again = self.run.incarnation > 0 and sender not in self.executor.asked
        self.executor.asked.add(sender)
        self.runner.deliver((PullRepeated if again else PullArrived)(self.run.now(), pull))

    def adopt_hyper(self) -> None:
        """One voice, the lowest rank's: the schedulers of workers that joined late, or run ahead, stand elsewhere."""
        chosen = self.hyper.get(min(self.buffers.members, default=(0, 0)))
        if chosen is not None and chosen != self.state.hyper:
            self.note_hyper(chosen)
            self.state.set_hyper(chosen)
