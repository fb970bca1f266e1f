"""What if: the same run with other workers, servers, lines, or speeds."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

import msgspec

from paceline.api import MOST_SERVERS
from paceline.cluster import Cluster, Slowdown
from paceline.cluster.models import OneSlow
from paceline.core.messages import Members
from paceline.counts import check_count
from paceline.errors import ConfigError

MOST_WORKERS = 10_000
LINK = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[kMG]?)bit(?:,(?P<ms>\d+(?:\.\d+)?)ms)?")
UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
SLOW = re.compile(r"(?P<worker>\d{1,6}):(?P<factor>\d+(?:\.\d+)?)x")


@dataclass(frozen=True)
class Situation:
    """A scenario with the members of a run on it, and the bytes of its servers' slices."""

    cluster: Cluster
    members: Members
    slice_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Changes:
    """What is to be different, as texts of a command line; None where nothing is."""

    workers: int | None = None
    without: int | None = None
    link: str | None = None
    servers: int | None = None
    slow: str | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) is not None for field in dataclasses.fields(self))

    def __str__(self) -> str:
        given = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return ", ".join(f"{name} {value}" for name, value in given if value is not None)

    def apply(self, known: Situation) -> Situation:
        """Returns the situation with all changes made."""
        changed = known
        if self.without is not None:
            changed = without(changed, self.without)
        if self.workers is not None:
            changed = with_workers(changed, self.workers)
        if self.servers is not None:
            check_count("servers", self.servers, most=MOST_SERVERS)
            changed = dataclasses.replace(changed, members=Members(changed.members.workers, self.servers))
        if self.link is not None:
            changed = dataclasses.replace(changed, cluster=with_link(changed.cluster, self.link))
        if self.slow is not None:
            changed = dataclasses.replace(changed, cluster=with_slow(changed.cluster, self.slow))
        changed.cluster.validate(changed.members.workers)
        return changed


def with_workers(known: Situation, workers: int) -> Situation:
    """Returns it with so many workers: those that were measured over and over, on as many cores each."""
    check_count("workers", workers, most=MOST_WORKERS)
    cluster, members = known.cluster, known.members
    if cluster.costs is not None and cluster.costs.cores is not None:
        cores = cluster.costs.cores * workers / members.workers
        cluster = dataclasses.replace(cluster, costs=msgspec.structs.replace(cluster.costs, cores=cores))
    return dataclasses.replace(known, cluster=cluster, members=Members(workers, members.servers))


def without(known: Situation, worker: int) -> Situation:
    """Returns it without a worker; the others stay as they are."""
    members, measured = known.members, known.cluster.measured
    if not 0 <= worker < members.workers or members.workers < 2:
        raise ConfigError(f"--without {worker}: workers are 0 to {members.workers - 1}, and one must be left")
    if not measured:
        raise ConfigError(f"--without {worker}: only of a run, or of what paceline calibrate wrote, workers are known")
    left = [measured[rank % len(measured)] for rank in range(members.workers) if rank != worker]
    cluster = dataclasses.replace(known.cluster, measured=tuple(left))
    return dataclasses.replace(known, cluster=cluster, members=Members(members.workers - 1, members.servers))


def with_link(cluster: Cluster, text: str) -> Cluster:
    """Returns it with another line to each server, as "1Gbit" or "100Mbit,2ms"."""
    found = LINK.fullmatch(text)
    if found is None or not float(found["number"]):
        raise ConfigError(f"--link {text} is no line: write 1Gbit, 100Mbit, or 100Mbit,2ms with its latency")
    bandwidth = float(found["number"]) * UNITS[found["unit"]] / 8
    latency_s = cluster.latency_s + (float(found["ms"]) / 1e3 if found["ms"] else 0.0)
    return dataclasses.replace(cluster, bandwidth=max(1.0, bandwidth), latency_s=latency_s)


def with_slow(cluster: Cluster, text: str) -> Cluster:
    """Returns it with one worker slower, as "2:3x"."""
    found = SLOW.fullmatch(text)
    if found is None:
        raise ConfigError(f"--slow {text} makes no sense: write 2:3x for a worker 2 that takes three times as long")
    worker, factor = int(found["worker"]), float(found["factor"])
    slower = Slowdown(OneSlow(factor=factor, worker=worker), (worker,))
    return dataclasses.replace(cluster, also=(*cluster.also, slower))
