"""What connects peers on the simulated clock: own connections, the machines' network cards, single slow edges.

A transfer holds every wire it passes, for as long as the slowest of them needs: the sender's way out, its machine's if
the receiver sits on another one, the edge's own if it has one, the receiver's machine's, the receiver's way in. So
peers on one machine queue up at its card, and a graph with few edges between machines shows. Messages from one peer to
another keep their order.
"""

from __future__ import annotations

from paceline.cluster import Cluster
from paceline.runtime.virtual.engine import Wire


class Network:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.wires: dict[tuple[str, int, int], Wire] = {}
        """(kind, whose, to whom) -> the wire, made when it is first used."""
        self.paths: dict[tuple[int, int], tuple[list[Wire], float]] = {}
        sizes = cluster.machines or ()
        self.machine_of = {
            peer: at for at, size in enumerate(sizes) for peer in range(sum(sizes[:at]), sum(sizes[: at + 1]))
        }

    def arrival(self, now: float, sender: int, receiver: int, nbytes: int) -> float:
        """Returns when something of `nbytes` sent now has arrived whole; the wires are busy until it has passed."""
        path, latency_s = self.path(sender, receiver)
        start = max(now, *(wire.free_at for wire in path))
        slowest = max(wire.seconds_per_byte for wire in path)
        for wire in path:
            wire.free_at = start + nbytes * slowest
        return start + nbytes * slowest + latency_s

    def path(self, sender: int, receiver: int) -> tuple[list[Wire], float]:
        if (sender, receiver) not in self.paths:
            self.paths[sender, receiver] = self.lay(sender, receiver)
        return self.paths[sender, receiver]

    def lay(self, sender: int, receiver: int) -> tuple[list[Wire], float]:
        """Returns the wires between two peers, and how long a message travels besides."""
        cluster = self.cluster
        path, latency_s = [], 0.0
        for kind, peer in (("out", sender), ("in", receiver)):
            link = cluster.link(peer)
            bandwidth = cluster.bandwidth if link is None else min(cluster.bandwidth, link.bandwidth)
            path.append(self.wire(kind, peer, 0, bandwidth))
            latency_s += 0.0 if link is None else link.latency_s
        here, there = self.machine_of.get(sender, 0), self.machine_of.get(receiver, 0)
        if here != there:
            path.append(self.wire("machine out", here, 0, cluster.machine_bandwidth))
            path.append(self.wire("machine in", there, 0, cluster.machine_bandwidth))
        latency_s += cluster.latency_s if here == there else cluster.machine_latency_s
        for edge in cluster.edges:
            if set(edge.between) == {sender, receiver}:
                path.append(self.wire("edge", sender, receiver, edge.bandwidth))
                latency_s += edge.latency_s
        return path, latency_s

    def wire(self, kind: str, whose: int, to: int, bandwidth: float) -> Wire:
        key = (kind, whose, to)
        if key not in self.wires:
            self.wires[key] = Wire(0.0, bandwidth)
        return self.wires[key]
