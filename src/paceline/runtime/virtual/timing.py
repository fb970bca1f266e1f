"""A virtual run without tensors: who waits for whom and how long, and nothing is learned.

The machines, the wires and the clock are those of a simulation; gradients are names only. So it is fast enough to
ask what a policy does with 10 000 workers. A worker stops after `iterations`; nobody is waiting for it then, unless a
scheduler has planned otherwise: where there is one, it leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.cluster import Cluster
from paceline.core.actions import AbortCompute, Answer, Apply, Compute, Drop, Park, Send, SetTimer
from paceline.core.events import (
    ComputeAborted,
    GradientReady,
    ParametersArrived,
    PlanArrived,
    PullArrived,
    PushArrived,
    ReleaseArrived,
    ResyncArrived,
    TimerFired,
    ViewChanged,
)
from paceline.core.messages import FromScheduler, Members, Node, Plan, Pull, Push, Release, View
from paceline.core.policy import Policy
from paceline.core.scheduler import SCHEDULER
from paceline.core.trace import Header, Record, Trace
from paceline.errors import PacelineError
from paceline.runtime.driver import Authority, Carrier, Seat, ServerCarrier, WorkerCarrier
from paceline.runtime.virtual.engine import COMPUTE, MESSAGE, TIMER, Engine, Wire
from paceline.runtime.virtual.scheduling import VirtualScheduler

SLICE_BYTES = 20_000
"""What a gradient slice is said to weigh: a model of about 5 000 parameters."""


@dataclass(frozen=True)
class TimingPlan:
    policy: Policy
    cluster: Cluster
    members: Members
    iterations: int
    seed: int = 0
    checked: bool = False
    """Keep a trace, and check the invariants of the shards as often as `simulate` does."""
    slice_bytes: tuple[int, ...] | None = None
    """What the slice of each shard weighs; `SLICE_BYTES` each if none."""


class Timing:
    """One run. Afterwards `engine.now` is how long it took, and `engine.happened` how much happened."""

    def __init__(self, plan: TimingPlan) -> None:
        self.plan = plan
        self.engine = Engine()
        self.slice_bytes = plan.slice_bytes or (SLICE_BYTES,) * plan.members.servers
        header = Header("timing", str(plan.policy), plan.members, plan.seed, self.slice_bytes)
        self.trace = Trace(header)
        self.updates = 0
        self.authority = Authority()
        self.done: set[int] = set()
        """The workers that have done their iterations."""
        self.servers = [TimedServer(self, shard) for shard in range(plan.members.servers)]
        self.workers = [
            TimedWorker(self, rank) if plan.cluster.link(rank) is None else LinkedWorker(self, rank)
            for rank in range(plan.members.workers)
        ]
        self.scheduler = VirtualScheduler(self.engine, plan.cluster, self.deliver)
        if plan.policy.has_scheduler:
            self.scheduler.seat = self.seat(SCHEDULER, self.scheduler)

    def deliver(self, to: Node, message: FromScheduler | Plan, arrival: float) -> None:
        if isinstance(message, Plan):
            self.engine.tell(arrival, MESSAGE, self.servers[to.rank].seat.tell, PlanArrived(arrival, message))
            return
        worker = self.workers[to.rank]
        arrival += worker.link_latency_s
        arrived = ReleaseArrived if isinstance(message, Release) else ResyncArrived
        self.engine.tell(arrival, MESSAGE, worker.tell, arrived(arrival, message))  # type: ignore[arg-type]

    def seat(self, node: Node, carrier: Carrier) -> Seat:
        machine = self.plan.policy.machine(node.role, node.rank, self.plan.members, self.plan.seed)
        return Seat(node, 0, machine, carrier, self.record if self.plan.checked else None)

    def record(self, record: Record) -> None:
        records = self.trace.records
        records.append(record)
        if len(records) % self.plan.members.workers == 0:
            for server in self.servers:
                server.seat.machine.check()

    def note_done(self, rank: int) -> None:
        self.done.add(rank)
        if self.plan.policy.has_scheduler:
            self.announce(self.authority.remove(rank))
        if len(self.done) == self.plan.members.workers:
            self.engine.wind_up()

    def run(self) -> int:
        """Run to the end; the number of events that machines handled."""
        view = self.authority.admit(dict.fromkeys(range(self.plan.members.workers), 0))
        self.announce(view, [worker.seat for worker in self.workers])
        self.engine.run()
        if left := self.plan.members.workers - len(self.done):
            after = f"nobody can go on after {self.engine.now:.2f} s"
            raise PacelineError(f"{self.plan.policy}: {after}, {left} are not done")
        return self.engine.happened

    def announce(self, view: View, also: Sequence[Seat] = ()) -> None:
        """Tell the shards, and the scheduler if there is one."""
        arrival = self.engine.now + self.plan.cluster.latency_s
        seats = [*(server.seat for server in self.servers), *also]
        seats += [self.scheduler.seat] if self.plan.policy.has_scheduler else []
        for seat in seats:
            self.engine.tell(arrival, MESSAGE, seat.tell, ViewChanged(arrival, view))


class TimedServer(ServerCarrier):
    """One shard: two wires, no parameters."""

    def __init__(self, timing: Timing, shard: int) -> None:
        cluster = timing.plan.cluster
        self.timing = timing
        self.engine = timing.engine
        self.inward = Wire(cluster.latency_s, cluster.bandwidth)
        self.outward = Wire(cluster.latency_s, cluster.bandwidth)
        self.slice_bytes = timing.slice_bytes[shard]
        self.seat = timing.seat(Node("server", shard), self)

    def send(self, action: Send) -> None:
        self.timing.scheduler.receive(action.message)

    def apply(self, action: Apply) -> None:
        self.timing.updates += 1

    def drop(self, action: Drop) -> None:
        """There is nothing to forget."""

    def park(self, action: Park) -> None:
        """The worker waits by itself."""

    def answer(self, action: Answer) -> None:
        parameters = action.parameters
        arrival = self.outward.arrival(self.engine.now, self.slice_bytes)
        take = self.timing.workers[parameters.worker].take
        self.engine.tell(arrival, MESSAGE, take, ParametersArrived(arrival, parameters))

    def set_timer(self, action: SetTimer) -> None:
        due = self.engine.now + action.after_s
        self.engine.tell(due, TIMER, self.seat.tell, TimerFired(due, action.timer))


class TimedWorker(WorkerCarrier):
    """One worker: durations from the cluster."""

    link_latency_s = 0.0

    def __init__(self, timing: Timing, rank: int) -> None:
        plan = timing.plan
        self.timing = timing
        self.engine = timing.engine
        self.rank = rank
        self.iterations = plan.iterations
        self.duration = plan.cluster.durations(rank, plan.members.workers, plan.seed)
        self.seat = timing.seat(Node("worker", rank), self)
        self.tell = self.seat.tell
        self.computing: tuple[int, int] | None = None
        """Iteration and attempt. The end of a computation that was given up is of no interest when it comes."""
        self.take: Callable[[ParametersArrived], None] = self.tell
        """What has come from a server, as far as the server is concerned."""

    def compute(self, action: Compute) -> None:
        if action.iteration < self.iterations:
            self.computing = (action.iteration, action.attempt)
            done = self.engine.now + self.duration()
            ready = GradientReady(done, action.iteration, action.attempt, self.timing.slice_bytes)
            self.engine.tell(done, COMPUTE, self.finish, ready)
        else:
            self.timing.note_done(self.rank)

    def finish(self, ready: GradientReady) -> None:
        if self.computing == (ready.iteration, ready.attempt):
            self.tell(ready)

    def abort_compute(self, action: AbortCompute) -> None:
        now = self.engine.now
        self.computing = None
        self.engine.tell(now, COMPUTE, self.tell, ComputeAborted(now, action.iteration, action.attempt))

    def send(self, action: Send) -> None:
        server, message, engine = self.timing.servers[action.to.rank], action.message, self.engine
        if isinstance(message, Push):
            arrival = server.inward.arrival(engine.now, server.slice_bytes)
            engine.tell(arrival, MESSAGE, server.seat.tell, PushArrived(arrival, message, None))
        elif action.to.role == "scheduler":
            self.timing.scheduler.receive(message)
        elif isinstance(message, Pull):
            arrival = server.inward.arrival(engine.now, 0)
            engine.tell(arrival, MESSAGE, server.seat.tell, PullArrived(arrival, message))

    def set_timer(self, action: SetTimer) -> None:
        due = self.engine.now + action.after_s
        self.engine.tell(due, TIMER, self.tell, TimerFired(due, action.timer))


class LinkedWorker(TimedWorker):
    """A worker with a connection of its own: what it sends and gets passes that besides the servers'."""

    def __init__(self, timing: Timing, rank: int) -> None:
        super().__init__(timing, rank)
        link = timing.plan.cluster.link(rank)
        assert link is not None
        self.link_latency_s = link.latency_s
        self.up = Wire(link.latency_s, link.bandwidth)
        self.down = Wire(link.latency_s, link.bandwidth)
        self.take = self.pass_link

    def send(self, action: Send) -> None:
        nbytes = action.message.handle.nbytes if isinstance(action.message, Push) else 0
        self.engine.tell(self.up.arrival(self.engine.now, nbytes), MESSAGE, super().send, action)

    def pass_link(self, event: ParametersArrived) -> None:
        parameters = event.parameters
        through = self.down.arrival(self.engine.now, self.timing.slice_bytes[parameters.shard])
        self.engine.tell(through, MESSAGE, self.tell, ParametersArrived(through, parameters))
