"""A training run in virtual time, from beginning to end."""

from __future__ import annotations

import logging

import torch

from paceline.core.policy import PeerPolicy
from paceline.policies.with_local_steps import text_of
from paceline.run import Run
from paceline.runtime.virtual.engine import Engine
from paceline.runtime.virtual.peers import PeerSimulation
from paceline.runtime.virtual.simulation import Simulation
from paceline.runtime.virtual.tensor_backends import PeerTensors, ServerTensors, TensorBackend, Training, Watcher
from paceline.runtime.virtual.world import SimulationPlan
from paceline.tensors.devices import deterministic

LOG = logging.getLogger(__name__)


def run_training(plan: SimulationPlan, training: Training, watch: Watcher | None = None) -> Run:
    """Simulates a run with real gradients."""
    peers = isinstance(plan.policy, PeerPolicy)
    return run_on((PeerTensors if peers else ServerTensors)(plan, training, Engine(), watch), plan)


def run_on(backend: TensorBackend, plan: SimulationPlan) -> Run:
    """Simulates a run with this backend, which must be new."""
    engine, training, layout = backend.engine, backend.training, backend.layout
    simulation = (PeerSimulation if isinstance(backend, PeerTensors) else Simulation)(plan, backend, engine)
    with deterministic(training.device) as uncertain:
        backend.evaluate()
        simulation.run()
        if backend.history[-1].time_s < engine.now and backend.reached_s is None:
            backend.evaluate()
    if uncertain:
        names = ", ".join(sorted(uncertain))
        LOG.warning("equal seeds need not give equal runs here: torch has no deterministic %s for a GPU", names)
    averages = [average.cpu() for average in backend.averages()]
    return Run(
        policy=text_of(str(plan.policy), plan.local),
        runtime=backend.name,
        history=backend.history,
        trace=simulation.trace,
        parameters=layout.named(backend.flat.cpu()),
        time_s=engine.now,
        target=training.target,
        time_to_target_s=backend.reached_s,
        others=backend.others(),
        average=layout.named(torch.stack(averages).mean(0)) if averages else {},
        layers=tuple(name for name, _ in layout.units()) if plan.by_layer else (),
        evaluated=backend.evaluated,
        consensus=backend.consensus,
    )
