"""How a peer begins: it describes its model, makes its machine, and takes the first parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from safetensors.torch import load_file

from paceline.core.adpsgd_peer import ADPSGDPeer
from paceline.core.hop_peer import HopPeer
from paceline.core.policy import PeerPolicy, Policy
from paceline.errors import ConfigError, PacelineError, printable
from paceline.runtime.live.peer.neighbours import Neighbours
from paceline.runtime.live.peer.peer import LivePeer
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.protocol.configuration import LiveConfig
from paceline.runtime.live.protocol.driver_texts import policy_of
from paceline.runtime.live.storage import shared_memory
from paceline.runtime.live.trainer.device_report import PEERS_ON_DEVICES, DeviceReport, probe_name
from paceline.runtime.live.trainer.model_description import ModelDescription
from paceline.runtime.live.trainer.run_connection import RunConnection
from paceline.runtime.live.trainer.startup import introduce
from paceline.tensors import state


def is_for_peers(config: LiveConfig, policy: Policy | None) -> bool:
    """Returns whether the policy in force, the run's or else the script's, has no servers."""
    return isinstance(policy_of(config.policy, config, policy) if config.policy is not None else policy, PeerPolicy)


def begin_peer(
    run: RunConnection,
    model: ModelDescription,
    policy: Policy | None,
    overlap: bool,
    inner: torch.optim.Optimizer,
    step: Callable[[], None],
) -> tuple[LivePeer, wire.Begin]:
    """Returns a peer whose model holds the first parameters, and how the run begins, or goes on, with it."""
    refuse_options(model, overlap)
    neighbours = Neighbours(run.folder, (run.rank, run.incarnation), model.layout, run.config, run.waiter)
    probe = run.folder / probe_name(run.rank, run.incarnation)
    report = DeviceReport(model.tensors, probe, wanted=run.config.servers_on != "cpu")
    begin = introduce(run, model, policy, report, neighbours.endpoint)
    if (run.folder / PEERS_ON_DEVICES).exists():
        if report.device is None:
            raise PacelineError(f"the peers of this run have their parameters on GPUs: {report.problem or 'not here'}")
        neighbours.slot_pool.device, neighbours.slot_pool.segments = report.device, report.segments
    chosen = policy_of(begin.policy, run.config, policy)
    if not isinstance(chosen, PeerPolicy) or begin.graph is None:
        raise PacelineError(f"the driver names a policy for this peer that is none: {printable(begin.policy)}")
    machine = chosen.peer(run.rank, begin.graph, run.config.seed)
    assert isinstance(machine, HopPeer | ADPSGDPeer)
    peer = LivePeer(run, model, neighbours, begin, machine, inner, step)
    if begin.view.number == 1:
        peer.parameters.slot.values.copy_(shared_memory.attach(run.folder / shared_memory.WHOLE, model.layout))
        take_first_state(run, model, inner)
    peer.begin(begin.view, begin.endpoints)
    return peer, begin


def refuse_options(model: ModelDescription, overlap: bool) -> None:
    """Refuses, in one line, what only servers can do."""
    if overlap:
        raise ConfigError("overlap=True sends gradients to servers while backward runs: this policy has no servers")
    if model.rounded:
        raise ConfigError("parameters in bfloat16 or float16 need servers, and this policy has none: use float32")
    if model.optimizer.extras.ema is not None:
        raise ConfigError("ema is a moving average that servers keep: this policy has no servers")


def take_first_state(run: RunConnection, model: ModelDescription, inner: torch.optim.Optimizer) -> None:
    """Has the optimizer start with what worker 0's has learned, or a checkpoint's."""
    learned = run.folder / shared_memory.INITIAL_STATE
    if not learned.exists():
        return
    for tensor, each in zip(model.tensors, state.to_torch(load_file(learned), model.layout), strict=True):
        if each:  # counts of steps stay on the CPU, where torch keeps them
            inner.state[tensor] = {
                name: value.to(tensor.device) if value.dim() else value for name, value in each.items()
            }
