"""A virtual run from beginning to end: the machines of one policy on a simulated cluster, with real gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.cluster import Cluster, Fault
from paceline.core import messages
from paceline.core.actions import Park, Wait
from paceline.core.events import PlanArrived, ViewChanged
from paceline.core.messages import FromScheduler, Members, Node, View
from paceline.core.policy import Policy
from paceline.core.progress import NAMED
from paceline.core.scheduler import SCHEDULER
from paceline.core.shard import Shard
from paceline.core.trace import Header, Record, Trace
from paceline.dealing import SHUFFLED, Dealer, dealer_of
from paceline.errors import ConfigError, PacelineError
from paceline.run import ON_SERVERS, Point, Run, Target
from paceline.runtime.driver import Authority, Seat
from paceline.runtime.virtual.engine import FAULT, MESSAGE, Engine
from paceline.runtime.virtual.gradients import Gradients
from paceline.runtime.virtual.layerwise import LayerwiseWorker
from paceline.runtime.virtual.nodes import VirtualServer, VirtualWorker
from paceline.runtime.virtual.scheduling import VirtualScheduler
from paceline.tensors.layout import EPS, flatten, layout_of
from paceline.tensors.optimizers import OptimizerSpec
from paceline.tensors.slices import SliceOptimizer
from paceline.workloads.base import Workload

FEW = 32
"""Up to so many workers the invariants are checked after every event; above, as often as costs the same."""

Watcher = Callable[[Point], None]


@dataclass(frozen=True)
class Plan:
    """What to simulate. `iterations` bounds each worker; a `target` that is reached ends the run sooner."""

    policy: Policy
    workload: Workload
    cluster: Cluster
    members: Members
    optimizer: OptimizerSpec
    seed: int = 0
    iterations: int | None = None
    target: Target | None = None
    batch: int | None = None
    dtype: torch.dtype = torch.float32
    by_layer: bool = False
    """Workers read and push layer by layer; a server for each layer."""
    slicing: str = EPS
    """How the parameters are cut over the servers."""
    shards: str = SHUFFLED
    """How samples are dealt: shuffled, or sorted by label, each worker its own for good."""


class Simulation:
    def __init__(self, plan: Plan, watch: Watcher | None = None) -> None:
        if plan.cluster.resizes:
            raise ConfigError("[[servers]] is for live runs: in virtual time the number of servers stays as it is")
        self.plan = plan
        self.watch = watch
        self.members = plan.members
        self.cluster = plan.cluster
        self.seed = plan.seed
        self.iterations = plan.iterations
        self.engine = Engine()
        self.authority = Authority()
        self.module = plan.workload.module(plan.seed, plan.dtype)
        named = [(name, p, 0) for name, p in self.module.named_parameters() if p.requires_grad]
        self.layout = layout_of(named, "layers" if plan.by_layer else plan.optimizer.borders, plan.slicing)
        plan.optimizer.check(self.layout)
        self.names = {name for name, _, _ in named}
        self.flat = self.layout.empty()
        self.trained: list[Tensor] = [parameter for _, parameter, _ in named]
        flatten(self.trained, self.layout.views(self.flat))
        # Peers hold the whole vector each: as if there were one server.
        self.shards = self.layout.slices(max(1, plan.members.servers))
        self.slice_bytes = self.layout.slice_bytes(max(1, plan.members.servers))
        self.gradients = Gradients(
            plan.workload, self.module, self.layout, self.shards, plan.seed, plan.optimizer.extras.clip
        )
        batch = plan.batch or plan.workload.batch
        self.dealer: Dealer = dealer_of(plan.shards, plan.workload.train, plan.members.workers, batch, plan.seed)
        self.trace = Trace(Header("virtual", str(plan.policy), plan.members, plan.seed, self.slice_bytes), [])
        self.history: list[Point] = []
        self.evaluated_at = 0
        self.evaluated = ON_SERVERS
        self.consensus: list[tuple[float, float]] = []
        """Without servers: when, and how far from their average the peers were."""
        self.reached_s: float | None = None
        self.steps = 0
        self.finished = False
        """Somebody has done all its iterations: whoever joins after the last one finds nothing left to do."""
        self.joins = sum(fault.kind == "join" for fault in plan.cluster.faults)
        """How many are still to come, or to come back."""
        self.at_iteration = [fault for fault in plan.cluster.faults if fault.at_iteration is not None]
        self.servers = [self._server(shard) for shard in range(plan.members.servers)]
        self.scheduler = self._scheduler() if plan.policy.has_scheduler else None
        self.workers: dict[int, VirtualWorker] = {}

    def _server(self, shard: int) -> VirtualServer:
        part = self.shards[shard]
        optimizer = SliceOptimizer(self.layout, part, self.flat[part], self.plan.optimizer)
        server = VirtualServer(self, shard, optimizer)
        node = Node("server", shard)
        machine = self.plan.policy.machine("server", shard, self.members, self.seed)
        assert isinstance(machine, Shard)
        server.machine = machine
        server.seat = Seat(node, 0, machine, server, self.record)
        machine.checks = self.members.workers <= FEW
        return server

    def _scheduler(self) -> VirtualScheduler:
        scheduler = VirtualScheduler(self.engine, self.cluster, self.deliver)
        machine = self.plan.policy.machine("scheduler", 0, self.members, self.seed)
        machine.checks = self.members.workers <= FEW
        scheduler.seat = Seat(SCHEDULER, 0, machine, scheduler, self.record)
        return scheduler

    def node(self, to: Node) -> VirtualServer | VirtualScheduler:
        """Who takes messages to this address."""
        if to.role == "server":
            return self.servers[to.rank]
        assert self.scheduler is not None
        return self.scheduler

    def deliver(self, to: Node, message: FromScheduler | messages.Plan, arrival: float) -> None:
        """What the scheduler sends, to a shard or to a worker that is still there."""
        if isinstance(message, messages.Plan):
            self.engine.tell(arrival, MESSAGE, self.servers[to.rank].seat.tell, PlanArrived(arrival, message))
            return
        worker = self.workers.get(to.rank)
        if worker is not None and worker.incarnation == message.incarnation:
            worker.hear_scheduler(message, arrival)

    def record(self, record: Record) -> None:
        self.trace.records.append(record)
        self.steps += 1
        if self.members.workers > FEW and self.steps % self.members.workers == 0:
            for server in self.servers:
                server.seat.machine.check()

    def run(self) -> Run:
        self.evaluate()
        self.admit(list(range(self.members.workers)))
        for fault in self.cluster.faults:
            if fault.at_s is not None:
                self.engine.at(fault.at_s, FAULT, lambda fault=fault: self.strike(fault))  # type: ignore[misc]
        if self.reached_s is None:
            self.engine.run()
        if not self.engine.stopped and self.training():
            raise PacelineError(self.why_stuck())
        if self.history[-1].time_s < self.engine.now and self.reached_s is None:
            self.evaluate()
        parameters = self.layout.named(self.flat)
        return Run(
            policy=str(self.plan.policy),
            runtime="virtual",
            history=self.history,
            trace=self.trace,
            parameters=parameters,
            time_s=self.engine.now,
            target=self.plan.target,
            time_to_target_s=self.reached_s,
            others=self.others(),
            average=self.average(),
            layers=tuple(name for name, _ in self.layout.units()) if self.plan.by_layer else (),
            evaluated=self.evaluated,
            consensus=self.consensus,
        )

    def others(self) -> dict[str, Tensor]:
        """What the model holds besides what is trained: frozen parameters and buffers."""
        held = self.module.state_dict()
        return {name: value.clone() for name, value in held.items() if name not in self.names}

    def average(self) -> dict[str, Tensor]:
        """The moving average of the parameters, if there is one."""
        parts = [server.optimizer.average for server in self.servers]
        known = [part for part in parts if part is not None]
        return self.layout.named(torch.cat(known)) if known else {}

    # Membership and faults.

    def admit(self, ranks: list[int]) -> None:
        joining = {rank: self.authority.next_incarnation(rank) for rank in ranks}
        for rank, incarnation in joining.items():
            worker = (LayerwiseWorker if self.plan.by_layer else VirtualWorker)(self, rank, incarnation)
            machine = self.plan.policy.machine("worker", rank, self.members, self.seed)
            machine.checks = True
            worker.seat = Seat(Node("worker", rank), incarnation, machine, worker, self.record)
            self.workers[rank] = worker
        view = self.authority.admit(joining)
        self.announce(view, self.engine.now)
        arrival = self.engine.now + self.cluster.latency_s
        for rank in ranks:
            self.engine.at(arrival, MESSAGE, lambda w=self.workers[rank]: w.tell(ViewChanged(arrival, view)))  # type: ignore[misc]

    def announce(self, view: View, when: float) -> None:
        """Tell the shards, and the scheduler if there is one, `when` plus the latency from now on."""
        arrival = when + self.cluster.latency_s
        seats = [server.seat for server in self.servers]
        seats += [self.scheduler.seat] if self.scheduler is not None else []
        for seat in seats:
            self.engine.tell(arrival, MESSAGE, seat.tell, ViewChanged(arrival, view))

    def leave(self, worker: VirtualWorker) -> None:
        """The worker has done its part and says so."""
        worker.die()
        del self.workers[worker.rank]
        self.announce(self.authority.remove(worker.rank), self.engine.now)
        self.consider_end()

    def lose(self, worker: VirtualWorker) -> None:
        """The worker is gone without a word; the authority notices after `detect_s`."""
        worker.die()
        del self.workers[worker.rank]

        def noticed() -> None:
            if self.authority.members.get(worker.rank) == worker.incarnation:
                self.announce(self.authority.remove(worker.rank), self.engine.now)
                self.consider_end()

        self.engine.at(self.engine.now + self.cluster.detect_s, FAULT, noticed)

    def training(self) -> list[int]:
        """The members that have not done their part yet."""
        return list(self.authority.members)

    def consider_end(self) -> None:
        """The run is over when nobody trains and nobody is to come."""
        if not self.training() and (self.finished or not self.joins):
            self.engine.wind_up()

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

    def strike_at_iteration(self, worker: VirtualWorker, iteration: int, when: float) -> None:
        """Faults that wait for an iteration strike when it, or one after it, is started: it may be skipped."""
        due = [f for f in self.at_iteration if f.worker == worker.rank and iteration >= (f.at_iteration or 0)]
        for fault in due:
            self.at_iteration.remove(fault)
            self.engine.at(when, FAULT, lambda fault=fault: self.strike(fault))  # type: ignore[misc]

    def strike(self, fault: Fault) -> None:
        worker = self.workers.get(fault.worker)
        if fault.kind == "join":
            self.joins -= 1
            if worker is None:
                self.admit([fault.worker])
        elif worker is None:
            return
        elif fault.kind == "crash":
            self.lose(worker)
        elif fault.kind == "restart":
            self.lose(worker)
            self.joins += 1
            self.engine.at(self.engine.now + fault.for_s, FAULT, lambda: self.strike(Fault("join", fault.worker)))
        elif fault.kind == "leave":
            self.leave(worker)
        else:
            worker.pause(fault.for_s)

    # Evaluation.

    def consider_evaluation(self) -> None:
        """Evaluate when every shard has taken in as many gradients again as there are workers."""
        if self.consumed() >= self.evaluated_at + self.members.workers and not self.engine.stopped:
            self.evaluate()

    def consumed(self) -> int:
        """How many gradients every shard has taken in."""
        return min(server.consumed for server in self.servers)

    def updates(self) -> int:
        """How many steps the model that is evaluated has made."""
        return self.servers[0].updates

    def evaluate(self) -> None:
        self.evaluated_at = self.consumed()
        with torch.no_grad():
            torch._foreach_copy_(self.trained, self.layout.views(self.flat))
        measured = self.plan.workload.evaluate(self.module)
        point = Point(self.engine.now, self.updates(), measured["loss"], measured["accuracy"])
        self.history.append(point)
        if self.watch is not None:
            self.watch(point)
        target = self.plan.target
        diverged = point.loss is None or not math.isfinite(point.loss)
        if target is not None and target.reached(point):
            self.reached_s = self.engine.now
        if self.reached_s is not None or diverged:
            self.engine.stop()
