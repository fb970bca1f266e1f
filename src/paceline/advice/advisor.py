"""Which policy to take: all that may be worth it, ranked by what virtual time predicts for a situation.

Without a target they are ranked by the time per gradient that is used. By that alone asp would nearly always win: it
waits for nobody, and what its stale gradients are worth is not in that figure. So only policies whose gradients are
not stale, or by a few iterations at most, are advised; the others are shown. With a workload and a target the time to
the target decides, between all: it has the statistical cost in it.

If bsp is within `AS_GOOD` of the best, or within what is uncertain, the advice is bsp, and plain DDP would do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, stdev

import msgspec

from paceline import policies
from paceline.advice.changes import Situation
from paceline.advice.prediction import Pace, pace
from paceline.api import Job, simulate_job
from paceline.cluster import Cluster, Measured, MeasuredWorker
from paceline.core.policy import Policy
from paceline.errors import ConfigError
from paceline.workloads.base import Workload

AS_GOOD = 0.05
"""Who is slower by no more than this part is as good."""
CLOSE = 0.03
"""Of those who are this close to the best, the one with the least stale gradients is advised."""
GRADIENTS = 100
"""Gradients of each worker that are simulated."""
SEEDS = 5
STUDENT = {2: 12.7, 3: 4.3, 4: 3.2, 5: 2.8, 6: 2.6, 7: 2.4, 8: 2.4}
"""By number of seeds: how many standard errors a 95 % interval reaches to either side."""
OTHERWISE = 2.2
FRESH = ("bsp", "backup", "deadline")
"""Policies whose gradients are never stale."""
BOUNDED = ("ssp:staleness=1", "ssp:staleness=3")
"""Policies whose gradients are a few iterations old at most, which does little harm in practice."""


@dataclass(frozen=True)
class Candidate:
    """What is predicted of one policy: seconds with their 95 % interval, per gradient or to the target."""

    policy: str
    predicted: float
    low: float
    high: float
    staleness: float | None
    values: tuple[float, ...]
    """What each seed has given."""
    missed: int = 0
    """In how many of the runs the target was missed."""


@dataclass(frozen=True)
class Advice:
    """The ranked candidates, the one to take, and why."""

    candidates: list[Candidate]
    chosen: Candidate
    reference: Candidate
    """bsp."""
    ranked_by: str
    reason: str
    dominated_by: dict[str, float]
    """What bsp's time would be shorter by, as a part of it, without one thing or another; most first."""

    @property
    def changes_nothing(self) -> bool:
        return self.chosen.policy == self.reference.policy


@dataclass(frozen=True)
class Goal:
    """A workload that can be run in virtual time, and what it is to reach."""

    workload: str | Workload
    target: str
    batch: int | None = None
    optimizer: str | None = None


def candidates_for(situation: Situation) -> list[str]:
    """Returns the policies that are tried."""
    workers = situation.members.workers
    tried = ["bsp"]
    if workers >= 3:
        tried.append("backup:extra=1")
    if workers >= 8:
        tried.append(f"backup:extra={workers // 8 + 1}")
    tried += ["ssp:staleness=1", "ssp:staleness=3", "ssp:staleness=8", "dssp", "pssp", "elastic", "asp"]
    if workers >= 2:
        tried.append("hop")
    usable = []
    for text in tried:
        try:
            policies.parse(text).validate(situation.members)
            usable.append(text)
        except ConfigError:
            continue
    return usable


def advise(
    situation: Situation,
    goal: Goal | None = None,
    tried: Sequence[str] = (),
    seeds: int = SEEDS,
    uncertainty: float = 0.0,
    told: Callable[[str], None] = lambda policy: None,
) -> Advice:
    """Ranks the policies. `uncertainty` is that of the calibration itself, as a part."""
    found = []
    for text in dict.fromkeys(["bsp", *(tried or candidates_for(situation))]):
        told(text)
        measure = partial(to_target, goal=goal) if goal is not None else per_gradient
        found.append(measure(text, situation, seeds=seeds, uncertainty=uncertainty))
    found.sort(key=lambda each: each.predicted)
    reference = next(each for each in found if each.policy == "bsp")
    allowed = [each for each in found if goal is not None or is_advisable(each.policy)]
    chosen, reason = choose(allowed, reference)
    ranked_by = f"time to {goal.target}" if goal is not None else "time per gradient that is used"
    return Advice(found, chosen, reference, ranked_by, reason, dominating(situation))


def is_advisable(policy: str) -> bool:
    """Whether a policy may be advised by its speed alone."""
    return policy in BOUNDED or policy.partition(":")[0] in FRESH


def choose(allowed: Sequence[Candidate], reference: Candidate) -> tuple[Candidate, str]:
    """Returns the one to take, and why. `allowed` is sorted, the fastest first."""
    best = allowed[0]
    gain = reference.predicted / best.predicted - 1 if best.predicted else 0.0
    if gain <= AS_GOOD:
        return reference, f"no policy is more than {AS_GOOD:.0%} faster than bsp: change nothing, plain DDP is as good"
    if not surely_faster(best, reference):
        return reference, (
            f"{best.policy} may be {gain:.0%} faster than bsp, which may be chance (try more --seeds): change nothing"
        )
    close = [
        each for each in allowed if each.predicted <= best.predicted * (1 + CLOSE) and surely_faster(each, reference)
    ]
    chosen = min(close or [best], key=lambda each: (each.staleness or 0.0, each.predicted))
    reason = f"{reference.predicted / chosen.predicted - 1:.0%} faster than bsp"
    if chosen.policy.startswith("backup"):
        reason += "; whoever is always slow is always left out, with its samples"
    return chosen, reason


def surely_faster(one: Candidate, other: Candidate) -> bool:
    """Whether one is faster beyond chance, seed by seed: equal seeds have equal computing times.

    What is uncertain of the calibration is so for both alike.
    """
    ratios = [math.log(mine / its) for mine, its in zip(one.values, other.values, strict=True)]
    return fmean(ratios) + chance_of(ratios) < 0


def per_gradient(text: str, situation: Situation, seeds: int, uncertainty: float) -> Candidate:
    """Predicts a policy's time per gradient."""
    policy = policies.parse(text)
    paces = [_pace(policy, situation, seed) for seed in range(seeds)]
    staleness = fmean(each.staleness for each in paces)
    return candidate(text, [each.per_gradient_s for each in paces], staleness, uncertainty)


def _pace(policy: Policy, situation: Situation, seed: int) -> Pace:
    members = situation.members
    return pace(policy, situation.cluster, members, GRADIENTS * members.workers, seed, situation.slice_bytes)


def to_target(text: str, situation: Situation, goal: Goal, seeds: int, uncertainty: float) -> Candidate:
    """Predicts a policy's time to the target, with real gradients in virtual time."""
    times, missed, stale = [], 0, []
    for seed in range(seeds):
        members = situation.members
        job = Job(
            goal.workload, text, members.workers, max(1, members.servers), situation.cluster, None, goal.target,
            goal.optimizer, goal.batch, seed,
        )  # fmt: skip
        run = simulate_job(job)
        missed += run.time_to_target_s is None
        times.append(run.time_s if run.time_to_target_s is None else run.time_to_target_s)
        stale.append(run.metrics.staleness["mean"])
    return candidate(text, times, fmean(stale), uncertainty, missed)


def candidate(text: str, values: Sequence[float], staleness: float, uncertainty: float, missed: int = 0) -> Candidate:
    """Makes a candidate of what some seeds have given."""
    mean = fmean(values)
    half = (chance_of(values) ** 2 + (2 * uncertainty * mean) ** 2) ** 0.5
    return Candidate(text, mean, max(0.0, mean - half), mean + half, staleness, tuple(values), missed)


def chance_of(values: Sequence[float]) -> float:
    """Returns how far the 95 % interval of a mean reaches to either side."""
    count = len(values)
    return STUDENT.get(count, OTHERWISE) * stdev(values) / count**0.5 if count > 1 else 0.0


def dominating(situation: Situation) -> dict[str, float]:
    """Says how much faster bsp would be if all iterations were alike, if exchanges were free, if all had cores."""
    policy, cluster = policies.parse("bsp"), situation.cluster

    def seconds(changed: Cluster) -> float:
        return fmean(
            _pace(policy, dataclasses.replace(situation, cluster=changed), seed).per_gradient_s for seed in (0, 1)
        )

    now = seconds(cluster)
    gains = {
        "stragglers": 1 - seconds(alike(cluster, situation.members.workers)) / now,
        "exchange": 1 - seconds(free(cluster)) / now,
    }
    if cluster.costs is not None and cluster.costs.cores is not None:
        costs = msgspec.structs.replace(cluster.costs, cores=None)
        gains["too few cores"] = 1 - seconds(dataclasses.replace(cluster, costs=costs)) / now
    return dict(sorted(gains.items(), key=lambda item: -item[1]))


def alike(cluster: Cluster, workers: int) -> Cluster:
    """Returns the scenario in which every iteration takes what iterations take in the mean."""
    draws = [cluster.durations(worker, workers, 0) for worker in range(workers)]
    mean_s = fmean(draw() for draw in draws for _ in range(GRADIENTS))
    return Measured(
        measured=(MeasuredWorker(mean_s),),
        latency_s=cluster.latency_s,
        bandwidth=cluster.bandwidth,
        costs=cluster.costs,
    )


def free(cluster: Cluster) -> Cluster:
    """Returns the scenario in which exchanges cost nothing, and the cores are as they are."""
    costs = cluster.costs
    if costs is not None:
        zeros = {
            name: 0.0 for name in costs.__struct_fields__ if name.startswith(("worker", "message", "step", "answer"))
        }
        costs = msgspec.structs.replace(costs, **zeros)
    return dataclasses.replace(cluster, costs=costs, latency_s=0.0, bandwidth=1e15)
