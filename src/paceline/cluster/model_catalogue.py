"""All models of who is slow, by name."""

from __future__ import annotations

from paceline.cluster.measured import Measured
from paceline.cluster.models import (
    Bursts,
    Cluster,
    Factors,
    LogNormal,
    OneSlow,
    Pareto,
    Production,
    RandomSlowdown,
    Replay,
)

CATALOGUE: dict[str, type[Cluster]] = {
    cluster.name: cluster
    for cluster in (Cluster, Factors, OneSlow, RandomSlowdown, LogNormal, Pareto, Bursts, Replay, Production, Measured)
}
