"""How fast the workers are: models that draw a slowdown factor for each iteration of each worker.

`compute_s` is the time of one undisturbed iteration; a model multiplies it by a factor drawn anew for each
iteration. Without it a live run slows each iteration down by the factor, whatever it takes. Draws come from a
generator seeded by (seed, worker), so the n-th iteration of a worker takes equally long in both runtimes.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from typing import ClassVar

import numpy as np

from paceline import user_code
from paceline.cluster.costs import Costs, MeasuredWorker, check
from paceline.cluster.faults_and_links import Edge, Fault, Link, Resize, check_fault, check_resize, check_workers
from paceline.cluster.trace_durations import Recording, fit_per_sample, iterations_in, mean_weight, production_job
from paceline.core.spec import Spec, option, parameter
from paceline.errors import ConfigError

BLOCK = 64
VIRTUAL_COMPUTE_S = 0.1
WORKER_STREAM = 1
PRODUCTION_JOBS = ("one-slow-rank", "uneven-sequences", "healthy")


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
    per_sample: float | None = parameter(
        None, low=0, high=1, doc="the part of compute_s that is in proportion to the batch; all of it if none is known"
    )
    detect_s: float = parameter(0.2, low=0, doc="seconds until the loss of a worker is noticed (virtual)")
    scheduler_s: float = parameter(
        0.0, low=0, doc="seconds the scheduler needs for a message, where a policy has one (virtual)"
    )
    machines: tuple[int, ...] | None = option(
        None, low=1, doc="peers on each machine, the first so many, the next so many, ... (virtual, policies of peers)"
    )
    machine_latency_s: float = option(0.0005, low=0, doc="seconds a message travels between machines")
    machine_bandwidth: float = option(
        1.25e9, low=1, doc="bytes a machine sends, and gets, per second to and from others"
    )
    faults: tuple[Fault, ...] = dataclasses.field(default=(), kw_only=True)
    resizes: tuple[Resize, ...] = dataclasses.field(default=(), kw_only=True)
    """The changes of the number of servers (live)."""
    links: tuple[Link, ...] = dataclasses.field(default=(), kw_only=True)
    """The connections of workers that are worse than the servers'."""
    edges: tuple[Edge, ...] = dataclasses.field(default=(), kw_only=True)
    """The connections between two peers that are worse than the others (virtual, policies of peers)."""
    also: tuple[Slowdown, ...] = dataclasses.field(default=(), kw_only=True)
    """Further slowdowns, whose factors are multiplied."""
    costs: Costs | None = dataclasses.field(default=None, kw_only=True)
    """What exchanges cost, and the cores they are paid with (virtual)."""
    measured: tuple[MeasuredWorker, ...] = dataclasses.field(default=(), kw_only=True)
    """The workers of the model `measured`."""
    source: str = dataclasses.field(default="", kw_only=True, compare=False, repr=False)
    """Where the scenario was read, in words, if it was in a file."""

    def factors(self, worker: int, workers: int, random: np.random.Generator) -> Iterator[float]:
        """Yields the slowdown factors of one worker, iteration after iteration."""
        while True:
            yield 1.0

    def undisturbed_s(self) -> float | None:
        """Returns the seconds of one undisturbed iteration, if the scenario knows them."""
        return self.compute_s

    def of_batch(self, batch: float) -> float:
        """Returns how many times as long an iteration takes on `batch` times the samples of an equal batch."""
        part = self.per_sample_part()
        return 1 - part + part * batch

    def per_sample_part(self) -> float:
        """Returns the part of an iteration on an equal batch that is in proportion to its samples."""
        return 1.0 if self.per_sample is None else self.per_sample

    def durations(self, worker: int, workers: int, seed: int) -> Callable[[], float]:
        """Returns a function that gives how long the worker's next iteration takes."""
        slowdown, known = self.slowdowns(worker, workers, seed), self.undisturbed_s()
        compute_s = VIRTUAL_COMPUTE_S if known is None else known
        return lambda: compute_s * slowdown()

    def slowdowns(self, worker: int, workers: int, seed: int) -> Callable[[], float]:
        """Returns a function that gives how many times slower the worker's next iteration is."""
        random = np.random.Generator(np.random.PCG64([seed, WORKER_STREAM, worker]))
        return self.with_others(self.factors(worker, workers, random), worker, workers, seed).__next__

    def with_others(self, factors: Iterator[float], worker: int, workers: int, seed: int) -> Iterator[float]:
        """Returns these factors times those of the further slowdowns."""
        for index, slowdown in enumerate(self.also, 1):
            random = np.random.Generator(np.random.PCG64([seed, WORKER_STREAM, worker, index]))
            factors = _product(factors, slowdown.factors(worker, workers, random))
        return factors

    def link(self, worker: int) -> Link | None:
        """Returns the connection of this worker, if it has one of its own. The last that names it counts."""
        return next((link for link in reversed(self.links) if worker in link.workers), None)

    def validate(self, workers: int) -> None:
        """Raises `ConfigError` if a fault, a link or a slowdown names a worker that cannot be."""
        for fault in self.faults:
            check_fault(fault, workers)
        for resize in self.resizes:
            check_resize(resize)
        for link in self.links:
            check_workers("link", link.workers, workers)
        for edge in self.edges:
            check_workers("edge", edge.between, workers)
        if self.machines is not None and sum(self.machines) != workers:
            placed = ":".join(map(str, self.machines))
            raise ConfigError(f"machines={placed} places {sum(self.machines)} peers, there are {workers}")
        if self.costs is not None:
            check(self.costs, "[costs]")
        for slowdown in self.also:
            slowdown.model.validate(workers)
            check_workers("slowdown", slowdown.workers or (), workers)


@dataclass(frozen=True)
class Slowdown:
    """A model that holds for some workers and some iterations only."""

    model: Cluster
    workers: tuple[int, ...] | None = None
    """The workers that it slows down; all if there are none."""
    from_iteration: int = 0
    until_iteration: int | None = None
    """The first iteration that is undisturbed again; never if None."""

    def factors(self, worker: int, workers: int, random: np.random.Generator) -> Iterator[float]:
        concerned = self.workers is None or worker in self.workers
        for iteration, factor in enumerate(self.model.factors(worker, workers, random)):
            over = self.until_iteration is not None and iteration >= self.until_iteration
            yield factor if concerned and iteration >= self.from_iteration and not over else 1.0


def _product(first: Iterator[float], second: Iterator[float]) -> Iterator[float]:
    for a, b in zip(first, second, strict=True):
        yield a * b


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
    """Each iteration of each worker is `factor` times slower with some probability (Hop, Luo et al. 2019, 7.3.1)."""

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


@dataclass(frozen=True)
class Bursts(Cluster):
    """Slow spells: now and then a worker becomes slow and stays so for a while (a noisy neighbour, a hot CPU)."""

    name: ClassVar[str] = "bursts"
    factor: float = parameter(4.0, low=0, doc="how many times slower an iteration of a slow spell is")
    probability: float = parameter(0.02, low=0, high=1, doc="of a spell beginning with an iteration")
    length: float = parameter(20.0, low=1, doc="iterations a spell takes, in the mean")

    def factors(self, worker: int, workers: int, random: np.random.Generator) -> Iterator[float]:
        slow = False
        while True:
            for draw in random.random(BLOCK).tolist():
                slow = draw >= 1 / self.length if slow else draw < self.probability
                yield self.factor if slow else 1.0


@dataclass(frozen=True)
class Recorded(Cluster):
    """Each iteration takes as long as one that was recorded, over and over: the base of such models."""

    def recording(self) -> Recording:
        raise NotImplementedError

    def factors(self, worker: int, workers: int, random: np.random.Generator) -> Iterator[float]:
        scaled, median = self._on_equal_batches(), self._median()
        yield from (seconds / median for seconds in cycle(scaled[worker % len(scaled)]))

    def undisturbed_s(self) -> float:
        """Returns the median of all recorded durations, or `compute_s`, to which all are then scaled."""
        return self._median() if self.compute_s is None else self.compute_s

    def per_sample_part(self) -> float:
        fitted = self.fitted if self.per_sample is None else None
        return super().per_sample_part() if fitted is None else fitted

    @cached_property
    def fitted(self) -> float | None:
        """The part that the recorded times say, if batches varied in them."""
        return fit_per_sample(self.recording())

    def _on_equal_batches(self) -> list[list[float]]:
        recording = self.recording()
        mean = mean_weight(recording)
        return [[seconds / self.of_batch(weight / mean) for seconds, weight in mine] for mine in recording]

    def _median(self) -> float:
        return statistics.median(seconds for mine in self._on_equal_batches() for seconds in mine)


@dataclass(frozen=True)
class Replay(Recorded):
    """Each iteration takes as long as it took in a run's trace, over and over."""

    name: ClassVar[str] = "replay"
    file: str | None = parameter(None, doc="a trace.jsonl, or the folder of a run that has one")

    def __post_init__(self) -> None:
        super().__post_init__()
        user_code.refuse_if_remote(self.file, "trace to replay")  # it is read when the run has begun

    def recording(self) -> Recording:
        return iterations_in(self.file)

    def validate(self, workers: int) -> None:
        super().validate(workers)
        self.recording()


@dataclass(frozen=True)
class Production(Recorded):
    """The step times of a production job, rank by rank, over and over."""

    name: ClassVar[str] = "production"
    job: str = option("one-slow-rank", choices=PRODUCTION_JOBS, doc="which job (docs/scenarios.md)")

    def recording(self) -> Recording:
        return production_job(self.job)
