"""A scenario: how fast the workers are, how good the network is, and what goes wrong. It is data.

The same `Cluster`, from a text (`random-slowdown:factor=6`) or a TOML file, gives the durations of a virtual
run and the sleeps injected into a live one. `compute_s` is the time of one undisturbed iteration; a model
multiplies it by a factor drawn anew for each iteration. Without it a live run slows each iteration down by the
factor, whatever it takes. Draws come from a generator seeded by (seed, worker),
so the n-th iteration of a worker takes equally long in both runtimes.

    model = "random-slowdown"        # TOML: the same parameters as in the text form, and faults
    factor = 6
    compute_s = 0.02

    [[fault]]
    kind = "crash"                   # crash, leave, join, pause (for_s)
    worker = 2
    at_s = 3.0                       # or at_iteration = 40
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

import msgspec
import numpy as np

from paceline.core import spec
from paceline.core.spec import Spec, parameter
from paceline.errors import ConfigError

BLOCK = 64
MOST_WORKERS = 100_000
VIRTUAL_COMPUTE_S = 0.1
WORKER_STREAM = 1
FaultKind = Literal["crash", "leave", "join", "pause"]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that happens to a worker, at a time or when it starts an iteration."""

    kind: FaultKind
    worker: int
    at_s: float | None = None
    at_iteration: int | None = None
    for_s: float = 0.0


@dataclass(frozen=True)
class Cluster(Spec):
    """Everybody equally fast, on a good network: the base of all scenarios."""

    name: ClassVar[str] = "steady"
    kind: ClassVar[str] = "cluster"

    compute_s: float | None = parameter(
        None, low=0, doc="seconds one undisturbed iteration takes; if none, 0.1 in virtual time, live its own time"
    )
    latency_s: float = parameter(0.0005, low=0, doc="seconds a message travels (virtual)")
    bandwidth: float = parameter(1.25e9, low=1, doc="bytes a server moves per second and direction (virtual)")
    detect_s: float = parameter(0.2, low=0, doc="seconds until the loss of a worker is noticed (virtual)")
    faults: tuple[Fault, ...] = dataclasses.field(default=(), kw_only=True)

    def factors(self, worker: int, workers: int, random: np.random.Generator) -> Iterator[float]:
        """The slowdown factors of one worker, iteration after iteration."""
        while True:
            yield 1.0

    def durations(self, worker: int, workers: int, seed: int) -> Callable[[], float]:
        """A function that gives how long the worker's next iteration takes."""
        slowdown = self.slowdowns(worker, workers, seed)
        compute_s = VIRTUAL_COMPUTE_S if self.compute_s is None else self.compute_s
        return lambda: compute_s * slowdown()

    def slowdowns(self, worker: int, workers: int, seed: int) -> Callable[[], float]:
        """A function that gives how many times slower the worker's next iteration is."""
        random = np.random.Generator(np.random.PCG64([seed, WORKER_STREAM, worker]))
        return self.factors(worker, workers, random).__next__

    def validate(self, workers: int) -> None:
        """Raise `ConfigError` if a fault names a worker that cannot be."""
        for fault in self.faults:
            if (fault.at_s is None) == (fault.at_iteration is None):
                raise ConfigError(f"{fault.kind} of worker {fault.worker} needs either at_s or at_iteration")
            if fault.kind == "join" and fault.at_s is None:
                raise ConfigError(f"join of worker {fault.worker} needs at_s: it has no iteration yet")
            most = MOST_WORKERS if fault.kind == "join" else workers
            if not 0 <= fault.worker < most:
                raise ConfigError(f"{fault.kind} of worker {fault.worker}: workers are 0 to {most - 1}")
            for name in ("at_s", "at_iteration", "for_s"):
                value = getattr(fault, name)
                if value is not None and not 0 <= value < math.inf:
                    raise ConfigError(
                        f"{fault.kind} of worker {fault.worker}: {name}={value} is out of range: 0 or more"
                    )


@dataclass(frozen=True)
class Factors(Cluster):
    """Constant factors: worker w takes factors[w] times as long, always."""

    name: ClassVar[str] = "factors"
    by_worker: tuple[float, ...] = parameter(
        (1.0,), low=0, doc="a factor for each worker, as 1:1:4; repeated when there are more workers"
    )

    def factors(self, worker: int, workers: int, random: np.random.Generator) -> Iterator[float]:
        while True:
            yield self.by_worker[worker % len(self.by_worker)]


@dataclass(frozen=True)
class OneSlow(Cluster):
    """One worker slower than the others, for good."""

    name: ClassVar[str] = "one-slow"
    factor: float = parameter(4.0, low=0, doc="how many times slower it is")
    worker: int = parameter(0, low=0, doc="which one")

    def factors(self, worker: int, workers: int, random: np.random.Generator) -> Iterator[float]:
        while True:
            yield self.factor if worker == self.worker else 1.0

    def validate(self, workers: int) -> None:
        super().validate(workers)
        if self.worker >= workers:
            raise ConfigError(f"one-slow:worker={self.worker}: workers are 0 to {workers - 1}")


@dataclass(frozen=True)
class RandomSlowdown(Cluster):
    """Each iteration of each worker is `factor` times slower with some probability (Hop, 003, 7.3.1)."""

    name: ClassVar[str] = "random-slowdown"
    factor: float = parameter(6.0, low=0, doc="how many times slower a slow iteration is")
    probability: float | None = parameter(None, low=0, high=1, doc="of an iteration being slow; 1/workers if none")

    def factors(self, worker: int, workers: int, random: np.random.Generator) -> Iterator[float]:
        probability = 1.0 / workers if self.probability is None else self.probability
        while True:
            for draw in random.random(BLOCK).tolist():
                yield self.factor if draw < probability else 1.0


@dataclass(frozen=True)
class LogNormal(Cluster):
    """Log-normal iteration times with median 1."""

    name: ClassVar[str] = "lognormal"
    sigma: float = parameter(0.5, low=0, doc="standard deviation of the logarithm")

    def factors(self, worker: int, workers: int, random: np.random.Generator) -> Iterator[float]:
        while True:
            yield from np.exp(self.sigma * random.standard_normal(BLOCK)).tolist()


@dataclass(frozen=True)
class Pareto(Cluster):
    """Heavy tails: P(factor > x) = x ** -shape for x >= 1."""

    name: ClassVar[str] = "pareto"
    shape: float = parameter(2.0, low=0.1, doc="the smaller, the heavier the tail")

    def factors(self, worker: int, workers: int, random: np.random.Generator) -> Iterator[float]:
        while True:
            yield from (1.0 + random.pareto(self.shape, BLOCK)).tolist()


CATALOGUE: dict[str, type[Cluster]] = {
    cluster.name: cluster for cluster in (Cluster, Factors, OneSlow, RandomSlowdown, LogNormal, Pareto)
}


def load(cluster: str | Cluster) -> Cluster:
    """A cluster from its text form or from a TOML file; a cluster object is returned as it is."""
    if isinstance(cluster, Cluster):
        return cluster
    if not isinstance(cluster, str):
        raise ConfigError(f"a cluster is a text like 'one-slow:factor=4', a .toml file or a Cluster, got {cluster!r}")
    if cluster.endswith(".toml"):
        return read(Path(cluster))
    return spec.parse(cluster, CATALOGUE, "cluster")


def read(path: Path) -> Cluster:
    """A cluster from a TOML file."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the scenario {str(path)!r}: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the scenario {str(path)!r} is not TOML: {error}") from None
    name = table.pop("model", "steady")
    try:
        faults = msgspec.convert(table.pop("fault", []), tuple[Fault, ...])
    except msgspec.ValidationError as error:
        kinds = ", ".join(get_args(FaultKind))
        raise ConfigError(f"a [[fault]] in {str(path)!r} is wrong: {error} (kinds: {kinds})") from None
    texts = {key: _as_text(value) for key, value in table.items()}
    try:
        if not isinstance(name, str) or name not in CATALOGUE:
            raise ConfigError(f"unknown cluster {name!r} (known: {', '.join(CATALOGUE)})")
        return dataclasses.replace(spec.build(CATALOGUE[name], texts), faults=faults)
    except ConfigError as error:
        raise ConfigError(f"the scenario {str(path)!r}: {error}") from None


def _as_text(value: object) -> str:
    if isinstance(value, list):
        return ":".join(_as_text(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
