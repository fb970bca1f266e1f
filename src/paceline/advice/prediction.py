"""How long a policy takes under a scenario: a run in virtual time, without gradients."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from paceline.cluster import Cluster
from paceline.core.actions import Apply
from paceline.core.messages import Members
from paceline.core.policy import PeerPolicy, Policy
from paceline.report.metrics import Metrics, measure
from paceline.runtime.virtual.backend import Backend
from paceline.runtime.virtual.engine import Engine
from paceline.runtime.virtual.peers import PeerSimulation
from paceline.runtime.virtual.simulation import Simulation
from paceline.runtime.virtual.world import SimulationPlan


class Counting(Backend):
    """Counts the gradients that are used, and their staleness; ends the run when there are enough."""

    def __init__(self, slice_bytes: tuple[int, ...], engine: Engine, enough: float = math.inf) -> None:
        super().__init__(slice_bytes)
        self.engine = engine
        self.enough = enough
        self.used = 0
        self.staleness: Counter[int] = Counter()

    def apply(self, rank: int, action: Apply) -> None:
        super().apply(rank, action)
        if rank == 0:  # on the other shards it is the same
            self.used += len(action.handles)
            for handle in action.handles:
                self.staleness[action.staleness(handle)] += 1
            if self.used >= self.enough:
                self.engine.stop()


class PeerCounting(Counting):
    """Counts the steps of all peers."""

    def apply(self, rank: int, action: Apply) -> None:
        self.used += 1
        if self.used >= self.enough:
            self.engine.stop()


@dataclass(frozen=True)
class Pace:
    """How fast a run goes: seconds for each gradient that is used, and how stale these are in updates, in the mean."""

    per_gradient_s: float
    staleness: float


@dataclass(frozen=True)
class Prediction:
    """One run in virtual time: how long it takes, and what its trace says if one was kept."""

    seconds: float
    metrics: Metrics | None


def slices(slice_bytes: tuple[int, ...], servers: int) -> tuple[int, ...]:
    """Returns the slices of the same model over another number of servers; peers have the whole."""
    whole, count = sum(slice_bytes), max(1, servers)
    if len(slice_bytes) == count:
        return slice_bytes
    return tuple(whole // count + (shard < whole % count) for shard in range(count))


def predict(
    policy: Policy,
    cluster: Cluster,
    members: Members,
    iterations: int,
    seed: int,
    slice_bytes: tuple[int, ...],
    traced: bool = False,
) -> Prediction:
    """Does a run of so many iterations of each worker in virtual time."""
    engine = Engine()
    members = _members(policy, members)
    plan = SimulationPlan(policy, cluster, members, iterations, seed, checked=traced, goodbyes=True)
    simulation = _simulation(policy)(plan, Backend(slices(slice_bytes, members.servers)), engine)
    simulation.run()
    return Prediction(engine.now, measure(simulation.trace, engine.now) if traced else None)


def pace(
    policy: Policy, cluster: Cluster, members: Members, gradients: int, seed: int, slice_bytes: tuple[int, ...]
) -> Pace:
    """Does a run until so many gradients are used: how fast it goes, whoever computes them."""
    engine = Engine()
    members = _members(policy, members)
    kind = Counting if members.servers else PeerCounting
    backend = kind(slices(slice_bytes, members.servers), engine, gradients)
    plan = SimulationPlan(policy, cluster, members, None, seed, goodbyes=True)
    _simulation(policy)(plan, backend, engine).run()
    counted = backend.staleness.total()
    stale = sum(value * count for value, count in backend.staleness.items())
    return Pace(engine.now / max(1, backend.used), stale / counted if counted else 0.0)


def _members(policy: Policy, members: Members) -> Members:
    return Members(members.workers, 0 if isinstance(policy, PeerPolicy) else max(1, members.servers))


def _simulation(policy: Policy) -> type[Simulation]:
    return PeerSimulation if isinstance(policy, PeerPolicy) else Simulation
