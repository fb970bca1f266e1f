"""A scenario: how fast the workers are, how good the network is, and what goes wrong. It is data.

The same `Cluster`, from a text (`random-slowdown:factor=6`), a TOML file or a short name, gives the durations of a
virtual run and the sleeps injected into a live one.
"""

from paceline.cluster.faults_and_links import Edge, Fault, FaultKind, Link, Resize
from paceline.cluster.files import bundled, from_table, load, read, to_table
from paceline.cluster.models import CATALOGUE, Cluster, Slowdown

__all__ = [
    "CATALOGUE", "Cluster", "Edge", "Fault", "FaultKind", "Link", "Resize", "Slowdown", "bundled", "from_table", "load",
    "read", "to_table",
]  # fmt: skip
