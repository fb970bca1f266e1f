"""AD-PSGD: peers that average with one random neighbour at a time and never wait for an iteration (Lian et al. 2018).

The rule. While a peer computes, it exchanges parameters with one neighbour drawn at random, and both take the mean;
then it applies its gradient. Nobody looks at anybody's iteration. The asynchronous baseline of Hop (Luo et al. 2019,
2.3 and 5).

What it promises. The mean of all parameters changes by gradients alone. A slow peer slows nobody down: it answers
offers while it computes, and its gradient, of the parameters from before, is applied to what was averaged meanwhile.

What it gives up. Any bound on how far apart peers are. To be free of deadlock it wants a bipartite graph, where one
side offers and the other answers (ring with an even number of peers, torus with even sides); on others
everybody offers and those who are busy decline, so some iterations go without an average. Edges must go both ways.
`core/adpsgd_peer.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from paceline import graphs
from paceline.core.adpsgd_peer import ADPSGDPeer
from paceline.core.machine import Machine
from paceline.core.messages import Members
from paceline.core.policy import PeerPolicy
from paceline.core.spec import option, parameter
from paceline.core.topology import Topology, is_symmetric
from paceline.errors import ConfigError


@dataclass(frozen=True)
class ADPSGD(PeerPolicy):
    """Peers that average with one random neighbour at a time, without waiting for iterations."""

    name: ClassVar[str] = "adpsgd"
    paper: ClassVar[str] = "Lian et al. 2018, the asynchronous baseline of Luo et al. 2019"
    balances: ClassVar[bool] = False
    refuses_local_steps: ClassVar[str] = "a partner would get parameters in the middle of a round (hop has rounds)"

    graph: str = parameter("ring", doc="who may average with whom: ring, torus, complete, ... or a file")
    machines: tuple[int, ...] | None = option(None, low=1, doc="peers on each machine, for hierarchical graphs")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "graph", graphs.check_name(self.graph, self.machines))

    def topology(self, peers: int) -> Topology:
        return graphs.load(self.graph, peers, self.machines)

    def placed(self, machines: tuple[int, ...]) -> ADPSGD:
        return replace(self, machines=machines) if graphs.lacks_placement(self.graph, self.machines) else self

    def validate(self, members: Members) -> None:
        if not is_symmetric(self.topology(members.workers)):
            raise ConfigError(f"adpsgd:graph={self.graph} has edges that go one way: both ends take the mean, so name "
                              "a graph whose edges go both ways")  # fmt: skip

    def peer(self, rank: int, graph: Topology, seed: int) -> Machine:
        return ADPSGDPeer(rank, graph, seed)
