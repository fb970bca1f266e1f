"""Live runs beside predicted ones: how far virtual time is off, policy by policy, scenario by scenario.

For each transport one live run of bsp is calibrated from. Then every policy runs live under every scenario, and in
virtual time with what the calibration says of exchanges and cores, under the same seed: with a scenario that gives
`compute_s` the n-th iteration of a worker lasts equally long in both. Without one ("none": real computing) virtual time
has the computing of the calibration run. Each is done a few times, and the mean counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from torch import nn

from paceline import cluster as clusters
from paceline.advice.calibration import Calibration, calibrate
from paceline.advice.prediction import Prediction, predict
from paceline.api import Job
from paceline.cluster import Cluster
from paceline.errors import ConfigError
from paceline.live_evaluation import LiveEvaluation
from paceline.run import Point, Run
from paceline.runtime.live.protocol.configuration import MultihostOptions
from paceline.workload_training import train

LOOPBACK = "127.0.0.1"
TRANSPORTS = ("memory", "tcp", "keys")
NO_SCENARIO = "none"
"""Instead of a scenario: the workers compute as fast as they can."""
LATENCIES = (0.6, 0.8, 1.0, 1.2, 1.4)
"""As parts of the one that was fitted: so often each run is done in virtual time, and the mean counts."""
APART = 0.05
"""Live times that differ by more than this part tell which policy is faster."""


@dataclass(frozen=True)
class Row:
    """One policy under one scenario and over one transport; the error is that of the time, as a part of it."""

    policy: str
    scenario: str
    transport: str
    live_s: float
    virtual_s: float
    error: float
    live_waiting: float
    virtual_waiting: float
    live_staleness: float
    virtual_staleness: float


@dataclass(frozen=True)
class Plan:
    """What to run: everything is checked when it is made."""

    policies: tuple[str, ...]
    scenarios: tuple[str, ...]
    transports: tuple[str, ...]
    workload: str = "digits-mlp"
    workers: int = 4
    servers: int = 1
    iterations: int = 60
    batch: int | None = None
    compute_s: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [transport for transport in self.transports if transport not in TRANSPORTS]
        if unknown:
            raise ConfigError(f"unknown transport {unknown[0]!r} (known: {', '.join(TRANSPORTS)})")
        for scenario in self.scenarios:
            for policy in self.policies:
                self.job(policy, scenario)

    def job(self, policy: str, scenario: str) -> Job:
        """Returns what is run live."""
        cluster = "steady" if scenario == NO_SCENARIO else self.cluster(scenario)
        return Job(
            self.workload, policy, self.workers, self.servers, cluster, self.iterations, None, None, self.batch,
            self.seed,
        )  # fmt: skip

    def cluster(self, scenario: str) -> Cluster:
        """Returns a scenario that sets the pace of its workers."""
        return dataclasses.replace(clusters.load(scenario), compute_s=self.compute_s)


class Unwatched(LiveEvaluation):
    """Has nobody look at the model: only the time of a run counts."""

    def observe(self, module: nn.Module, time_s: float, updates: int) -> list[Point]:
        return []


def run_live(job: Job, transport: str) -> Run:
    """Does one run in real processes of this machine."""
    from paceline.function_workers import function_starter
    from paceline.runtime.live.driver.driver import Driver, RunPlan

    multihost = None
    if transport != "memory":
        multihost = MultihostOptions(LOOPBACK, "", keys=transport == "keys", shared_memory=False)
    with closing(Unwatched(job.workload, job.seed)) as nobody:
        work = partial(train, job.workload, job.optimizer, job.sizes, job.iterations, job.seed, nobody)
        plan = RunPlan(
            members=job.members,
            starter=function_starter(work),
            policy=job.policy,
            cluster=job.cluster,
            seed=job.seed,
            servers_asked=job.members.servers or None,
            multihost=multihost,
        )
        run = Driver(plan, say=lambda line: None).run()
    run.config = job.config()
    return run


def validate(plan: Plan, told: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """Does all runs, and returns a row for each cell; `told` hears of each as it comes."""
    rows = []
    for row in cells(plan):
        told(row)
        rows.append(row)
    return rows


def cells(plan: Plan) -> Iterator[Row]:
    """Yields the rows."""
    for transport in plan.transports:
        known: dict[bool, Calibration] = {}
        for scenario in plan.scenarios:
            real = scenario == NO_SCENARIO
            if real not in known:
                steady = plan.cluster("steady")
                run = run_live(plan.job("bsp", NO_SCENARIO if real else "steady"), transport)
                known[real] = calibrate(run, "the calibration run", None if real else steady)
            for policy in plan.policies:
                job = plan.job(policy, scenario)
                run = run_live(job, transport)
                yield compare(run, job, scenario, transport, predictions(job, known[real], real))


def predictions(job: Job, known: Calibration, real: bool) -> list[Prediction]:
    """Returns the same run in virtual time some times: with other draws, or with slightly other latencies.

    What policies decide by times, as elastic does, is another thing at the slightest difference, live too.
    """
    found = []
    for number, part in enumerate(LATENCIES):
        scenario = known.cluster
        latency_s = part * scenario.latency_s
        cluster = dataclasses.replace(
            scenario if real else job.cluster,
            costs=scenario.costs,
            latency_s=latency_s,
            bandwidth=scenario.bandwidth,
        )
        seed = job.seed + (number if real else 0)
        nbytes = known.measured.slice_bytes
        found.append(predict(job.policy, cluster, job.members, job.iterations, seed, nbytes, traced=True))
    return found


def compare(run: Run, job: Job, scenario: str, transport: str, predicted: Sequence[Prediction]) -> Row:
    """Puts a live run beside its predictions."""
    virtual_s = fmean(each.seconds for each in predicted)
    metrics = [each.metrics for each in predicted if each.metrics is not None]
    return Row(
        str(job.policy), scenario, transport, run.time_s, virtual_s, virtual_s / run.time_s - 1,
        run.metrics.wait_share, fmean(each.wait_share for each in metrics),
        run.metrics.staleness["mean"], fmean(each.staleness["mean"] for each in metrics),
    )  # fmt: skip


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns what `--json` writes: the rows, the mean and the worst error, and whether the order is the same."""
    errors = [abs(row.error) for row in rows]
    pairs = [
        (a.live_s - b.live_s) * (a.virtual_s - b.virtual_s) > 0
        for a in rows
        for b in rows
        if (a.scenario, a.transport) == (b.scenario, b.transport) and a.live_s > b.live_s * (1 + APART)
    ]
    return {
        "rows": [dataclasses.asdict(row) for row in rows],
        "mean_error": fmean(errors),
        "worst_error": max(errors),
        "pairs": len(pairs),
        "pairs_in_order": sum(pairs),
    }
