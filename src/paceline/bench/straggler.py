"""`paceline bench straggler`: time to an accuracy with workers that are slow now and then, on all sides alike.

Every worker sleeps the same milliseconds in the same iterations, whatever runs: paceline's policies, DDP over
Gloo, and post-local SGD (local steps, then an average of the models) with several lengths of its period. One of
paceline's has local steps, in rounds that are planned to end together, with momentum in the outer optimizer; so asp and
bsp with momentum on the servers stand beside it. Bytes are those of gradients and parameters, of all workers together.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial

from paceline.api import Job, train_job_live
from paceline.bench import competitors
from paceline.core.events import GradientReady

POLICIES = ("asp", "ssp:staleness=3", "ssp:staleness=8", "backup:extra=1", "bsp")
MOMENTUM = {"asp momentum=0.9": "asp", "bsp momentum=0.9": "bsp"}
"""Rows with momentum on the servers."""
WITH_ROUNDS = "bsp local_steps=auto"
PERIODS = (4, 8, 32)
ITERATIONS = 3000


@dataclass
class Row:
    name: str
    time_to_target_s: float | None
    iterations: float
    """The steps of a worker; with local steps those, not the rounds."""
    bytes: float

    @property
    def took(self) -> str:
        return "missed" if self.time_to_target_s is None else f"{self.time_to_target_s:.1f} s"


@dataclass(frozen=True)
class Setting:
    workers: int
    cluster: str
    target: str
    lr: float
    seed: int


def run(setting: Setting, rounds: int, say: Callable[[str], None]) -> tuple[list[Row], dict[str, float | None]]:
    contestants: dict[str, Callable[[Setting], Row]] = {"ddp": partial(_gloo, "ddp", 1)}
    contestants |= {f"averaging every {n}": partial(_gloo, f"averaging every {n}", n) for n in PERIODS}
    contestants |= {policy: partial(_paceline, policy, policy) for policy in POLICIES}
    momentum = ",momentum=0.9"
    contestants |= {name: partial(_paceline, name, policy, momentum=momentum) for name, policy in MOMENTUM.items()}
    contestants[WITH_ROUNDS] = partial(_paceline, WITH_ROUNDS, "bsp", local_steps="auto")
    results: dict[str, list[Row]] = {name: [] for name in contestants}
    for number in range(rounds):
        seeded = replace(setting, seed=setting.seed + number)
        for name, contest in contestants.items():
            row = contest(seeded)
            results[name].append(row)
            said = f"{row.took}, {row.iterations:g} iterations, {row.bytes / 1e6:.1f} MB"
            say(f"round {number + 1}/{rounds}: {name}: {said}")
    rows = [_median(name, done) for name, done in results.items()]
    times = {row.name: row.time_to_target_s for row in rows}
    best = soonest(times[policy] for policy in POLICIES)
    averaging = soonest(times[f"averaging every {period}"] for period in PERIODS)
    return rows, {"ddp": _over(times["ddp"], best), "averaging": _over(averaging, best)}


def soonest(times: Iterable[float | None]) -> float | None:
    return min((time_s for time_s in times if time_s is not None), default=None)


def _gloo(name: str, local_steps: int, setting: Setting) -> Row:
    options = {**asdict(setting), "local_steps": local_steps, "iterations": ITERATIONS}
    first, *_ = competitors.measure("straggler", setting.workers, options)
    # What a ring all-reduce sends, of the parameters and the flag that ends training.
    exchanged = 2 * (setting.workers - 1) * (first["parameters"] + 1) * 4
    return Row(name, first["time_to_target_s"], first["iterations"], first["iterations"] / local_steps * exchanged)


def _paceline(name: str, policy: str, setting: Setting, momentum: str = "", local_steps: str | None = None) -> Row:
    job = Job(
        "digits-mlp", policy, setting.workers, 1, setting.cluster, ITERATIONS, setting.target,
        f"sgd:lr={setting.lr}{momentum}", None, setting.seed, local_steps=local_steps,
    )  # fmt: skip
    run = train_job_live(job)
    steps = sum(record.event.steps for record in run.trace if isinstance(record.event, GradientReady))
    iterations = run.metrics.iterations if local_steps is None else steps / setting.workers
    return Row(name, run.time_to_target_s, iterations, sum(run.metrics.bytes.values()))


def _median(name: str, rows: list[Row]) -> Row:
    times = [row.time_to_target_s for row in rows if row.time_to_target_s is not None]
    missed = len(times) * 2 <= len(rows)
    median_s = None if missed else statistics.median(times)
    iterations, nbytes = (statistics.median(getattr(row, field) for row in rows) for field in ("iterations", "bytes"))
    return Row(name, median_s, iterations, nbytes)


def _over(theirs: float | None, ours: float | None) -> float | None:
    return theirs / ours if theirs is not None and ours is not None else None
