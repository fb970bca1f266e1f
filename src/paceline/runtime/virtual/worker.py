"""A worker on the simulated clock: how long its computations take, its pauses, its own connection if it has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from paceline.core.actions import AbortCompute, Compute, Send, SetTimer
from paceline.core.events import ComputeAborted, Event, GradientReady, ParametersArrived, TimerFired, arrival_of
from paceline.core.messages import FromScheduler, Node, Push, Role
from paceline.runtime.virtual.engine import COMPUTE, MESSAGE, TIMER, Callback, Wire
from paceline.runtime.virtual.faults import FaultInjector
from paceline.runtime.virtual.local_rounds import LocalRounds
from paceline.runtime.virtual.world import World


class VirtualWorker:
    """Carries out the actions of one worker. Durations are the cluster's, gradients the backend's."""

    role: ClassVar[Role] = "worker"

    def __init__(
        self,
        world: World,
        rank: int,
        incarnation: int,
        faults: FaultInjector,
        may_begin: Callable[[VirtualWorker, int], bool],
    ) -> None:
        plan = world.plan
        self.faults = faults
        self.may_begin = may_begin
        self.engine = world.engine
        self.backend = world.backend
        self.receivers = world.receivers
        self.slice_bytes = world.slice_bytes
        self.rank = rank
        self.incarnation = incarnation
        self.process = (rank, incarnation)
        self.alive = True
        self.paused_until = 0.0
        self.duration: Callable[[], float] = plan.cluster.durations(rank, plan.members.workers, plan.seed)
        self.compute_s = self.duration
        """How long the computation that starts now takes."""
        link = plan.cluster.link(rank)
        self.up = Wire(link.latency_s, link.bandwidth) if link is not None else None
        self.down = Wire(link.latency_s, link.bandwidth) if link is not None else None
        """The two directions of its own connection, if it is worse than the servers'."""
        self.receive = self.take_parameters if link is None else self.pass_link
        """Takes a slice that has left its server's wire."""
        self.computing: Compute | None = None
        self.work = world.work
        self.batches = world.batches
        self.of_batch = plan.cluster.of_batch
        self.began = 0.0
        self.samples = 0
        """When the gradient was begun that is computed, and on how many samples."""
        self.rounds = LocalRounds(self, world, plan.local) if plan.local is not None else None
        """Its rounds of local steps, if an iteration is one."""
        self.runner = world.runner(Node(self.role, rank), self, incarnation)

    def deliver(self, event: Event) -> None:
        if self.alive:
            self.runner.deliver(event)

    def die(self) -> None:
        """Hear nothing any more, and finish nothing."""
        self.alive = False
        if self.computing is not None:
            self.backend.abort(self.process, self.computing.iteration)
        self.backend.leave(self.process)

    # Messages.

    def send(self, action: Send) -> None:
        receive = self.receivers[action.to]
        if self.up is None:
            receive(action.message)
        else:
            nbytes = action.message.handle.nbytes if isinstance(action.message, Push) else 0
            self.engine.schedule(self.up.arrival(self.engine.now, nbytes), MESSAGE, receive, action.message)

    def pass_link(self, event: ParametersArrived) -> None:
        """Put a slice that has left its server's wire on the worker's own."""
        assert self.down is not None
        through = self.down.arrival(self.engine.now, self.slice_bytes[event.parameters.shard])
        self.engine.schedule(through, MESSAGE, self.take_parameters, ParametersArrived(through, event.parameters))

    def take_parameters(self, event: ParametersArrived) -> None:
        if self.alive:
            self.runner.deliver(event)

    def receive_order(self, message: FromScheduler, arrival: float) -> None:
        """Take a small message that has left the scheduler's wire at `arrival`."""
        if self.down is not None:
            arrival += self.down.latency_s
        self.engine.schedule(arrival, MESSAGE, self.deliver, arrival_of(message, arrival))

    def set_timer(self, action: SetTimer) -> None:
        due = self.engine.now + action.after_s
        self.engine.schedule(due, TIMER, self.deliver, TimerFired(due, action.timer))

    # Computations, and its own time.

    def compute(self, action: Compute) -> None:
        if not self.may_begin(self, action.iteration):
            return
        self.computing = action
        if self.rounds is not None:
            self.rounds.begin(action)
            return
        now = self.engine.now
        self.begin_samples()
        self.backend.compute(self.process, action.iteration, self.samples)
        duration = self.next_duration()
        if self.faults.at_iteration:
            self.faults.inject_at_iteration(self.rank, action.iteration, now + 0.5 * duration)
        if self.work is None:
            self.at_own_time(now + duration, self.finish, action)
        else:
            self.work.compute(self, duration, action)

    def hand_in(self, action: Compute) -> None:
        """The gradient is there: what its exchange costs this worker comes before it is pushed."""
        assert self.work is not None
        if self.computing is action and self.alive:
            self.work.exchange(self.finish, action)

    def begin_samples(self) -> None:
        """A gradient is begun now, on the samples that are this worker's turn."""
        self.began = self.engine.now
        self.samples = self.batches.next(self.process, self.began)

    def next_duration(self) -> float:
        """Returns how long the gradient takes that begins now."""
        duration = self.compute_s()
        return duration if self.batches.are_equal else duration * self.of_batch(self.samples / self.batches.mean)

    def end_local_step(self, action: Compute) -> None:
        """Ends a step of the round, and the round with its last."""
        rounds = self.rounds
        if rounds is not None and self.computing is action and self.alive and rounds.end_step(action):
            self.computing = None
            now, nbytes, steps = self.engine.now, self.slice_bytes, rounds.rounds.steps
            self.runner.deliver(GradientReady(now, action.iteration, action.attempt, nbytes, rounds.samples, steps))

    def finish(self, action: Compute) -> None:
        """End a computation; one that was given up is of no interest when its time is over."""
        if self.computing is action and self.alive:
            self.computing = None
            now, nbytes, samples = self.engine.now, self.slice_bytes, self.samples
            self.batches.note(self.process, samples, now - self.began)
            weight = 1.0 if self.batches.are_equal else float(samples)
            self.runner.deliver(GradientReady(now, action.iteration, action.attempt, nbytes, weight))

    def abort_compute(self, action: AbortCompute) -> None:
        """Give a computation up: the time it took until now is lost."""
        self.computing = None
        self.backend.abort(self.process, action.iteration)
        now = self.engine.now
        self.engine.schedule(now, COMPUTE, self.deliver, ComputeAborted(now, action.iteration, action.attempt))

    def pause(self, for_s: float) -> None:
        """Stand still for so long, as a process that is stopped does; a second pause begins when the first is over."""
        self.paused_until = max(self.paused_until, self.engine.now) + for_s
        self.engine.postpone(self, for_s)

    def at_own_time(self, due: float, method: Callback, argument: object = None) -> None:
        """Call a method of this worker at `due`, or as much later as it stands still until then."""
        if self.paused_until > self.engine.now:
            due += self.paused_until - self.engine.now
        self.engine.schedule(due, COMPUTE, method, argument)
