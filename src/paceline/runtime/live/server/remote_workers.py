"""A server's talk with workers on other hosts: gradients come as frames, parameters leave as frames.

Who speaks is what its key was enrolled as, and nothing is written before run, incarnation, name and all sizes are
right. A worker whose connection broke says again what it said last: a gradient that came already must not be written
(the answer may be on its way from there), and an answer that may be lost is sent again. Where the frames lie is the
business of `server/remote_memory.py`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from safetensors import SafetensorError
from safetensors.torch import save

from paceline.core.machine import IllegalEvent
from paceline.core.messages import Parameters, Pull, Push
from paceline.errors import ConfigError, printable
from paceline.runtime.live.messaging.remote_links import FRAME, RemoteListener
from paceline.runtime.live.messaging.senders import LINES, MessageRefused, Process, process_of
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.protocol.coded_messages import NOTHING_HELD
from paceline.runtime.live.protocol.configuration import MultihostOptions
from paceline.runtime.live.protocol.envelope import unwrap, wrap
from paceline.runtime.live.server.connection import ServerConnection
from paceline.runtime.live.server.remote_memory import RemoteMemory
from paceline.runtime.live.server.shard_state import ShardState
from paceline.runtime.live.server.worker_buffer import WorkerBuffer
from paceline.runtime.live.server.worker_buffers import WorkerBuffers
from paceline.tensors import wire_precision
from paceline.tensors.optimizers import check_hyper
from paceline.tensors.wire_codecs import WrongFrames

logger = logging.getLogger(__name__)

AT_ONCE = 64
"""Messages heard before everything else has its turn."""


class RequestHandler(Protocol):
    """Does what a worker asks for, wherever the worker is."""

    def take_push(self, push: Push, exchange: wire.Exchange) -> None: ...

    def take_pull(self, pull: Pull) -> None: ...


class RemoteWorker:
    """One worker of another host: what it has said last, and what it was answered."""

    def __init__(self) -> None:
        self.memory: RemoteMemory | None = None
        """Made when it is needed, and anew when this server has another part of the parameters."""
        self.newest = -1
        """The iteration of the last gradient that came."""
        self.asked: tuple[int, int] | None = None
        """The iteration, and the attempt at it, that were asked for last."""
        self.answer: Parameters | None = None
        """What was answered to that."""
        self.held = NOTHING_HELD
        """The number of the parameters that it has, where they travel in a code."""


class RemoteWorkers:
    """Hears the workers of other hosts, for one server, and answers them."""

    def __init__(
        self,
        run: ServerConnection,
        listener: RemoteListener,
        multihost: MultihostOptions,
        state: ShardState,
        buffers: WorkerBuffers,
        requests: RequestHandler,
    ) -> None:
        self.listener = listener
        self.multihost = multihost
        self.run = run.config.run
        self.shard = run.shard
        self.incarnation = run.incarnation
        self.state = state
        self.buffers = buffers
        self.requests = requests
        self.workers: dict[Process, RemoteWorker] = {}
        """Who has spoken from another host."""
        self.unsent: set[Process] = set()
        """Whose answer found nobody connected: it leaves when somebody is."""
        self.refusals: Counter[bytes] = Counter()

    def hear(self) -> None:
        """Takes what has come."""
        for _ in range(AT_ONCE):
            if (received := self.listener.receive()) is None:
                break
            self.take(*received)
        self.listener.gone()

    def take(self, name: bytes, message: bytes, frames: Sequence[memoryview]) -> None:
        """Does what a worker's message asks for, or refuses it in one line."""
        try:
            envelope = unwrap(message)
            if (envelope.run, envelope.incarnation) != (self.run, self.incarnation):
                raise MessageRefused("it was for another run, or for another incarnation of this server")
            request = wire.decode_remote_request(envelope.message)
            if isinstance(request, wire.Fetch):
                self.hand_over(name, request)
                return
            sender = process_of(name)
            if isinstance(request, wire.Staged):
                self.stage(sender, request, frames)
                return
            exchange = request.exchange if isinstance(request, wire.Commit) else request
            for part in exchange.messages:
                if sender != sender_of(part):
                    raise MessageRefused(f"it speaks as worker {sender_of(part)}")
            worker = self.workers.setdefault(sender, RemoteWorker())
            if isinstance(request, wire.Commit):
                self.commit(sender, worker, request, frames)
            else:
                self.exchange(sender, worker, exchange, frames)
        except (MessageRefused, ConfigError, IllegalEvent) as error:
            self.refuse(name, str(error))
        except (*wire.BAD_MESSAGE, WrongFrames) as error:
            self.refuse(name, str(error))
            self.listener.disconnect(name)  # it says again what it has said and is not answered

    def stage(self, sender: Process, staged: wire.Staged, frames: Sequence[memoryview]) -> None:
        """Takes a frame of the gradient that this worker computes on what it was answered last."""
        worker = self.workers.get(sender, NOBODY)
        if staged.iteration <= worker.newest:
            return  # over a connection that broke, and what was sent in its place is here
        if worker.answer is None or worker.answer.iteration != staged.iteration:
            raise MessageRefused(f"it does not compute iteration {staged.iteration}")
        self.memory_of(sender).early.take(staged, frames)

    def commit(self, sender: Process, worker: RemoteWorker, request: wire.Commit, rest: Sequence[memoryview]) -> None:
        """Takes an exchange whose gradient has come in part."""
        exchange = request.exchange
        push = next((part for part in exchange.messages if isinstance(part, Push)), None)
        if push is None:
            raise MessageRefused("it commits without a push")
        if push.handle.iteration > worker.newest:  # or the whole exchange was sent in its place
            frames = self.memory_of(sender).early.join(push, request, rest)
            self.exchange(sender, worker, exchange, frames)

    def exchange(
        self, sender: Process, worker: RemoteWorker, request: wire.Exchange, frames: Sequence[memoryview]
    ) -> None:
        pushes = sum(isinstance(part, Push) for part in request.messages)
        if pushes > 1:
            raise MessageRefused("it pushes twice")
        if request.hyper is not None:
            check_hyper(self.state.spec.groups, request.hyper)
        memory = self.memory_of(sender)
        lengths = memory.lengths if pushes and not request.refusal else ()
        wire_precision.check_lengths(frames, lengths)
        worker.held = request.held
        for part in request.messages:
            if isinstance(part, Pull):
                self.pull(sender, worker, part)
            elif part.handle.iteration > worker.newest:
                if lengths:
                    memory.take(frames)
                worker.newest = part.handle.iteration
                memory.early.clear()
                self.requests.take_push(part, request)

    def pull(self, sender: Process, worker: RemoteWorker, pull: Pull) -> None:
        asked = (pull.iteration, pull.attempt)
        if asked == worker.asked and worker.answer is not None:
            self.answer(worker.answer)
            return
        worker.asked, worker.answer = asked, None
        self.unsent.discard(sender)
        self.requests.take_pull(pull)

    def answer(self, parameters: Parameters) -> None:
        """Sends the parameters: from the worker's memory, or from where they are stepped."""
        sender = (parameters.worker, parameters.incarnation)
        worker = self.workers.get(sender)
        if worker is None:
            return  # it is no member any more
        worker.answer = parameters
        memory = self.memory_of(sender)
        memory.buffer.release()
        message, frames = memory.answer(parameters, worker.held)
        if self.send(b"%d:%d" % sender, wire.encode(message), frames, memory.passing):
            self.unsent.discard(sender)
        else:
            self.unsent.add(sender)

    def send_unsent(self) -> None:
        """Sends the answers that could not be sent, to those who are connected by now."""
        for sender in [each for each in self.unsent if self.listener.connected(b"%d:%d" % each)]:
            answer = self.workers[sender].answer
            assert answer is not None
            self.answer(answer)

    def hand_over(self, name: bytes, request: wire.Fetch) -> None:
        """Sends the optimizer's state, as frames."""
        try:
            state, failed = memoryview(save(self.state.optimizer.state())), ""
        except SafetensorError as problem:
            state, failed = memoryview(b""), str(problem)
        frames = [state[at : at + FRAME] for at in range(0, len(state), FRAME)]
        self.send(name, wire.encode(wire.Fetched(request.file, failed)), frames)

    def send(self, name: bytes, message: bytes, frames: Sequence[memoryview], may_change: bool = False) -> bool:
        """Returns False if that worker is not connected right now."""
        return self.listener.send(name, wrap(self.run, self.incarnation, message), frames, may_change)

    def refuse(self, name: bytes, reason: str) -> None:
        self.refusals[name] += 1
        count = self.refusals[name]
        if count <= LINES:
            more = "" if count < LINES else " (and what else comes of it is counted only)"
            logger.warning(printable(f"server {self.shard}: refused a message of {name!r}: {reason}{more}"))

    def memory_of(self, sender: Process) -> RemoteMemory:
        """Returns the memory of a worker on another host."""
        buffer, memory = self.buffers.of(sender), self.workers.get(sender, NOBODY).memory
        if memory is None or memory.buffer is not buffer:
            raise MessageRefused("this worker is on the server's host and speaks through shared memory")
        return memory

    def open_buffer(self, sender: Process) -> WorkerBuffer | None:
        """Makes new memory for this worker, if it is on another host."""
        if sender not in self.workers:
            return None
        memory = RemoteMemory(self.state, self.multihost.wire, self.answer)
        self.workers[sender].memory = memory
        return memory.buffer

    def forget(self, senders: set[Process]) -> None:
        """These are no members any more."""
        for sender in senders:
            self.listener.expel(b"%d:%d" % sender)
            self.unsent.discard(sender)
            self.workers.pop(sender, None)

    def close(self) -> None:
        for name, count in self.refusals.items():
            if count > LINES:
                logger.warning(f"server {self.shard}: refused {count} messages of {name!r}")


NOBODY = RemoteWorker()
"""Who has not spoken yet."""


def sender_of(message: Push | Pull) -> Process:
    """Worker and incarnation."""
    if isinstance(message, Push):
        return message.handle.source, message.handle.incarnation
    return message.worker, message.incarnation
