"""Virtual workers and servers: they carry out a machine's actions on the simulated clock, with real tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.core.actions import AbortCompute, Answer, Apply, Compute, Drop, Park, Send, SetTimer
from paceline.core.events import (
    ComputeAborted,
    Event,
    GradientReady,
    ParametersArrived,
    PullArrived,
    PushArrived,
    ReleaseArrived,
    ResyncArrived,
    TimerFired,
)
from paceline.core.messages import FromScheduler, Message, Parameters, Pull, Push, Release
from paceline.core.shard import Shard
from paceline.runtime.driver import NoSuchAction, Seat, ServerCarrier, WorkerCarrier
from paceline.runtime.virtual.engine import COMPUTE, MESSAGE, TIMER, Happening, Wire
from paceline.tensors.significance import significance
from paceline.tensors.slices import SliceOptimizer

if TYPE_CHECKING:
    from paceline.runtime.virtual.simulation import Simulation


class VirtualServer(ServerCarrier):
    """One shard: a slice of the parameters, its optimizer, and a wire in each direction."""

    def __init__(self, simulation: Simulation, shard: int, optimizer: SliceOptimizer) -> None:
        self.simulation = simulation
        self.shard = shard
        self.optimizer = optimizer
        self.consumed = 0
        """Gradients applied so far, and in how many steps."""
        self.updates = 0
        cluster = simulation.cluster
        self.inward = Wire(cluster.latency_s, cluster.bandwidth)
        self.outward = Wire(cluster.latency_s, cluster.bandwidth)
        self.seat: Seat
        self.machine: Shard

    def receive(self, message: Message) -> None:
        """Take a message that a worker sends now."""
        engine = self.simulation.engine
        if isinstance(message, Push):
            arrival = self.inward.arrival(engine.now, message.handle.nbytes)
            engine.at(arrival, MESSAGE, lambda: self.take_push(arrival, message))
        elif isinstance(message, Pull):
            arrival = self.inward.arrival(engine.now, 0)
            event = PullArrived(arrival, message)
            engine.tell(arrival, MESSAGE, self.seat.tell, event)
        else:
            raise NoSuchAction(f"nobody sends a shard {message}")

    def send(self, action: Send) -> None:
        self.simulation.node(action.to).receive(action.message)

    def take_push(self, arrival: float, push: Push) -> None:
        measured = None
        if self.machine.gate.wants_significance:
            gradient = self.simulation.gradients.look(push.handle, self.shard)
            measured = significance([gradient], self.optimizer.values)
        self.seat.tell(PushArrived(arrival, push, measured))

    def apply(self, action: Apply) -> None:
        take, cut = self.simulation.gradients.take, self.optimizer.cut
        gradients = [cut(take(handle, self.shard)) for handle in action.handles]
        self.optimizer.apply(gradients, action.weight)
        self.consumed += len(gradients)
        self.updates += 1
        self.simulation.consider_evaluation()

    def drop(self, action: Drop) -> None:
        self.simulation.gradients.discard(action.handle)

    def answer(self, action: Answer) -> None:
        parameters = action.parameters
        worker = self.simulation.workers.get(parameters.worker)
        arrival = self.outward.arrival(self.simulation.engine.now, self.simulation.slice_bytes[self.shard])
        if worker is not None and worker.incarnation == parameters.incarnation:
            worker.receive(parameters, self.optimizer.values, arrival)

    def park(self, action: Park) -> None:
        """Nothing to do: the worker waits by itself."""

    def set_timer(self, action: SetTimer) -> None:
        due = self.simulation.engine.now + action.after_s
        self.simulation.engine.at(due, TIMER, lambda: self.seat.tell(TimerFired(due, action.timer)))


class VirtualWorker(WorkerCarrier):
    """One worker: durations from the cluster, gradients from `Gradients`."""

    def __init__(self, simulation: Simulation, rank: int, incarnation: int) -> None:
        self.simulation = simulation
        self.rank = rank
        self.incarnation = incarnation
        self.alive = True
        self.paused_until = 0.0
        self.paused_s = 0.0
        """How long all its pauses so far are together."""
        self.duration: Callable[[], float] = simulation.cluster.durations(
            rank, simulation.members.workers, simulation.seed
        )
        link = simulation.cluster.link(rank)
        self.up = Wire(link.latency_s, link.bandwidth) if link is not None else None
        self.down = Wire(link.latency_s, link.bandwidth) if link is not None else None
        """The two directions of its own connection, if it is worse than the servers'."""
        self.parameters = self._fresh()
        """What has been pulled for the next iteration. Never written after the computation has started."""
        self.computing: Compute | None = None
        self.seat: Seat

    def _fresh(self) -> Tensor:
        return self.simulation.layout.empty()

    def tell(self, event: Event) -> None:
        if self.alive:
            self.seat.tell(event)

    def receive(self, parameters: Parameters, values: Tensor, arrival: float) -> None:
        """Take a slice that a server sends now; it has arrived whole at `arrival`."""
        self.parameters[self.simulation.shards[parameters.shard]] = values
        engine = self.simulation.engine
        down = self.down
        if down is None:
            event = ParametersArrived(arrival, parameters)
            engine.tell(arrival, MESSAGE, self.tell, event)
            return

        def pass_link() -> None:
            through = down.arrival(engine.now, self.simulation.slice_bytes[parameters.shard])
            engine.tell(through, MESSAGE, self.tell, ParametersArrived(through, parameters))

        engine.at(arrival, MESSAGE, pass_link)

    def hear_scheduler(self, message: FromScheduler, arrival: float) -> None:
        """Take what the scheduler sends now; it is here at `arrival`."""
        if self.down is not None:
            arrival += self.down.latency_s
        arrived = ReleaseArrived if isinstance(message, Release) else ResyncArrived
        self.simulation.engine.tell(arrival, MESSAGE, self.tell, arrived(arrival, message))  # type: ignore[arg-type]

    def compute(self, action: Compute) -> None:
        simulation = self.simulation
        if simulation.iterations is not None and action.iteration >= simulation.iterations:
            simulation.finished = True
            simulation.leave(self)
            return
        self.computing = action
        samples = simulation.dealer.deal(self.rank, action.iteration)
        simulation.gradients.order((self.rank, self.incarnation, action.iteration), self.parameters, samples)
        self.parameters = self._fresh()
        duration = self.compute_s()
        now = simulation.engine.now
        simulation.strike_at_iteration(self, action.iteration, now + 0.5 * duration)
        self.at_own_time(now + duration, lambda: self.finish(action))

    def pause(self, for_s: float) -> None:
        """Stand still for so long, as a process that is stopped does; a second pause begins when the first is over."""
        self.paused_until = max(self.paused_until, self.simulation.engine.now) + for_s
        self.paused_s += for_s

    def at_own_time(self, due: float, happening: Happening) -> None:
        """Do something at `due`, or as much later as the worker stands still until then."""
        engine, counted_s = self.simulation.engine, self.paused_s

        def happen() -> None:
            nonlocal counted_s
            missed_s = self.paused_s - counted_s
            if missed_s > 0:
                counted_s = self.paused_s
                engine.at(engine.now + missed_s, COMPUTE, happen)
            else:
                happening()

        engine.at(due + max(0.0, self.paused_until - engine.now), COMPUTE, happen)

    def compute_s(self) -> float:
        """How long the computation that starts now takes."""
        return self.duration()

    def finish(self, action: Compute) -> None:
        engine = self.simulation.engine
        if not self.alive or self.computing is not action:
            return
        self.computing = None
        self.tell(GradientReady(engine.now, action.iteration, action.attempt, self.simulation.slice_bytes))

    def abort_compute(self, action: AbortCompute) -> None:
        """What was computed until now took its time and is lost."""
        engine = self.simulation.engine
        self.computing = None
        self.simulation.gradients.cancel((self.rank, self.incarnation, action.iteration))
        aborted = ComputeAborted(engine.now, action.iteration, action.attempt)
        engine.tell(engine.now, COMPUTE, self.tell, aborted)

    def set_timer(self, action: SetTimer) -> None:
        due = self.simulation.engine.now + action.after_s
        self.simulation.engine.at(due, TIMER, lambda: self.tell(TimerFired(due, action.timer)))

    def die(self) -> None:
        self.alive = False
        if self.computing is not None:
            self.simulation.gradients.cancel((self.rank, self.incarnation, self.computing.iteration))

    def send(self, action: Send) -> None:
        node, message = self.simulation.node(action.to), action.message
        if self.up is None:
            node.receive(message)
        else:
            engine = self.simulation.engine
            nbytes = message.handle.nbytes if isinstance(message, Push) else 0
            engine.at(self.up.arrival(engine.now, nbytes), MESSAGE, lambda: node.receive(message))
