"""What the times and the trace of a live run say of each worker, the servers and the exchange."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.cluster.trace_durations import Iteration, Recording
from paceline.core.events import GradientReady
from paceline.core.step_times import ProcessRow, StepRow, TurnRow
from paceline.errors import ConfigError
from paceline.run import Run

LEAST = 20
"""Iterations of each worker that say something."""
WARM = 3
"""Iterations at the beginning that are not like the others: caches are cold, libraries load."""
QUARTERS = 4
PACED = 0.05
"""If a scenario has usually added more than this part of the computing time, that has set the pace."""


@dataclass(frozen=True)
class Measurements:
    """The numbers of one run. Times are in seconds."""

    policy: str
    workers: int
    servers: int
    slice_bytes: tuple[int, ...]
    durations: Recording
    """The computations of each worker in order: all of an iteration but its exchange, as on a core of its own."""
    cpu_share: float
    """The part of these durations that needs a core."""
    paced_cpu_s: float | None
    """If a scenario has set the pace: the processor time of an iteration's computing."""
    worker_s: float
    """The processor time of a worker in an exchange."""
    turns: np.ndarray
    """Of servers: processor time, pushes, steps, gradients and answers of each turn."""
    cores: int | None
    """The cores that all processes share; None if they are on several hosts."""
    processes: int
    links: frozenset[str]
    iteration_s: float
    """How long an iteration took in the mean, waiting included."""
    startup_s: float
    first_s: float
    """The processor time of a worker's first iterations beyond that of later ones."""
    data_s: float
    """The mean part of an iteration that came before computing."""
    uncertainty: float
    """How much the pace of the run's quarters differs: the standard error of its mean, as a part."""

    @property
    def iterations(self) -> int:
        """The iterations that each worker has at least."""
        return min(len(mine) for mine in self.durations)

    @property
    def transport(self) -> str:
        """How most of the exchange travels."""
        return "memory" if self.links <= {"memory"} else "tcp"

    @property
    def compute_s(self) -> float:
        """The mean of all durations."""
        return float(np.mean([each.seconds for mine in self.durations for each in mine]))


def measure_run(run: Run, name: str) -> Measurements:
    """Reads a run; `name` is what an error calls it."""
    if run.runtime != "live":
        raise ConfigError(f"{name} is no live run: there is nothing to measure in virtual time")
    steps = [row for row in run.times if isinstance(row, StepRow)]
    turns = [row for row in run.times if isinstance(row, TurnRow)]
    processes = [row for row in run.times if isinstance(row, ProcessRow)]
    members = run.trace.header.members
    if not steps or not processes:
        raise ConfigError(f"{name} has no times of its iterations: it is of an older version, or nothing was trained")
    if not members.servers or not turns:
        raise ConfigError(f"{name} had no servers, so that their time is not known: calibrate a run of bsp")
    of_rank = [sorted((row for row in steps if row.rank == rank), key=_at) for rank in range(members.workers)]
    fewest = min(map(len, of_rank))
    if fewest < LEAST + WARM:
        rank = [len(mine) for mine in of_rank].index(fewest)
        raise ConfigError(
            f"{name} is too short to say anything: worker {rank} has {fewest} iterations, at least {LEAST + WARM} "
            "are needed"
        )
    first = [row for mine in of_rank for row in mine[:WARM]]
    of_rank = [mine[WARM:] for mine in of_rank]
    kept = [row for mine in of_rank for row in mine]
    hosts = {row.host for row in processes}
    cores = processes[0].cores if len(hosts) == 1 else None
    live = members.workers + members.servers
    crowding = 1.0 if cores is None else max(1.0, live / cores)
    slowed = run.config.get("cluster") not in (None, "steady")
    usual_s = float(np.median([row.injected_s for row in kept]))
    paced = usual_s > PACED * float(np.median([_computing_s(row) for row in kept]))
    weights = _weights(run)
    durations = tuple(
        tuple(
            Iteration(_duration_s(row, paced, slowed, crowding), weights.get((row.rank, row.iteration), 1.0))
            for row in mine
        )
        for mine in of_rank
    )
    total_s = sum(each.seconds for mine in durations for each in mine)
    cpu_s = sum(min(row.cpu_s, each.seconds) for mine, own in zip(of_rank, durations, strict=True)
                for row, each in zip(mine, own, strict=True))  # fmt: skip
    copies = paced or crowding == 1.0
    return Measurements(
        policy=run.policy,
        workers=members.workers,
        servers=members.servers,
        slice_bytes=run.trace.header.slice_bytes,
        durations=durations,
        cpu_share=min(1.0, cpu_s / total_s),
        paced_cpu_s=_mean(row.cpu_s for row in kept) if paced else None,
        worker_s=_mean(row.exchange_cpu_s for row in kept) + copies * float(np.median([row.copy_s for row in kept])),
        turns=np.array([[row.cpu_s, row.pushes, row.steps, row.gradients, row.answers] for row in turns]),
        cores=cores,
        processes=live,
        links=frozenset(link for row in processes for link in row.links),
        iteration_s=_mean(_pace_s(mine) for mine in of_rank),
        first_s=max(0.0, WARM * (_mean(row.cpu_s for row in first) - _mean(row.cpu_s for row in kept))),
        startup_s=run.wall.get("startup_s", 0.0),
        data_s=_mean(row.data_s for row in kept),
        uncertainty=_unsteadiness(of_rank),
    )


def _at(row: StepRow) -> float:
    return row.at


def _computing_s(row: StepRow) -> float:
    return row.data_s + row.compute_s + row.injected_s


def _pace_s(mine: list[StepRow]) -> float:
    """Returns the seconds of one iteration of a worker; of a long run rows are missing, and iterations are counted."""
    first, last = mine[0], mine[-1]
    return (last.at - first.at) / max(1, last.iteration - first.iteration)


def _unsteadiness(of_rank: list[list[StepRow]]) -> float:
    quarters = []
    for quarter in range(QUARTERS):
        cut = [mine[quarter * len(mine) // QUARTERS : (quarter + 1) * len(mine) // QUARTERS] for mine in of_rank]
        quarters.append(_mean(_pace_s(mine) for mine in cut))
    return float(np.std(quarters, ddof=1) / np.mean(quarters) / QUARTERS**0.5)


def _duration_s(row: StepRow, paced: bool, slowed: bool, crowding: float) -> float:
    """Returns how long a computation takes on a core of its own.

    Where there are fewer cores than processes a computation waits for one, which the clock cannot tell from waiting for
    a disk. It counts as that only beyond what sharing the cores with all others explains.
    """
    if paced:
        return _computing_s(row)
    injected_s = row.injected_s if slowed else 0.0
    if crowding == 1.0:
        return row.data_s + row.compute_s + injected_s
    wall_s = row.data_s + row.compute_s + row.copy_s
    return min(wall_s, row.cpu_s) + max(0.0, wall_s - crowding * row.cpu_s) + injected_s


def _weights(run: Run) -> dict[tuple[int, int], float]:
    """Returns what each gradient weighed, by worker and iteration."""
    return {
        (record.node.rank, record.event.iteration): record.event.weight
        for record in run.trace
        if isinstance(record.event, GradientReady)
    }


def _mean(values: object) -> float:
    return float(np.mean(list(values)))  # type: ignore[call-overload]
