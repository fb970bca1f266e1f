"""How many events the virtual runtime handles in a second of one core, from a few workers to 10 000.

Timing only: the same machines, wires and clock as in `simulate`, no gradients. Each setting is run with the trace
and the checks of invariants off, then with both on, as `simulate` has them. Seconds are those the process was
given (CPU time, one thread), so that neighbours on the machine do not count; the best of a few rounds.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline import cluster as clusters
from paceline import policies
from paceline.core.messages import Members
from paceline.runtime.virtual.simulation import Simulation
from paceline.runtime.virtual.world import SimulationPlan

SETTINGS = (
    ("asp", "lognormal:sigma=0.5"),
    ("ssp:staleness=3", "lognormal:sigma=0.5"),
    ("ssp:staleness=3", "one-slow:factor=4"),
)
EVENTS = 200_000
"""Each measurement handles about so many events."""
PER_ITERATION = 4
"""The events of one worker's iteration with one server: gradient ready, push, pull, answer."""
FEWEST_ITERATIONS = 20


@dataclass(frozen=True)
class Row:
    policy: str
    workers: int
    events_per_s: float
    cluster: str
    us_per_event: float
    checked_events_per_s: float
    """Events a second with trace and checks on."""
    iterations: int
    seconds: float
    """The seconds of the run with both off."""
    peak_mb: float
    """The most memory this process has had so far."""


def run(workers: list[int], rounds: int, say: Callable[[str], None]) -> list[Row]:
    """Measures every setting with each number of workers."""
    rows = []
    for policy, cluster in SETTINGS:
        for count in workers:
            row = measure(policy, cluster, count, rounds)
            say(
                f"{policy}, {cluster}, {count} workers: {row.us_per_event:.2f} us an event, "
                f"{row.events_per_s:,.0f} events a second ({row.checked_events_per_s:,.0f} with trace and checks)"
            )
            rows.append(row)
    return rows


def measure(policy: str, cluster: str, workers: int, rounds: int) -> Row:
    iterations = max(FEWEST_ITERATIONS, EVENTS // (PER_ITERATION * workers))
    bare = [time_one(policy, cluster, workers, iterations, checked=False) for _ in range(rounds)]
    events, seconds = min(bare, key=lambda one: one[1])
    _, checked_s = time_one(policy, cluster, workers, iterations, checked=True)
    return Row(
        policy=policy,
        workers=workers,
        events_per_s=events / seconds,
        cluster=cluster,
        us_per_event=1e6 * seconds / events,
        checked_events_per_s=events / checked_s,
        iterations=iterations,
        seconds=seconds,
        peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def time_one(policy: str, cluster: str, workers: int, iterations: int, checked: bool) -> tuple[int, float]:
    """Returns the events handled, and the seconds it took to make and run everything."""
    gc.collect()
    started = time.process_time()
    plan = SimulationPlan(
        policies.parse(policy), clusters.load(cluster), Members(workers, 1), iterations, checked=checked
    )
    simulation = Simulation(plan)
    simulation.run()
    return simulation.engine.happened, time.process_time() - started
