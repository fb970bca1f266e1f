"""A scenario: how fast the workers are, how good the network is, and what goes wrong. It is data.

The same `Cluster`, from a text (`random-slowdown:factor=6`), a TOML file or a short name, gives the durations of a
virtual run and the sleeps injected into a live one.
"""

from paceline.cluster.costs import Costs, MeasuredWorker
from paceline.cluster.faults_and_links import Edge, Fault, FaultKind, Link, Resize
from paceline.cluster.files import bundled, from_table, load, read, to_table
from paceline.cluster.measured import Measured
from paceline.cluster.model_catalogue import CATALOGUE
from paceline.cluster.models import Cluster, Slowdown

__all__ = [
    "CATALOGUE", "Cluster", "Costs", "Edge", "Fault", "FaultKind", "Link", "Measured", "MeasuredWorker", "Resize",
    "Slowdown", "bundled", "from_table", "load", "read", "to_table",
]  # fmt: skip
