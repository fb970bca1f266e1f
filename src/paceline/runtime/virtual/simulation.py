"""A virtual run from beginning to end: the machines of one policy on a simulated cluster.

Without a backend nothing is learned, and a run says who waits for whom and how long. With one of `training.py` it has
real gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.cluster import Fault
from paceline.core.actions import Park, Wait
from paceline.core.events import ViewChanged, arrival_of
from paceline.core.messages import Message, Node, Release, Resync, View
from paceline.core.norm_reducer import REDUCER
from paceline.core.policy import PeerPolicy
from paceline.core.progress import NAMED
from paceline.core.scheduler import SCHEDULER
from paceline.core.topology import neighbours
from paceline.errors import ConfigError, PacelineError
from paceline.runtime.execution import Membership
from paceline.runtime.virtual.backend import Backend
from paceline.runtime.virtual.coordinator import VirtualCoordinator
from paceline.runtime.virtual.engine import FAULT, MESSAGE, Engine
from paceline.runtime.virtual.faults import FaultInjector
from paceline.runtime.virtual.host_work import HostWork
from paceline.runtime.virtual.layerwise import LayerwiseWorker
from paceline.runtime.virtual.local_rounds import RoundPlanning
from paceline.runtime.virtual.occupied_server import OccupiedServer
from paceline.runtime.virtual.server import VirtualServer
from paceline.runtime.virtual.worker import VirtualWorker
from paceline.runtime.virtual.world import SimulationPlan, World


class Simulation:
    """One run. Afterwards `engine.now` is how long it took, and `engine.happened` how much happened."""

    def __init__(self, plan: SimulationPlan, backend: Backend | None = None, engine: Engine | None = None) -> None:
        if plan.cluster.resizes:
            raise ConfigError("[[servers]] is for live runs: in virtual time the number of servers stays as it is")
        self.plan = plan
        self.backend = Backend() if backend is None else backend
        self.engine = Engine() if engine is None else engine
        self.world = World(plan, self.backend, self.engine)
        costs = plan.cluster.costs
        if costs is not None:
            self.world.work = HostWork(self.engine, costs, peer_seconds(plan, self.world.slice_bytes[0]))
        self.trace = self.world.trace
        self.authority = Membership()
        self.iterations = math.inf if plan.iterations is None else plan.iterations
        self.finished = False
        """Somebody has done all its iterations: whoever joins after the last one finds nothing left to do."""
        self.done: set[int] = set()
        """The members that have done their iterations, and of which nobody has heard so."""
        self.goodbyes = plan.goodbyes or plan.policy.has_scheduler or plan.local is not None
        self.workers: dict[int, VirtualWorker] = {}
        if plan.local is not None and plan.local.is_planned:
            self.world.planning = RoundPlanning(self.world, plan.local, self.workers)
        self.faults = FaultInjector(self.engine, plan.cluster.faults, self.inject)
        server_type = VirtualServer if costs is None else OccupiedServer
        self.servers = [server_type(self.world, shard, self.workers) for shard in range(plan.members.servers)]
        self.reducer = VirtualCoordinator(self.world, REDUCER, self.deliver)
        self.scheduler: VirtualCoordinator | None = None
        receivers = self.world.receivers
        receivers |= {REDUCER: self.reducer.receive}
        receivers |= {Node("server", server.shard): server.receive for server in self.servers}
        if plan.policy.has_scheduler:
            self.scheduler = VirtualCoordinator(self.world, SCHEDULER, self.deliver, plan.cluster.scheduler_s)
            receivers[SCHEDULER] = self.scheduler.receive

    def run(self) -> None:
        """Run to the end."""
        self.admit(list(range(self.plan.members.workers)))
        self.faults.schedule()
        self.engine.run()
        if not self.engine.stopped and self.training():
            raise PacelineError(self.why_stuck())

    def why_stuck(self) -> str:
        """Nothing will ever happen again, and somebody has not done its part: who, and what it waits for."""
        stuck = self.training()
        reasons: dict[int, str] = {}
        for record in self.trace.records:
            for action in record.actions:
                if isinstance(action, Park):
                    reasons[action.pull.worker] = f"parked by {record.node.role} {record.node.rank}, {action.reason}"
                elif isinstance(action, Wait):
                    reasons[record.node.rank] = f"waiting, {action.reason}"
        said = "; ".join(f"worker {rank} is {reasons.get(rank, 'without an answer')}" for rank in stuck[:NAMED])
        more = f"; and {len(stuck) - NAMED} more" if len(stuck) > NAMED else ""
        return f"{self.plan.policy}: nobody can go on after {self.engine.now:.2f} s: {said}{more}"

    # Messages.

    def deliver(self, to: Node, message: Message, arrival: float) -> None:
        """Bring a small message to a server, or to a worker that is still there."""
        if to.role == "server":
            self.engine.schedule(arrival, MESSAGE, self.servers[to.rank].runner.deliver, arrival_of(message, arrival))
            return
        assert isinstance(message, Release | Resync)
        worker = self.workers.get(to.rank)
        if worker is not None and worker.incarnation == message.incarnation:
            worker.receive_order(message, arrival)

    # Membership.

    def make_worker(self, rank: int, incarnation: int) -> VirtualWorker:
        worker_type = LayerwiseWorker if self.plan.by_layer else VirtualWorker
        return worker_type(self.world, rank, incarnation, self.faults, self.may_begin)

    def may_begin(self, worker: VirtualWorker, iteration: int) -> bool:
        """Returns whether the worker is to compute this iteration; if not, it has done all of its own."""
        done = iteration if worker.rounds is None else worker.rounds.done
        if done >= self.iterations:
            self.finish(worker)
        return done < self.iterations

    def inject(self, fault: Fault) -> None:
        """Has a fault happen to its worker, if that is there."""
        worker = self.workers.get(fault.worker)
        if fault.kind == "join":
            if worker is None:
                self.admit([fault.worker])
        elif worker is None:
            return
        elif fault.kind == "crash":
            self.lose(worker)
        elif fault.kind == "restart":
            self.lose(worker)
            self.faults.come_back(fault.worker, fault.for_s)
        elif fault.kind == "leave":
            self.leave(worker, finished=False)
        else:
            worker.pause(fault.for_s)

    def admit(self, ranks: list[int]) -> None:
        """These ranks join, each under its next incarnation."""
        joining = {rank: self.authority.next_incarnation(rank) for rank in ranks}
        for rank, incarnation in joining.items():
            self.done.discard(rank)
            self.backend.join((rank, incarnation))
            worker = self.make_worker(rank, incarnation)
            if worker.rounds is not None:
                others = [each.rounds.done for each in self.workers.values() if each.rounds is not None]
                worker.rounds.done = min(others, default=0)
            self.workers[rank] = worker
        self.announce(self.authority.admit(joining), [self.workers[rank] for rank in ranks])

    def announce(self, view: View, joining: Sequence[VirtualWorker] = ()) -> None:
        """Tell the shards, the scheduler if there is one, and whoever joins; it reaches them after the latency."""
        self.world.announce(view)
        arrival = self.engine.now + self.plan.cluster.latency_s
        tell = [server.runner.deliver for server in self.servers]
        tell += [self.scheduler.runner.deliver] if self.scheduler is not None else []
        for hear in (*tell, *(worker.deliver for worker in joining)):
            self.engine.schedule(arrival, MESSAGE, hear, ViewChanged(arrival, view))

    def finish(self, worker: VirtualWorker) -> None:
        """The worker has done its iterations."""
        self.finished = True
        if self.goodbyes:
            self.leave(worker, finished=True)
        else:
            self.done.add(worker.rank)
            self.consider_end()

    def leave(self, worker: VirtualWorker, finished: bool) -> None:
        """The worker says goodbye: it has done its part, or a scenario has it leave in the middle."""
        self.bury(worker)
        self.remove(worker, finished)

    def lose(self, worker: VirtualWorker) -> None:
        """The worker is gone without a word; the authority notices after `detect_s`."""
        self.bury(worker)
        self.engine.schedule(self.engine.now + self.plan.cluster.detect_s, FAULT, self.notice_loss, worker)

    def notice_loss(self, worker: VirtualWorker) -> None:
        if self.authority.members.get(worker.rank) == worker.incarnation:
            self.remove(worker, finished=False)

    def bury(self, worker: VirtualWorker) -> None:
        worker.die()
        del self.workers[worker.rank]

    def remove(self, worker: VirtualWorker, finished: bool) -> None:
        """Tell everybody that this worker is no member any more."""
        self.done.discard(worker.rank)
        self.announce((self.authority.finish if finished else self.authority.remove)(worker.rank))
        self.consider_end()

    def training(self) -> list[int]:
        """The members that have not done their part yet."""
        return [rank for rank in self.authority.members if rank not in self.done]

    def consider_end(self) -> None:
        """The run is over when nobody trains and nobody is to come."""
        if len(self.done) == len(self.authority.members) and (self.finished or not self.faults.joins):
            self.engine.wind_up()


def peer_seconds(plan: SimulationPlan, nbytes: int) -> float:
    """Returns what an exchange costs a peer besides what it would cost a worker; nothing where there are servers."""
    if plan.cluster.costs is None or not isinstance(plan.policy, PeerPolicy):
        return 0.0
    ins = neighbours(plan.policy.topology(plan.members.workers), frozenset(range(plan.members.workers))).ins
    return plan.cluster.costs.of_peer(sum(map(len, ins.values())) / len(ins), nbytes)
