"""`paceline bench rounds`: rounds of local steps under bsp, by four rules, in virtual time.

The rules: a fixed number of steps, a time, in proportion to speed (DyLU), and ZipLine's plan (`auto`). What is measured
is the share of their time that workers wait, over rounds in which speeds are known and everybody takes part; that needs
no tensors. Then the time to a target, with an outer Nesterov, in runs of their own. Everything is simulated, so it
comes out the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from paceline import cluster as clusters
from paceline.api import simulate
from paceline.cluster import Cluster
from paceline.cluster.models import Factors, Recorded
from paceline.core.events import GradientReady
from paceline.core.local_steps import LocalSteps, make
from paceline.core.messages import Members
from paceline.errors import ConfigError
from paceline.policies.bsp import BSP
from paceline.runtime.virtual.simulation import Simulation
from paceline.runtime.virtual.world import SimulationPlan

WARM_UP = 2
"""The first rounds do not count: no speed is known yet."""
BY_TIME = "every_s"
"""The rule that ends rounds by time: as much as so many steps of a fixed round take in the mean."""
OF_STEPS = 32
DRAWS = 500
"""The steps of each worker that the mean time of a step is taken from."""
ALIKE = 0.005
"""Whoever waits for less than this share of the time waits for nobody."""
OFTEN = 0.1
"""The share of plans from which on something has happened often."""


@dataclass(frozen=True)
class Setting:
    workers: int
    steps: int
    """The local steps of each worker in a run without tensors."""
    seeds: tuple[int, ...]
    workload: str
    target: str


@dataclass
class Waits:
    """What was measured in runs without tensors; `bound_share` is the share of plans that the bounds left no choice."""

    share: float
    per_round_s: float
    steps: float
    bound_share: float


@dataclass
class Row:
    cluster: str
    rounds: str
    waiting: float
    """The share of the time."""
    wait_s: float
    """How long a worker waits at the end of a round, in the mean."""
    steps: float
    """The steps of a round, in the mean."""
    time_to_target_s: float | None
    """The median over the seeds; None if most runs missed it."""
    local_steps: float | None
    bytes: float | None
    """The local steps of each worker until then, and the bytes of all pushes and pulls."""
    why: str
    """Where a planned round waits no less than another: why."""


def run(setting: Setting, scenarios: Sequence[str], rules: Sequence[str], progress: Callable[[str], None]) -> list[Row]:
    """Returns a row for each scenario and rule."""
    rows = []
    for scenario in scenarios:
        cluster, workers = clusters.load(scenario), workers_of(scenario, setting.workers)
        cluster.validate(workers)
        locals_ = [read_rule(rule, cluster, workers) for rule in rules]
        waits = {str(local): measure_waits(cluster, workers, local, setting) for local in locals_}
        for local in locals_:
            rows.append(row_of(scenario, workers, local, waits, setting))
            progress(f"{scenario}, {local}: waits {rows[-1].waiting:.1%}")
    return rows


def workers_of(scenario: str, workers: int) -> int:
    """Returns how many workers a scenario has: recorded jobs, and factors by worker, say so themselves."""
    cluster = clusters.load(scenario)
    if isinstance(cluster, Recorded):
        return len(cluster.recording())
    return len(cluster.by_worker) if isinstance(cluster, Factors) else workers


def read_rule(rule: str, cluster: Cluster, workers: int) -> LocalSteps:
    if rule != BY_TIME:
        local = make(rule)
        assert local is not None
        return local
    draws = [cluster.durations(rank, workers, 0) for rank in range(workers)]
    mean_s = fmean(draw() for draw in draws for _ in range(DRAWS))
    return LocalSteps("time", every_s=round(OF_STEPS * mean_s, 3))


def measure_waits(cluster: Cluster, workers: int, local: LocalSteps, setting: Setting) -> Waits:
    """Simulates rounds without tensors, with every seed."""
    waited = lasted = steps = 0.0
    rounds = bound = 0
    for seed in setting.seeds:
        plan = SimulationPlan(BSP(), cluster, Members(workers, 1), setting.steps, seed, checked=True, local=local)
        simulation = Simulation(plan)
        simulation.run()
        ended = ends_of_rounds(simulation, workers)
        for before, ends in zip(ended[WARM_UP - 1 :], ended[WARM_UP:], strict=False):
            last = max(at for at, _ in ends)
            waited += sum(last - at for at, _ in ends)
            lasted += workers * (last - max(at for at, _ in before))
            steps += sum(taken for _, taken in ends) / workers
            rounds += 1
        if simulation.world.planning is not None:
            bound += simulation.world.planning.machine.bound_plans
    if not rounds:
        raise ConfigError(f"steps={setting.steps} are too few for {WARM_UP + 2} rounds of {local}")
    return Waits(waited / lasted, waited / rounds / workers, steps / rounds, min(1.0, bound / rounds))


def ends_of_rounds(simulation: Simulation, workers: int) -> list[list[tuple[float, int]]]:
    """Returns when each worker has ended a round and after how many steps, round by round.

    The last round in which all take part is left out: in it steps run out.
    """
    rounds: dict[int, list[tuple[float, int]]] = {}
    for record in simulation.trace:
        if record.node.role == "worker" and isinstance(record.event, GradientReady):
            rounds.setdefault(record.event.iteration, []).append((record.event.at, record.event.steps))
    return [rounds[number] for number in sorted(rounds) if len(rounds[number]) == workers][:-1]


def row_of(scenario: str, workers: int, local: LocalSteps, waits: dict[str, Waits], setting: Setting) -> Row:
    mine = waits[str(local)]
    times, steps, sizes = [], [], []
    for seed in setting.seeds if setting.target else ():
        given = {"every_s": local.every_s} if local.rule == "time" else {"local_steps": short(local)}
        trained = simulate(
            setting.workload,
            "bsp",
            workers=workers,
            cluster=scenario,
            seed=seed,
            target=setting.target,
            **given,
        )
        if trained.time_to_target_s is not None:
            times.append(trained.time_to_target_s)
            steps.append(trained.metrics.local_steps / workers)
            sizes.append(sum(trained.metrics.bytes.values()))
    there = 2 * len(times) > len(setting.seeds)
    return Row(
        scenario,
        str(local) if local.rule == "time" else short(local),
        mine.share,
        mine.per_round_s,
        mine.steps,
        median(times) if there else None,
        median(steps) if there else None,
        median(sizes) if there else None,
        why_not_less(mine, [waits[each] for each in waits if each != str(local)]) if local.rule == "auto" else "",
    )


def short(local: LocalSteps) -> str:
    """Returns what stands behind local_steps=."""
    return str(local).partition("=")[2]


def why_not_less(mine: Waits, others: Sequence[Waits]) -> str:
    """Says why a planned round waits no less than the best other; nothing if it does."""
    best = min(others, key=lambda each: each.share, default=mine)
    if mine.share < best.share or best is mine:
        return ""
    if mine.share < ALIKE:
        return f"all are as fast as each other, or ends of steps meet: {best.share:.2%} is waited at best"
    if mine.bound_share > OFTEN:
        return (
            f"in {mine.bound_share:.0%} of the plans the bounds leave no choice: the slowest needs longer for its "
            "fewest steps than the fastest for its most"
        )
    if mine.per_round_s <= best.per_round_s:
        return f"its rounds have {mine.steps:.0f} steps and not {best.steps:.0f}, so equal waits are a larger share"
    return "how long steps take varies by itself, and a plan knows the mean alone"
