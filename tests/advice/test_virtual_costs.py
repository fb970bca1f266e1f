"""What exchanges cost in virtual time: cores shared in equal parts, servers that do one thing after the other."""

from __future__ import annotations

import dataclasses

import pytest

from paceline import cluster as clusters
from paceline import policies
from paceline.advice.prediction import pace, predict
from paceline.cluster import Cluster, Costs
from paceline.core.messages import Members
from paceline.runtime.virtual.engine import Engine
from paceline.runtime.virtual.host_work import Cores

QUICK = Cluster(compute_s=0.01, latency_s=0.0, bandwidth=1e15)


def seconds(policy: str, cluster: Cluster, workers: int = 4, servers: int = 1, iterations: int = 10) -> float:
    members = Members(workers, servers)
    return predict(policies.parse(policy), cluster, members, iterations, 0, (1000,) * servers).seconds


def test_cores_are_shared_in_equal_parts() -> None:
    engine, ended = Engine(), {}
    cores = Cores(engine, 2)
    for name, start, work in (("a", 0.0, 1.0), ("b", 0.0, 2.0), ("c", 0.5, 1.0), ("d", 0.5, 3.0)):
        engine.schedule(start, 0, lambda given: cores.work(given[1], lambda n: ended.update({n: engine.now}), given[0]),
                        (name, work))  # fmt: skip
    engine.run()
    # Until 0.5 two run at full speed, then four at half of it until a has done at 1.5; then b, c and d at two thirds.
    assert ended["a"] == pytest.approx(1.5)
    assert ended["c"] == pytest.approx(1.5 + 0.5 * 1.5)
    assert ended["b"] == pytest.approx(2.25 + 0.5)  # b and d have a core each from then on
    assert ended["d"] == pytest.approx(0.5 + 0.5 / 0.5 + 0.5 * 1.5 + 2.0)
    assert engine.now == pytest.approx(sum([1.0, 2.0, 1.0, 3.0]) / 2 + (ended["d"] - ended["b"]) / 2)  # nothing idle


def test_without_costs_nothing_is_different() -> None:
    free = dataclasses.replace(QUICK, costs=Costs())
    for policy in ("bsp", "asp", "ssp:staleness=1", "hop"):
        assert seconds(policy, free) == pytest.approx(seconds(policy, QUICK), rel=1e-9)


def test_workers_that_share_a_core_take_turns() -> None:
    crowded = dataclasses.replace(QUICK, costs=Costs(cores=2))
    assert seconds("bsp", crowded) == pytest.approx(2 * seconds("bsp", QUICK))
    half = dataclasses.replace(QUICK, costs=Costs(cores=1, cpu_share=0.25))
    assert seconds("bsp", half) == pytest.approx(10 * (4 * 0.0025 + 0.0075))


def test_a_paced_iteration_lasts_as_long_as_the_scenario_says_if_there_are_cores() -> None:
    assert seconds("bsp", dataclasses.replace(QUICK, costs=Costs(cores=1, cpu_s=0.002))) == pytest.approx(0.1)
    assert seconds("bsp", dataclasses.replace(QUICK, costs=Costs(cores=1, cpu_s=0.005))) == pytest.approx(0.2)


def test_a_server_is_busy_with_each_push_step_and_answer() -> None:
    costs = Costs(message_s=0.001, step_s=0.002, answer_s=0.0005, worker_s=0.003)
    took = seconds("bsp", dataclasses.replace(QUICK, costs=costs), iterations=1)
    # The first parameters are answered one by one, too: whoever is answered last is the last to push.
    assert took == pytest.approx(4 * 0.0005 + 0.01 + 0.003 + 0.001 + 0.002 + 4 * 0.0005, abs=0.002)
    slow = dataclasses.replace(QUICK, costs=Costs(step_s=0.02))
    assert pace(policies.parse("asp"), slow, Members(4, 1), 100, 0, (1000,)).per_gradient_s == pytest.approx(0.02, 0.05)


def test_bytes_are_spread_over_servers() -> None:
    slow = dataclasses.replace(QUICK, costs=Costs(step_byte_s=1e-5))
    one = pace(policies.parse("asp"), slow, Members(8, 1), 200, 0, (4000,)).per_gradient_s
    four = pace(policies.parse("asp"), slow, Members(8, 4), 200, 0, (4000,)).per_gradient_s
    assert one == pytest.approx(5 * 4000e-5, rel=0.05)  # three passes for a step, two for the answer
    assert four == pytest.approx(one / 4, rel=0.1)


def test_only_first_iterations_are_longer_by_first_s() -> None:
    cold = dataclasses.replace(QUICK, costs=Costs(first_s=0.05))
    assert seconds("bsp", cold) == pytest.approx(seconds("bsp", QUICK) + 0.05)


@pytest.mark.parametrize("policy", ["specsync:base=asp", "elastic", "deadline", "hop", "adpsgd", "pssp"])
def test_every_kind_of_policy_comes_to_its_end(policy: str) -> None:
    costs = Costs(cores=2, worker_s=0.001, message_s=0.0005, step_s=0.001, answer_s=0.0005)
    tails = dataclasses.replace(clusters.load("lognormal:sigma=0.5"), compute_s=0.01, costs=costs)
    assert seconds(policy, tails, iterations=20) > 20 * 4 * 0.01 / 2 * 0.8
