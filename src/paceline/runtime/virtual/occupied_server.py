"""A server whose time counts: it does one thing after the other, and whoever comes meanwhile waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from paceline.core.actions import Answer, Apply
from paceline.core.events import ParametersArrived, PullArrived, PushArrived
from paceline.core.messages import Message, Parameters, Pull, Push
from paceline.core.policy import CentralPolicy
from paceline.runtime.virtual.engine import MESSAGE
from paceline.runtime.virtual.host_work import HostWork
from paceline.runtime.virtual.server import VirtualServer
from paceline.runtime.virtual.worker import VirtualWorker
from paceline.runtime.virtual.world import World


class OccupiedServer(VirtualServer):
    """Carries out the actions of one shard, each in its time ([costs])."""

    def __init__(self, world: World, shard: int, workers: Mapping[int, VirtualWorker]) -> None:
        super().__init__(world, shard, workers)
        assert isinstance(world.work, HostWork)
        self.cores, self.costs = world.work.cores, world.work.costs
        policy = world.plan.policy
        alone = world.plan.members.servers == 1
        self.copies = not (alone and isinstance(policy, CentralPolicy) and policy.in_step)
        """Whether workers are sent parameters, and do not read them where they are stepped."""
        self.inbox: deque[Message] = deque()
        """What has come and is not heard yet."""
        self.ordered: deque[tuple[float, tuple[VirtualWorker, Parameters] | None]] = deque()
        """What the machine has ordered and is not done: how long it takes, and the answer, if it is one."""
        self.is_busy = False

    def receive(self, message: Message) -> None:
        nbytes = message.handle.nbytes if isinstance(message, Push) else 0
        self.engine.schedule(self.inward.arrival(self.engine.now, nbytes), MESSAGE, self.queue, message)

    def queue(self, message: Message) -> None:
        self.inbox.append(message)
        self.go_on()

    def go_on(self) -> None:
        """Begins the next thing there is to do, unless one is being done."""
        if self.is_busy:
            return
        if self.ordered:
            self.is_busy = True
            seconds, answer = self.ordered.popleft()
            self.cores.work(seconds, self.done, answer)
        elif self.inbox:
            self.is_busy = True
            message = self.inbox.popleft()
            seconds = self.costs.of_push(message.handle.nbytes) if isinstance(message, Push) else 0.0
            self.cores.work(seconds, self.heard, message)

    def heard(self, message: Message) -> None:
        """A message has been read: the machine is told."""
        self.is_busy = False
        now = self.engine.now
        if isinstance(message, Push):
            self.hear_push(PushArrived(now, message))
        elif isinstance(message, Pull):
            self.runner.deliver(PullArrived(now, message))
        self.go_on()

    def apply(self, action: Apply) -> None:
        super().apply(action)
        self.order(self.costs.of_step(len(action.handles), self.slice_bytes), None)

    def answer(self, action: Answer) -> None:
        worker = self.workers.get(action.parameters.worker)
        if worker is not None and worker.incarnation == action.parameters.incarnation:
            self.backend.read(worker.process, self.shard)
            self.order(self.costs.of_answer(self.slice_bytes, self.copies), (worker, action.parameters))

    def order(self, seconds: float, answer: Any) -> None:
        self.ordered.append((seconds, answer))
        self.go_on()

    def done(self, answer: tuple[VirtualWorker, Parameters] | None) -> None:
        """A step is taken, or an answer written: it leaves."""
        self.is_busy = False
        if answer is not None:
            worker, parameters = answer
            arrival = self.outward.arrival(self.engine.now, self.slice_bytes)
            self.engine.schedule(arrival, MESSAGE, worker.receive, ParametersArrived(arrival, parameters))
        self.go_on()
