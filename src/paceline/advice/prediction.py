"""How long a policy takes under a scenario: a run in virtual time, without gradients."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cluster import Cluster
from paceline.core.messages import Members
from paceline.core.policy import PeerPolicy, Policy
from paceline.report.metrics import Metrics, measure
from paceline.runtime.virtual.backend import Backend
from paceline.runtime.virtual.engine import Engine
from paceline.runtime.virtual.peers import PeerSimulation
from paceline.runtime.virtual.simulation import Simulation
from paceline.runtime.virtual.world import SimulationPlan
from paceline.sample_order import Batch


@dataclass(frozen=True)
class Prediction:
    """One run in virtual time: how long it takes, and what its trace says if one was kept."""

    seconds: float
    gradients: int
    metrics: Metrics | None

    @property
    def per_gradient_s(self) -> float:
        """The seconds between two gradients of the run."""
        return self.seconds / max(1, self.gradients)


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
    batch: Batch = 1,
) -> Prediction:
    """Does the run in virtual time."""
    peers = isinstance(policy, PeerPolicy)
    members = Members(members.workers, 0 if peers else max(1, members.servers))
    plan = SimulationPlan(policy, cluster, members, iterations, seed, batch, checked=traced, goodbyes=True)
    engine = Engine()
    backend = Backend(slices(slice_bytes, members.servers))
    simulation = (PeerSimulation if peers else Simulation)(plan, backend, engine)
    simulation.run()
    metrics = measure(simulation.trace, engine.now) if traced else None
    gradients = metrics.gradients if metrics is not None else iterations * members.workers
    return Prediction(engine.now, gradients, metrics)
