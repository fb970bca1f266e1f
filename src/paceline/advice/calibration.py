"""A scenario from a live run: computing as it was, the cores it shared, and what the exchange cost.

Processor times are measured directly, a server's by least squares over its turns. What no clock of a process sees is
how long a message takes until its receiver runs: it is found by doing the run again in virtual time, with the very
durations it had, so that it takes as long as it took. If it takes longer even with no latency at all, the computations
are scaled down.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline import policies
from paceline.advice.measurements import Measurements, measure_run
from paceline.advice.prediction import predict
from paceline.cluster import Cluster, Costs, Measured, MeasuredWorker
from paceline.cluster.models import Recorded
from paceline.cluster.trace_durations import Recording, fit_per_sample, mean_weight
from paceline.core.messages import Members
from paceline.run import Run

FIXED_S = {"message": 60e-6, "step": 150e-6, "answer": 60e-6}
"""What of a server's time does not grow with the bytes, at most: what it is with small models."""
ANSWER = {"memory": 0.5, "tcp": 1.0}
"""What an answer costs beside a push: which of a turn's time is answers' and which is the step's cannot be told under
bsp, where all workers are answered after each step."""
BANDWIDTH = {"memory": 1e11, "tcp": 1.25e9}
"""Bytes a second beyond what processor times already have: none in shared memory, a network card's over TCP."""
MOST_LATENCY_S = 0.1
CROWDED = 0.5
"""Where processes share cores: the part of what is fitted that is taken for processor time, not for a delay. Whoever
shares a core finds the caches full of something else."""
ROUNDS = 12
"""Halvings of the interval in which the latency is."""
PARTS = 40
"""Equally likely parts of a spread, at most."""
TREND_PARTS, LEAST_OF_TREND, TREND = 8, 25, 1.15
CERTAIN = 6
"""A trend has at most so many parts of at least so many iterations, and is one if their means differ by this
factor, and by so many standard errors of theirs: spells are none."""


@dataclass(frozen=True)
class Recall(Recorded):
    """The durations of a measured run, in the order in which they came."""

    name: ClassVar[str] = "recall"
    times: Recording = field(default=(), kw_only=True)

    def recording(self) -> Recording:
        return self.times


@dataclass(frozen=True)
class Calibration:
    """What was found out from one run."""

    measured: Measurements
    cluster: Cluster
    """The scenario."""
    recall: Recall
    """The same with the durations of the run itself."""
    fitted_s: float
    """How long an iteration of the run takes in virtual time after fitting; `measured.iteration_s` is the aim."""
    before_s: float
    """The same with no latency."""

    @property
    def members(self) -> Members:
        return Members(self.measured.workers, self.measured.servers)

    @property
    def batch(self) -> float:
        """What an equal batch weighs."""
        return mean_weight(self.measured.durations)


def calibrate(run: Run, name: str, planned: Cluster | None = None) -> Calibration:
    """Makes a scenario of a run; `name` is what an error calls it.

    If the scenario that set the run's pace is `planned`, latencies are such that this explains the run: they have then,
    too, what sleeping takes too long.
    """
    measured = measure_run(run, name)
    costs, bandwidth = costs_of(measured), BANDWIDTH[measured.transport]
    recall = Recall(times=measured.durations, costs=costs, latency_s=0.0, bandwidth=bandwidth)
    if planned is not None:
        same = dataclasses.replace(planned, costs=costs, latency_s=0.0, bandwidth=bandwidth)
        same, before_s, fitted_s = fit_latency(same, measured)
        recall = dataclasses.replace(recall, latency_s=same.latency_s, costs=same.costs)
    else:
        recall, before_s, fitted_s = fit_latency(recall, measured)
    cluster = Measured(
        latency_s=recall.latency_s,
        bandwidth=bandwidth,
        per_sample=fit_per_sample(measured.durations),
        costs=recall.costs,
        measured=tuple(describe_workers(recall)),
    )
    return Calibration(measured, cluster, recall, fitted_s, before_s)


def costs_of(measured: Measurements) -> Costs:
    """Returns what an exchange costs on processors."""
    seconds, pushes, steps, gradients, answers = measured.turns.T
    beside = ANSWER[measured.transport]
    message_s, step_s = nonnegative_least_squares(np.stack([pushes + beside * answers, steps], axis=1), seconds)
    nbytes = max(measured.slice_bytes)
    fixed = {name: min(found, FIXED_S[name]) for name, found in
             (("message", message_s), ("step", step_s), ("answer", beside * message_s))}  # fmt: skip
    passes = 2 + float(gradients.sum() / max(1.0, steps.sum()))
    return Costs(
        cores=measured.cores,
        worker_s=measured.worker_s,
        message_s=fixed["message"],
        message_byte_s=(message_s - fixed["message"]) / nbytes,
        step_s=fixed["step"],
        step_byte_s=(step_s - fixed["step"]) / (nbytes * passes),
        answer_s=fixed["answer"],
        answer_byte_s=(beside * message_s - fixed["answer"]) / nbytes,
        cpu_share=measured.cpu_share,
        cpu_s=measured.paced_cpu_s,
        first_s=measured.first_s,
        startup_s=measured.startup_s,
    )


def nonnegative_least_squares(counts: NDArray[np.float64], seconds: NDArray[np.float64]) -> list[float]:
    """Returns what one of each costs, by least squares; what would be negative costs nothing."""
    used = [column for column in range(counts.shape[1]) if counts[:, column].any()]
    while used:
        found, *_ = np.linalg.lstsq(counts[:, used], seconds, rcond=None)
        if (found >= 0).all():
            return [float(found[used.index(column)]) if column in used else 0.0 for column in range(counts.shape[1])]
        used.remove(used[int(np.argmin(found))])
    return [0.0] * counts.shape[1]


C = TypeVar("C", bound=Cluster)


def fit_latency(recall: C, measured: Measurements) -> tuple[C, float, float]:
    """Finds the latency with which the run takes as long as it took; returns the iteration before and after, too."""
    policy = policies.parse(measured.policy)
    members = Members(measured.workers, measured.servers)

    def iteration_s(cluster: Cluster) -> float:
        iterations = measured.iterations
        run = predict(policy, warm(cluster), members, iterations, 0, measured.slice_bytes)
        return run.seconds / iterations

    before_s = iteration_s(recall)
    if before_s >= measured.iteration_s and not isinstance(recall, Recall):
        return recall, before_s, before_s
    if before_s >= measured.iteration_s:
        assert isinstance(recall, Recall)
        pace = measured.iteration_s / before_s
        scaled = tuple(tuple(each._replace(seconds=each.seconds * pace) for each in mine) for mine in recall.times)
        recall = dataclasses.replace(recall, times=scaled)
        return recall, before_s, iteration_s(recall)
    low, high = 0.0, MOST_LATENCY_S
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        longer = iteration_s(delayed(recall, middle, measured)) > measured.iteration_s
        low, high = (low, middle) if longer else (middle, high)
    recall = delayed(recall, (low + high) / 2, measured)
    return recall, before_s, iteration_s(recall)


def delayed(cluster: C, seconds: float, measured: Measurements) -> C:
    """Returns the scenario with so many seconds more each way, `CROWDED` of them as processor time of the worker where
    processes have to share cores."""
    assert cluster.costs is not None
    if measured.cores is None or measured.cores >= measured.processes:
        return dataclasses.replace(cluster, latency_s=seconds)
    crowding = measured.workers / measured.cores
    worker_s = measured.worker_s + 2 * CROWDED * seconds / max(1.0, crowding)
    costs = msgspec.structs.replace(cluster.costs, worker_s=worker_s)
    return dataclasses.replace(cluster, costs=costs, latency_s=(1 - CROWDED) * seconds)


def warm(cluster: Cluster) -> Cluster:
    """Returns the scenario without what first iterations need besides."""
    assert cluster.costs is not None
    return dataclasses.replace(cluster, costs=msgspec.structs.replace(cluster.costs, first_s=0.0))


# The model of computing.


def describe_workers(recall: Recall) -> list[MeasuredWorker]:
    """Returns a model of each worker's durations on equal batches."""
    mean = mean_weight(recall.times)
    columns = [np.array([each.seconds / recall.of_batch(each.weight / mean) for each in mine]) for mine in recall.times]
    trends = [trend_of(column) for column in columns]
    level = [column / follow(trend, len(column)) for column, trend in zip(columns, trends, strict=True)]
    scores = [normal_scores(column) for column in level]
    memory, common = memory_of(scores), common_part(scores)
    return [
        MeasuredWorker(
            compute_s=float(column.mean()),
            spread=spread_of(column),
            memory=memory,
            common=common,
            trend=tuple(trend),
            trend_iterations=max(1, -(-len(column) // len(trend))),
        )
        for column, trend in zip(level, trends, strict=True)
    ]


def spread_of(column: NDArray[np.float64]) -> tuple[float, ...]:
    """Returns the means of equally large parts of the sorted durations, as parts of their mean: these multiply to it.

    Parts that differ in size by one are close enough.
    """
    parts = np.array_split(np.sort(column), min(PARTS, max(1, len(column) // 5)))
    means = np.array([part.mean() for part in parts])
    return tuple((means / means.mean()).tolist())


def trend_of(column: NDArray[np.float64]) -> list[float]:
    """Returns the factors by which parts of the run were slower than the whole, or (1,) if none was for certain."""
    count = min(TREND_PARTS, len(column) // LEAST_OF_TREND)
    if count < 2:
        return [1.0]
    length = -(-len(column) // count)
    parts = [column[start : start + length] for start in range(0, len(column), length)]
    means = np.array([float(part.mean()) for part in parts])
    alike = min(0.98, max(0.0, float(np.mean([correlation(part[:-1], part[1:]) for part in parts]))))
    spells = ((1 + alike) / (1 - alike)) ** 0.5
    noise = max(float(part.std()) / len(part) ** 0.5 for part in parts) * spells
    if means.min() <= 0 or means.max() < TREND * means.min() or np.ptp(means) < CERTAIN * noise:
        return [1.0]
    return list((means / means.mean()).tolist())


def follow(trend: list[float], length: int) -> NDArray[np.float64]:
    """Returns the trend's factor of each iteration."""
    return np.repeat(trend, -(-length // len(trend)))[:length]


def normal_scores(column: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the places of durations among all as those of a normal variable, so that outliers count for little."""
    order = np.argsort(np.argsort(column, kind="stable"), kind="stable")
    places = (order + 0.5) / len(column)
    # Of the normal distribution, close enough: Tukey's lambda.
    return np.asarray((places**0.14 - (1 - places) ** 0.14) / 0.1975)


def memory_of(scores: list[NDArray[np.float64]]) -> float:
    """Returns how much a duration is like the one before, in the mean of the workers; 0 if that may be chance."""
    found = float(np.mean([correlation(mine[:-1], mine[1:]) for mine in scores]))
    return min(found, 0.98) if found > 2 / sum(map(len, scores)) ** 0.5 else 0.0


def common_part(scores: list[NDArray[np.float64]]) -> float:
    """Returns how much of a duration is common to the workers' same iterations; 0 if that may be chance."""
    length = min(map(len, scores))
    pairs = [(a, b) for a in range(len(scores)) for b in range(a)]
    if not pairs:
        return 0.0
    found = float(np.mean([correlation(scores[a][:length], scores[b][:length]) for a, b in pairs]))
    return min(found, 1.0) if found > 2 / (length * len(pairs)) ** 0.5 else 0.0


def correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Returns the correlation; 0 of what does not vary."""
    if first.std() == 0 or second.std() == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])
