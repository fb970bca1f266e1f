"""What the nodes of one simulation share: what is simulated, the clock, the wires' ends, and the trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.cluster import Cluster
from paceline.core.actions import Compute
from paceline.core.local_steps import LocalSteps
from paceline.core.machine import Machine
from paceline.core.messages import Members, Message, Node, View
from paceline.core.norm_reducer import REDUCER, NormReducer
from paceline.core.policy import Policy
from paceline.core.trace import Header, Record, Trace
from paceline.runtime.execution import MachineRunner
from paceline.runtime.virtual.backend import SLICE_BYTES, Backend
from paceline.runtime.virtual.batches import Batches
from paceline.runtime.virtual.engine import Engine
from paceline.runtime.virtual.local_rounds import RoundPlanning
from paceline.sample_order import Batch, BatchSizes

FEW = 32
"""Up to so many workers every machine checks its invariants after every event; above, the servers' do as often as costs
the same."""


@dataclass(frozen=True)
class SimulationPlan:
    """What to simulate: `iterations` of each worker, or as many as there is time for if none.

    With local steps those are what `iterations` counts; an iteration of the machines is a round of them.
    """

    policy: Policy
    cluster: Cluster
    members: Members
    iterations: int | None
    seed: int = 0
    batch: Batch | BatchSizes = 1
    """The samples of a gradient; only what is unequal matters to times."""
    by_layer: bool = False
    """Workers read and push layer by layer; a server for each layer."""
    checked: bool = False
    """Keep a trace, and check the invariants of the machines."""
    goodbyes: bool = False
    """Whether the others hear that a worker has done its iterations, as they do live. To tell everybody so of each of
    10 000 workers takes longer than the run. Where there is a scheduler, which might wait for it, they always hear."""
    local: LocalSteps | None = None
    """What workers do alone between exchanges, if they do."""


class Work(Protocol):
    """What a worker's time goes to where cores are shared (`host_work.py`)."""

    def compute(self, worker: Any, duration: float, action: Compute) -> None: ...

    def exchange(self, callback: Callable[[Compute], None], action: Compute) -> None: ...


@dataclass
class World:
    """What every node of a simulation is given."""

    plan: SimulationPlan
    backend: Backend
    engine: Engine
    receivers: dict[Node, Callable[[Message], None]] = field(default_factory=dict)
    """Who takes messages, by address."""
    shards: list[Machine] = field(default_factory=list)
    planning: RoundPlanning | None = None
    """Whoever plans rounds of local steps, if they are planned."""
    work: Work | None = None
    """What needs cores, if the scenario says what exchanges cost."""

    def __post_init__(self) -> None:
        plan, backend = self.plan, self.backend
        self.batches = Batches(plan.batch, plan.policy, plan.checked)
        # Peers hold the whole vector each: as if there were one server.
        self.slice_bytes = backend.slice_bytes or (SLICE_BYTES,) * max(1, plan.members.servers)
        self.trace = Trace(
            Header(
                backend.name,
                str(plan.policy),
                plan.members,
                plan.seed,
                self.slice_bytes,
                backend.clips_mean,
                str(plan.local or ""),
            )
        )

    def announce(self, view: View) -> None:
        """Tells those who balance batches and plan rounds who takes part from now on."""
        self.batches.announce(self.engine.now, view)
        if self.planning is not None:
            self.planning.announce(view)

    def runner(self, node: Node, executor: object, incarnation: int = 0) -> MachineRunner:
        """Makes a node's machine: told events, its runner has the executor do what the machine orders."""
        plan = self.plan
        if node == REDUCER:
            return MachineRunner(node, 0, NormReducer(plan.members.servers), executor, None)
        machine = plan.policy.machine(node.role, node.rank, plan.members, plan.seed)
        machine.checks = plan.checked and plan.members.workers <= FEW
        if node.role == "server":
            self.shards.append(machine)
        return MachineRunner(node, incarnation, machine, executor, self.record if plan.checked else None)

    def record(self, record: Record) -> None:
        records, workers = self.trace.records, self.plan.members.workers
        records.append(record)
        if workers > FEW and len(records) % workers == 0:
            for shard in self.shards:
                shard.check()
