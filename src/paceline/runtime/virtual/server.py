"""A server on the simulated clock: the machine of one shard, with a wire in each direction."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from paceline.core.actions import Answer, Apply, Drop, Measure, Park, Send, SetTimer
from paceline.core.events import ParametersArrived, PullArrived, PushArrived, TimerFired
from paceline.core.messages import Message, Node, Pull, Push, SliceNorm
from paceline.core.norm_reducer import REDUCER
from paceline.core.shard import Shard
from paceline.runtime.virtual.engine import MESSAGE, TIMER, Wire
from paceline.runtime.virtual.worker import VirtualWorker
from paceline.runtime.virtual.world import World


class VirtualServer:
    """Carries out the actions of one shard. The parameters, if there are any, are the backend's."""

    def __init__(self, world: World, shard: int, workers: Mapping[int, VirtualWorker]) -> None:
        cluster = world.plan.cluster
        self.engine = world.engine
        self.backend = world.backend
        self.receivers = world.receivers
        self.workers = workers
        self.shard = shard
        self.slice_bytes = world.slice_bytes[shard]
        self.inward = Wire(cluster.latency_s, cluster.bandwidth)
        self.outward = Wire(cluster.latency_s, cluster.bandwidth)
        self.runner = world.runner(Node("server", shard), self)
        assert isinstance(self.runner.machine, Shard)
        self.machine = self.runner.machine
        self.machine.clips_mean = self.backend.clips_mean
        self.hear_push = self.take_push if self.backend.has_tensors else self.runner.deliver

    def receive(self, message: Message) -> None:
        """Put a push or a pull that is sent now on the inward wire."""
        if isinstance(message, Push):
            arrival = self.inward.arrival(self.engine.now, message.handle.nbytes)
            self.engine.schedule(arrival, MESSAGE, self.hear_push, PushArrived(arrival, message))
        elif isinstance(message, Pull):
            arrival = self.inward.arrival(self.engine.now, 0)
            self.engine.schedule(arrival, MESSAGE, self.runner.deliver, PullArrived(arrival, message))

    def take_push(self, event: PushArrived) -> None:
        """Tell the machine of a push, with its significance if the policy wants to know it."""
        if self.machine.gate.wants_significance:
            event = replace(event, significance=self.backend.significance(self.shard, event.push.handle))
        self.runner.deliver(event)

    def send(self, action: Send) -> None:
        self.receivers[action.to](action.message)

    def measure(self, action: Measure) -> None:
        squared = self.backend.squared_norm(self.shard, action.handles)
        self.receivers[REDUCER](SliceNorm(self.shard, action.iteration, squared))

    def apply(self, action: Apply) -> None:
        self.backend.apply(self.shard, action)

    def drop(self, action: Drop) -> None:
        self.backend.drop(self.shard, action.handle)

    def answer(self, action: Answer) -> None:
        parameters = action.parameters
        arrival = self.outward.arrival(self.engine.now, self.slice_bytes)
        worker = self.workers.get(parameters.worker)
        if worker is not None and worker.incarnation == parameters.incarnation:
            self.backend.read(worker.process, self.shard)
            self.engine.schedule(arrival, MESSAGE, worker.receive, ParametersArrived(arrival, parameters))

    def park(self, action: Park) -> None:
        """Nothing is to be done: the worker waits for its answer."""

    def set_timer(self, action: SetTimer) -> None:
        due = self.engine.now + action.after_s
        self.engine.schedule(due, TIMER, self.runner.deliver, TimerFired(due, action.timer))
