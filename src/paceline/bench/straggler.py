"""`paceline bench straggler`: time to an accuracy with workers that are slow now and then, on all sides alike.

Every worker sleeps the same milliseconds in the same iterations, whatever runs: paceline's policies, DDP over
Gloo, and post-local SGD (local steps, then an average of the models) with several lengths of its period.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.api import Job, train_job_live
from paceline.bench import peers

POLICIES = ("asp", "ssp:staleness=3", "ssp:staleness=8", "backup:extra=1", "bsp")
PERIODS = (4, 8, 32)
ITERATIONS = 3000


@dataclass
class Row:
    name: str
    time_to_target_s: float | None
    iterations: float


@dataclass(frozen=True)
class Setting:
    workers: int
    cluster: str
    target: str
    lr: float
    seed: int

    def options(self, local_steps: int) -> dict[str, Any]:
        return {
            "cluster": self.cluster, "target": self.target, "lr": self.lr, "seed": self.seed,
            "local_steps": local_steps, "iterations": ITERATIONS,
        }  # fmt: skip


def run(setting: Setting, rounds: int, say: Callable[[str], None]) -> tuple[list[Row], dict[str, float | None]]:
    contestants: dict[str, Callable[[Setting], Row]] = {"ddp": lambda s: _gloo("ddp", s, 1)}
    for period in PERIODS:
        contestants[f"averaging every {period}"] = lambda s, n=period: _gloo(f"averaging every {n}", s, n)  # type: ignore[misc]
    for policy in POLICIES:
        contestants[policy] = lambda s, p=policy: _paceline(p, s)  # type: ignore[misc]
    results: dict[str, list[Row]] = {name: [] for name in contestants}
    for number in range(rounds):
        seeded = Setting(setting.workers, setting.cluster, setting.target, setting.lr, setting.seed + number)
        for name, contest in contestants.items():
            row = contest(seeded)
            results[name].append(row)
            took = "missed" if row.time_to_target_s is None else f"{row.time_to_target_s:.1f} s"
            say(f"round {number + 1}/{rounds}: {name}: {took}, {row.iterations:g} iterations")
    rows = [_median(name, done) for name, done in results.items()]
    times = {row.name: row.time_to_target_s for row in rows}
    best = min((times[policy] for policy in POLICIES if times[policy] is not None), default=None, key=float)  # type: ignore[arg-type]
    averaging = [times[f"averaging every {period}"] for period in PERIODS]
    reached = [value for value in averaging if value is not None]
    return rows, {
        "ddp": _over(times["ddp"], best),
        "averaging": _over(min(reached) if reached else None, best),
    }


def _gloo(name: str, setting: Setting, local_steps: int) -> Row:
    first, *_ = peers.measure("straggler", setting.workers, setting.options(local_steps))
    return Row(name, first["time_to_target_s"], first["iterations"])


def _paceline(policy: str, setting: Setting) -> Row:
    job = Job(
        "digits-mlp", policy, setting.workers, 1, setting.cluster, ITERATIONS, setting.target,
        f"sgd:lr={setting.lr}", None, setting.seed,
    )  # fmt: skip
    run = train_job_live(job)
    return Row(policy, run.time_to_target_s, run.metrics.iterations)


def _median(name: str, rows: list[Row]) -> Row:
    times = [row.time_to_target_s for row in rows if row.time_to_target_s is not None]
    missed = len(times) * 2 <= len(rows)
    return Row(
        name,
        None if missed else statistics.median(times),
        statistics.median(row.iterations for row in rows),
    )


def _over(theirs: float | None, ours: float | None) -> float | None:
    return theirs / ours if theirs is not None and ours is not None else None
