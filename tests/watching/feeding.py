"""Runs in virtual time, fed to `RunWatch` as a live run's records would come."""

from __future__ import annotations

from paceline import simulate
from paceline.run import Run
from paceline.watching.driver_records import Begun
from paceline.watching.view import RunWatch


def simulated(policy: str, cluster: str, seed: int = 0, workers: int = 4, iterations: int = 40) -> Run:
    servers = None if policy.startswith(("hop", "adpsgd")) else 2
    return simulate(
        "quadratic", policy, workers=workers, servers=servers, cluster=cluster, iterations=iterations, seed=seed
    )


def watched(run: Run, until_s: float = float("inf")) -> tuple[RunWatch, float]:
    """Returns what is known of a run by then, and when that is."""
    header = run.trace.header
    watch = RunWatch("run")
    members = header.members
    watch.take_driver(Begun(0.0, 0.0, header.policy, members.workers, members.servers, header.slice_bytes))
    last_s = 0.0
    for record in sorted(run.trace.records, key=lambda record: record.event.at):
        if record.event.at > until_s:
            break
        watch.take(record)
        last_s = record.event.at
    return watch, last_s
