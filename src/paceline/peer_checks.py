"""What a run without servers (hop, adpsgd) cannot have, and what it should warn of: checked before it starts.

A live run whose policy is the script's own learns it late; then the driver checks it (`runtime/live/driver/peers.py`).
"""

from __future__ import annotations

from paceline.cluster import Cluster
from paceline.core.messages import Members
from paceline.core.policy import PeerPolicy, Policy
from paceline.core.topology import EXACT, neighbours, unevenness
from paceline.errors import ConfigError
from paceline.tensors import wire_precision
from paceline.tensors.layout import EPS
from paceline.tensors.wire_codecs import CODECS, HalfCodec


def refuse_servers(policy: Policy, servers: int | None, slicing: str) -> None:
    """Refuses a number of servers, or a way to cut parameters for them, under a policy without servers."""
    if servers is not None:
        raise ConfigError(f"servers={servers}: {policy} has no servers, leave it out")
    if slicing != EPS:
        raise ConfigError(f"slicing={slicing}: {policy} has no servers to cut the parameters for")


def check_wire(policy: Policy, wire: str) -> None:
    """Refuses a code in which whole parameters, which peers send each other, would be too coarse."""
    if not isinstance(wire_precision.codec_of(wire), HalfCodec | None):
        halves = " or ".join(name for name, kind in CODECS.items() if issubclass(kind, HalfCodec))
        raise ConfigError(f"--wire {wire}: under {policy} workers send each other whole parameters, use {halves}")


def check_places(cluster: Cluster, members: Members) -> None:
    """Refuses a worker that joins without a place on the graph."""
    for fault in cluster.faults:
        if fault.kind == "join" and fault.worker >= members.workers:
            raise ConfigError(f"join of worker {fault.worker}: the graph has places 0 to {members.workers - 1}")


def check_live_scenario(policy: Policy, cluster: Cluster | None, members: Members) -> None:
    """Refuses what a scenario has and live peers cannot do."""
    if cluster is None:
        return
    check_places(cluster, members)
    if cluster.machines or cluster.edges:
        raise ConfigError("machines and [[edge]] are for virtual time: live peers share one machine")
    if cluster.resizes:
        raise ConfigError(f"[[servers]] in the scenario: {policy} has no servers")


def warning_of(policy: PeerPolicy, peers: int) -> str:
    """Returns a warning about averages whose weights are not doubly stochastic, or nothing."""
    graph = policy.topology(peers)
    weights = neighbours(graph, frozenset(range(graph.size))).weights
    if not graph.uniform or unevenness(weights) <= EXACT:
        return ""
    totals = [sum(row.get(peer, 0.0) for row in weights.values()) for peer in weights]
    return (
        f"{policy}: weights are not doubly stochastic, peers count for {min(totals):.2f} to "
        f"{max(totals):.2f} of their share in each average"
    )
