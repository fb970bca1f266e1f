"""ElasticBSP on the simulated clock: it waits no longer than BSP, stops in time, and copes with loss and join."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise, takewhile
from random import Random

import pytest

from paceline import cluster as clusters
from paceline import policies, simulate
from paceline.cluster import Fault
from paceline.core.actions import Answer, Apply, Park, Send
from paceline.core.events import PlanArrived, PushArrived, ViewChanged
from paceline.core.messages import Members, Node, Plan
from paceline.core.spec import write_value
from paceline.core.trace import Record, Trace
from paceline.report.barriers import barriers, totals
from paceline.runtime.virtual.simulation import Simulation
from paceline.runtime.virtual.world import SimulationPlan

SERVER = Node("server", 0)


def timed(policy: str, cluster: str, workers: int, iterations: int, servers: int = 2) -> Trace:
    members = Members(workers, servers)
    simulation = Simulation(
        SimulationPlan(policies.parse(policy), clusters.load(cluster), members, iterations, checked=True)
    )
    simulation.run()
    return Trace(simulation.trace.header, takewhile(lambda record: not is_over(record), simulation.trace))


def is_over(record: Record) -> bool:
    """Somebody has done all its iterations: from then on it is another cluster."""
    return isinstance(record.event, ViewChanged) and record.event.view.number > 1


def factors(speeds: list[float]) -> str:
    """A bandwidth at which the size of a slice does not matter: what differs is the workers' speed alone."""
    return f"factors:by_worker={write_value(tuple(speeds))},bandwidth=1e15"


def random_speeds(random: Random) -> list[float]:
    """Two to eight workers; the slowest takes up to three times as long as the fastest, often less."""
    ratio = random.uniform(1.0, random.choice((1.3, 1.6, 3.0)))
    return [1.0, ratio, *(random.uniform(1.0, ratio) for _ in range(random.randint(0, 6)))]


def bsp_wait_s(trace: Trace) -> float:
    """The longest wait of an iteration, on average: from its first push to its last."""
    pushes = defaultdict(list)
    for record in trace:
        if record.node == SERVER and isinstance(record.event, PushArrived):
            pushes[record.event.push.handle.iteration].append(record.event.at)
    return sum(max(times) - min(times) for times in pushes.values()) / len(pushes)


def passed_stops(trace: Trace) -> list[str]:
    """On any shard: stops that were passed when the plan came, and what was answered or pushed past one afterwards."""
    answered: dict[tuple[Node, int], int] = {}
    stops: dict[Node, dict[int, int]] = defaultdict(dict)
    at: dict[tuple[Node, int], int] = defaultdict(int)
    found = []
    for record in trace:
        node, event = record.node, record.event
        if isinstance(event, PlanArrived):
            stops[node] = {worker: stop for worker, _, stop in event.plan.stops}
            found += [f"{w} before {event}" for w, stop in stops[node].items() if answered[node, w] >= stop]
        elif isinstance(event, PushArrived):
            handle = event.push.handle
            at[node, handle.source] = handle.iteration + 1
            if handle.iteration >= stops[node].get(handle.source, handle.iteration + 1):
                found.append(f"{event}")
        if all(at[node, worker] >= stop for worker, stop in stops[node].items()):
            stops[node] = {}
        for action in record.actions:
            if isinstance(action, Answer):
                worker, iteration = action.parameters.worker, action.parameters.iteration
                answered[node, worker] = iteration
                if iteration >= stops[node].get(worker, iteration + 1):
                    found.append(f"{action}")
    return found


def test_it_waits_no_longer_than_bsp_and_less_where_speeds_differ() -> None:
    """200 clusters, speeds that last. Seconds of the longest wait at each barrier, per iteration of the slowest."""
    less = 0
    for seed in range(200):
        random = Random(seed)
        speeds, lookahead = random_speeds(random), random.choice((2, 4, 15))
        elastic = timed(f"elastic:lookahead={lookahead}", factors(speeds), len(speeds), 24, servers=1 + seed % 4)
        met = totals(barriers(elastic))
        assert met["rounds"] >= 3, f"cluster {seed}: there was a barrier"
        mine, theirs = met["wait_s"] / met["rounds"], 0.1 * (max(speeds) - min(speeds))
        assert mine <= theirs * (1 + 1e-9) + 1e-9, f"cluster {seed}: {mine} s against {theirs} s"
        assert met["bsp_wait_s"] / met["rounds"] == pytest.approx(theirs, rel=1e-6), "as the report works it out"
        if max(speeds) >= 1.4:
            assert mine < 0.95 * theirs, f"cluster {seed}: {mine} s against {theirs} s"
            less += 1
        assert passed_stops(elastic) == [], f"cluster {seed}"
    assert less >= 60


def test_bsp_waits_what_the_comparison_above_says() -> None:
    assert bsp_wait_s(timed("bsp", factors([1.0, 1.7, 1.2]), 3, 10)) == pytest.approx(0.07, rel=1e-6)


def test_one_lookahead_leaves_nothing_to_choose() -> None:
    """R = 1: after two iterations of monitoring everybody's next one ends at a barrier."""
    found = totals(barriers(timed("elastic:lookahead=1", factors([1.0, 1.4]), 2, 30)))
    assert found["wait_s"] == pytest.approx(found["bsp_wait_s"], rel=1e-6)


def exact_plan(speeds: list[float], lookahead: int) -> tuple[int, ...]:
    """How many iterations each worker does from one barrier to the next, if the paper's plan is kept to the letter.

    When each has pushed twice, its next `lookahead` ends are known; of each the latest is taken that is not after the
    barrier, and every end is tried as the barrier (Zhao et al. 2021, 4). A message takes a hundredth of these seconds.
    """
    lasts = [speed + 0.01 for speed in speeds]
    done = [int(2 * max(lasts) / each + 1e-9) for each in lasts]
    rows = [[(n + k) * each for k in range(1, lookahead + 1)] for n, each in zip(done, lasts, strict=True)]
    plans = []
    for barrier in sorted(end for row in rows for end in row):
        counts = [sum(end <= barrier + 1e-9 for end in row) for row in rows]
        if all(counts):
            first = min(row[count - 1] for row, count in zip(rows, counts, strict=True))
            plans.append((round(barrier - first, 9), barrier, counts))
    return tuple(n + count for n, count in zip(done, min(plans)[2], strict=True))


def test_constant_workers_stop_where_an_exact_plan_says() -> None:
    """Also where an iteration is about to end when the plan is made: 100 clusters, some with speeds of a few kinds."""
    for seed in range(100):
        random = Random(seed)
        speeds, lookahead = random_speeds(random), random.choice((1, 2, 4, 15))
        if seed % 3 == 0:
            speeds = [round(4 * speed) / 4 for speed in speeds]
        trace = timed(f"elastic:lookahead={lookahead}", factors(speeds), len(speeds), 24, servers=1)
        plans = [event.plan for event in (r.event for r in trace if r.node == SERVER) if isinstance(event, PlanArrived)]
        assert plans
        stops = [(0,) * len(speeds)] + [tuple(stop for _, _, stop in plan.stops) for plan in plans]
        exact = exact_plan(speeds, lookahead)
        for before, after in pairwise(stops):
            did = tuple(end - start for start, end in zip(before, after, strict=True))
            assert did == exact, f"cluster {seed}: workers of {speeds}, lookahead {lookahead}"


@pytest.mark.parametrize("slower", [1.5, 1.503, 1.505])
def test_a_stop_is_not_passed_while_the_plan_is_on_its_way(slower: float) -> None:
    """The fast one ends its third iteration just when the slow one, having ended its second, has them plan."""
    assert passed_stops(timed("elastic:lookahead=2", factors([1.0, slower]), 2, 30)) == []


def test_a_plan_that_is_on_its_way_for_longer_than_is_left_holds_its_worker_an_iteration_later() -> None:
    """With a lookahead of 1 there is nothing else to plan. The fast one does four iterations where three were planned,
    and waits for the slow one then."""
    trace = timed("elastic:lookahead=1", factors([1.0, 1.503]), 2, 40)
    plans = [record.event.plan for record in trace if isinstance(record.event, PlanArrived) and record.node == SERVER]
    assert plans[0].stops == ((0, 0, 3), (1, 0, 3))
    parked = [a.pull for r in trace if r.node == SERVER for a in r.actions if isinstance(a, Park)]
    assert [(pull.worker, pull.iteration) for pull in parked] == [(0, 4 * n) for n in range(1, len(plans) + 1)]


def test_predictions_are_right_where_speeds_last() -> None:
    for barrier in barriers(timed("elastic", factors([1.0, 1.37, 1.9]), 3, 60)):
        assert barrier.reached_s == pytest.approx(barrier.due_s, abs=1e-3), "but for the time a message takes"
        assert barrier.wait_s == pytest.approx(barrier.planned_wait_s, abs=1e-6)


@pytest.mark.parametrize("predict", ["mean,alpha=0.1", "median"])
def test_noisy_workers_are_predicted_better_than_by_the_paper(predict: str) -> None:
    """The last of a worker's intervals says little about the next when each is drawn anew."""
    cluster = "lognormal:sigma=0.3,bandwidth=1e15"
    paper = totals(barriers(timed("elastic", cluster, 6, 600)))
    better = totals(barriers(timed(f"elastic:predict={predict}", cluster, 6, 600)))
    assert better["wait_s"] / better["rounds"] < paper["wait_s"] / paper["rounds"]


@pytest.mark.parametrize("servers", [1, 2, 3, 4])
def test_a_lost_worker_leaves_the_plan_and_one_that_joins_waits_for_the_barrier(servers: int) -> None:
    faults = (Fault("crash", 1, at_s=1.61), Fault("join", 1, at_s=2.9), Fault("pause", 0, at_s=3.7, for_s=0.6))
    cluster = replace(clusters.load("factors:by_worker=1:1.3:1.9:2.3"), faults=faults)
    run = simulate("quadratic", "elastic:lookahead=6", workers=4, servers=servers, cluster=cluster, iterations=50)
    assert run.replay() == []
    done = {
        h.source for r in run.trace for a in r.actions if isinstance(a, Apply) for h in a.handles if h.iteration == 49
    }
    assert done == {0, 1, 2, 3}, "everybody came to the end"
    plans = [a.message for r in run.trace for a in r.actions if isinstance(a, Send) and isinstance(a.message, Plan)]
    named = [{(worker, life) for worker, life, _ in plan.stops} for plan in plans]
    assert {(0, 0), (2, 0), (3, 0)} in named, "a plan without the lost"
    assert {(0, 0), (1, 1), (2, 0), (3, 0)} in named, "and one with its next life"
    waits = [action.reason for r in run.trace for action in r.actions if isinstance(action, Park)]
    assert any("at stop" in reason for reason in waits)


def test_with_one_worker_nothing_is_planned() -> None:
    run = simulate("quadratic", "elastic", workers=1, iterations=20)
    assert not any(isinstance(record.event, PlanArrived) for record in run.trace)
    assert not any(isinstance(action, Park) for record in run.trace for action in record.actions)
    assert run.time_s == pytest.approx(simulate("quadratic", "asp", workers=1, iterations=20).time_s)
