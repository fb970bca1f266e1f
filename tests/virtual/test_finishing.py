"""Workers that have done their iterations keep their share of N; workers that are lost do not."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from random import Random

import pytest

from benchmarks.finishing import POLICIES, WORKERS, measure
from paceline import simulate
from paceline.cluster import Cluster, Fault, load
from paceline.cluster.models import Factors
from paceline.core.actions import Apply
from paceline.core.events import PushArrived, ViewChanged
from paceline.core.messages import Members, Node
from paceline.core.trace import Trace
from paceline.policies import parse
from paceline.run import Run
from paceline.runtime.virtual.simulation import Simulation
from paceline.runtime.virtual.world import SimulationPlan

SERVER = Node("server", 0)


def weights(trace: Trace) -> list[float]:
    """The weights of all steps, in order."""
    return [action.weight for record in trace for action in record.actions if isinstance(action, Apply)]


def run_of(cluster: Cluster, policy: str = "asp") -> Run:
    run = simulate("quadratic", policy, workers=4, servers=1, cluster=cluster, iterations=10)
    assert run.replay() == []
    return run


@pytest.mark.parametrize("policy", POLICIES)
def test_the_straggler_that_ends_alone_does_no_harm(policy: str) -> None:
    row = measure(policy)
    assert row.weights == {1 / WORKERS}
    assert row.end >= row.first_done - 0.02


@pytest.mark.parametrize(
    "policy",
    [
        "asp:scale=none",
        "dssp:scale=none",
        "elastic:scale=none",
        "specsync:base=asp(scale=none)",
        "waiting:base=ssp(scale=none)",
        "scheduled:base=asp(scale=none)",
        "bsp@0,ssp:scale=none@3",
    ],
)
def test_with_the_full_rate_each_step_has_weight_one(policy: str) -> None:
    """Also the straggler's, and those of gradients that a change of policy finds on their way."""
    assert set(weights(run_of(load("one-slow:factor=4"), policy).trace)) == {1.0}


def test_in_a_mix_each_shard_has_its_own_scale() -> None:
    run = simulate("quadratic", "asp:scale=none+asp+bsp", workers=4, servers=3, iterations=10)
    found = [
        {a.weight for r in run.trace if r.node.rank == m for a in r.actions if isinstance(a, Apply)} for m in range(3)
    ]
    assert found == [{1.0}, {1 / 4}, {1.0}]


def test_in_a_switch_the_scale_is_that_of_the_policy_in_force() -> None:
    run = run_of(Cluster(compute_s=1.0), "asp@0,asp:scale=none@3,ssp@6")
    assert [weight for weight, _ in groupby(weights(run.trace))] == [1 / 4, 1.0, 1 / 4]


@pytest.mark.parametrize("kind", ["crash", "leave"])
def test_who_is_lost_or_leaves_in_the_middle_gives_its_share_up(kind: str) -> None:
    run = run_of(Cluster(compute_s=1.0, faults=(Fault(kind, 3, at_iteration=4),)))  # type: ignore[arg-type]
    assert set(weights(run.trace)) == {1 / 4, 1 / 3}
    assert weights(run.trace)[-1] == 1 / 3, "to the end, when the others have finished"


def test_who_is_lost_and_joins_again_has_a_share_again() -> None:
    run = run_of(Cluster(compute_s=1.0, faults=(Fault("restart", 3, at_iteration=2, for_s=3.0),)))
    assert set(weights(run.trace)) == {1 / 4, 1 / 3}
    assert weights(run.trace)[-1] == 1 / 4


def test_who_has_finished_and_joins_again_is_counted_once() -> None:
    run = run_of(replace(load("one-slow:factor=4,compute_s=1"), faults=(Fault("join", 1, at_s=20.0),)))
    views = [record.event.view for record in run.trace if isinstance(record.event, ViewChanged)]
    joined = next(view for view in views if (1, 1) in view.members)
    assert any(1 in view.finished for view in views if view.number < joined.number)
    assert 1 not in joined.finished
    assert set(weights(run.trace)) == {1 / 4}


def expected_weights(trace: Trace, iterations: int) -> list[float]:
    """The weight of each step on arrival, from what workers did alone: whoever is out of the run and has pushed its
    last iteration keeps its share of N, anybody else who is out has none (Yao et al. 2019, Algorithm 1)."""
    there: dict[int, int] = {}
    done: set[tuple[int, int]] = set()
    kept: set[int] = set()
    expected = []
    for record in trace:
        if record.node != SERVER:
            continue
        match record.event:
            case ViewChanged(view=view):
                now = dict(view.members)
                kept |= {rank for rank, life in there.items() if rank not in now and (rank, life) in done}
                kept -= now.keys()
                there = now
            case PushArrived(push=push):
                author = (push.handle.source, push.handle.incarnation)
                if push.handle.iteration == iterations - 1:
                    done.add(author)
                if author in there.items():
                    expected.append(1 / (len(there) + len(kept)))
    return expected


def test_weights_equal_an_account_kept_from_outside() -> None:
    """40 runs with workers of unequal speed that crash, leave, restart and join, before and after others are done."""
    kinds, finished, lost = ("crash", "leave", "restart", "join"), 0, 0
    for seed in range(40):
        random = Random(seed)
        workers, policy = random.randint(2, 5), random.choice(("asp", "ssp:staleness=2", "elastic", "specsync"))
        faults = tuple(
            Fault(
                random.choice(kinds), random.randrange(workers), at_s=random.uniform(1, 30), for_s=random.uniform(1, 5)
            )  # type: ignore[arg-type]
            for _ in range(random.randint(0, 4))
        )
        speeds = tuple(random.uniform(1, 4) for _ in range(workers))
        run = simulate("quadratic", policy, workers=workers, servers=1, iterations=8, seed=seed,
                       cluster=Factors(compute_s=1.0, by_worker=speeds, faults=faults))  # fmt: skip
        expected = expected_weights(run.trace, 8)
        assert weights(run.trace) == pytest.approx(expected), f"seed {seed}, {policy}, {faults}"
        views = [record.event.view for record in run.trace if isinstance(record.event, ViewChanged)]
        finished += any(view.finished for view in views)
        lost += expected != [1 / workers] * len(expected)
    assert finished > 20
    assert lost > 7


def test_without_tensors_too() -> None:
    plan = SimulationPlan(parse("elastic"), load("one-slow:factor=4"), Members(4, 1), 10, checked=True)
    simulation = Simulation(plan)
    simulation.run()
    assert set(weights(simulation.trace)) == {1 / 4}
