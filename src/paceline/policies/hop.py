"""Hop: no server; each peer has parameters of its own and averages them with its neighbours' (Luo et al. 2019).

Sections, tables and equations below are those of that paper.

The rule. Peers sit on a graph. In each iteration a peer sends its parameters to its out-neighbours, computes a
gradient, averages what its in-neighbours sent with its own, and applies the gradient (`order=parallel`; with
`order=serial` it applies first and sends what came out: more exact, but the exchange cannot hide behind the computing;
3.2). It goes on from iteration k when

    standard        an update of k from every in-neighbour is there;
    backup=b        ... from all but b (4.3);
    staleness=s     ... the newest of each is of k-s or later (4.4), averaged by how new they are (eq. 2);
    both            ... of all but b;
    notify_ack      as standard, and its own update of k-1 has been averaged in by all out-neighbours (3.3).

`max_gap` bounds how far a peer runs ahead of those it sends to, by tokens (4.2); with backup it must be given,
for there nothing else bounds the gap. With `skip`, a peer that finds all its out-neighbours at least `trigger` ahead
jumps towards them, at most so many iterations at once (5). `core/hop_peer.py`.

What it promises. Nobody waits for the whole cluster: a slow peer is felt by its neighbours first, and reaches others
as far as gaps may grow. i is ahead of j by at most (Table 1; d(j->i) is the length of the shortest path)

    standard d(j->i), staleness (s+1) d(j->i), notify_ack min(d(j->i), 2 d(i->j)), and with tokens max_gap d(i->j).

On the complete graph, standard and serial, plain SGD is BSP.

What it gives up. Peers hold different parameters; what they agree on spreads at the pace of the graph's spectral gap
(`paceline graph NAME`). The model of a run is the average of the peers. Backup and staleness average with weights that
are not doubly stochastic, so those who are late count for less; with data that differ from peer to peer that is a bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from paceline import graphs
from paceline.core.hop_peer import HopPeer
from paceline.core.machine import Machine
from paceline.core.messages import Members
from paceline.core.policy import PeerPolicy
from paceline.core.spec import option, parameter
from paceline.core.topology import Topology, neighbours
from paceline.core.update_queue import HopRules
from paceline.errors import ConfigError

ORDERS = ("parallel", "serial")
WEIGHTS = ("balanced", "uniform")


@dataclass(frozen=True)
class Hop(PeerPolicy):
    """Peers on a graph, without a server: each averages its parameters with its neighbours'."""

    name: ClassVar[str] = "hop"
    paper: ClassVar[str] = "Luo et al. 2019 (Hop)"

    graph: str = parameter("ring-based", doc="who sends to whom: ring, ring-based, torus, ... or a file")
    backup: int = option(0, low=0, doc="how many in-neighbours need not be waited for; needs max_gap")
    staleness: int | None = option(None, low=0, doc="how many iterations old a neighbour's update may be")
    max_gap: int | None = option(None, low=1, doc="how far ahead of an out-neighbour a peer may be (tokens)")
    skip: int | None = option(None, low=2, doc="how many iterations a peer that is behind may jump at once")
    trigger: int | None = option(None, low=1, doc="how far behind all out-neighbours it jumps; 2 if it can be")
    notify_ack: bool = option(False, doc="also wait until out-neighbours have used the update before (NOTIFY-ACK)")
    order: str = option(
        "parallel", choices=ORDERS, doc="parallel: send, then compute; serial: compute, apply, then send"
    )
    weights: str = option(
        "balanced", choices=WEIGHTS, doc="balanced: doubly stochastic; uniform: 1/in-degree whatever comes of it"
    )
    machines: tuple[int, ...] | None = option(None, low=1, doc="peers on each machine, for hierarchical graphs")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "graph", graphs.check_name(self.graph, self.machines))
        if self.notify_ack and (self.backup or self.staleness is not None or self.max_gap is not None):
            raise ConfigError("hop:notify_ack bounds the gap by itself: it goes without backup, staleness and max_gap")
        if self.backup and self.max_gap is None:
            raise ConfigError("hop:backup needs max_gap: without tokens nothing bounds the gap between neighbours")
        if self.skip is None and self.trigger is not None:
            raise ConfigError("hop:trigger needs skip: how many iterations a peer may jump at once")
        if self.skip is not None:
            self._check_skip()

    def _check_skip(self) -> None:
        if self.max_gap is None or (not self.backup and self.staleness is None):
            raise ConfigError("hop:skip needs max_gap, and backup or staleness: others must do without what is skipped")
        if self.trigger is not None and self.trigger > self.longest_behind:
            bound = f"max_gap={self.max_gap}" if self.longest_behind == self.max_gap else f"staleness={self.staleness}"
            raise ConfigError(
                f"hop:trigger={self.trigger} never fires: with {bound} neighbours get at most "
                f"{self.longest_behind} ahead, so trigger may be from 1 to {self.longest_behind}"
            )

    @property
    def longest_behind(self) -> int:
        """Returns how far neighbours can get ahead of a peer, which is what may trigger a jump."""
        bounds = [self.max_gap] if self.max_gap is not None else []
        if self.staleness is not None and not self.backup:
            bounds.append(self.staleness + 1)
        return min(bounds, default=1)

    @property
    def rules(self) -> HopRules:
        trigger = min(2, self.longest_behind) if self.trigger is None else self.trigger
        serial = self.order == "serial"
        return HopRules(self.backup, self.staleness, self.max_gap, self.notify_ack, self.skip, trigger, serial)

    def topology(self, peers: int) -> Topology:
        return graphs.load(self.graph, peers, self.machines, self.weights == "uniform")

    def placed(self, machines: tuple[int, ...]) -> Hop:
        return replace(self, machines=machines) if graphs.lacks_placement(self.graph, self.machines) else self

    def validate(self, members: Members) -> None:
        graph = self.topology(members.workers)
        ins = neighbours(graph, frozenset(range(graph.size))).ins
        for peer, others in ins.items():
            if self.backup and self.backup >= len(others):
                raise ConfigError(
                    f"hop:backup={self.backup} leaves peer {peer} nobody to wait for: it has {len(others)} "
                    f"in-neighbours on {self.graph}, so backup may be from 0 to {max(0, len(others) - 1)}"
                )

    def most_ahead(self, there: int, back: int) -> float:
        if self.notify_ack:
            return min(back, 2 * there)
        freely = math.inf if self.backup else (1 if self.staleness is None else self.staleness + 1) * back
        return min(freely, self.max_gap * there) if self.max_gap is not None else freely

    def peer(self, rank: int, graph: Topology, seed: int) -> Machine:
        return HopPeer(rank, graph, self.rules)
