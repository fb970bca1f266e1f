"""The virtual runtime: determinism, faults as data, targets, and what each policy does under slowdown."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest

import paceline
from paceline import policies, simulate
from paceline.cluster import Fault, load
from paceline.core.actions import Answer, Apply, Drop
from paceline.core.events import PushArrived, ViewChanged
from paceline.core.trace import Trace, replay

POLICIES = ["bsp", "ssp:staleness=3", "backup:extra=1", "asp"]
PRINT_TRACE = """
import hashlib, paceline
run = paceline.simulate(policy="ssp:staleness=2", workers=5, servers=3, cluster="random-slowdown:factor=6",
                        iterations=25, seed=7)
print(hashlib.sha256(run.trace.to_bytes()).hexdigest())
"""


def machine_of(node, header):
    return policies.parse(header.policy).machine(node.role, node.rank, header.members, header.seed)


def test_same_seed_same_bytes_whatever_the_hash_seed() -> None:
    digests = set()
    for hash_seed in ("1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", PRINT_TRACE], env=environment, capture_output=True, text=True, check=True
        )
        digests.add(done.stdout)
    assert len(digests) == 1


def test_another_seed_gives_another_trace() -> None:
    arguments = {"policy": "asp", "workers": 3, "cluster": "random-slowdown", "iterations": 10}
    traces = {simulate(**arguments, seed=seed).trace.to_bytes() for seed in (0, 0, 1)}
    assert len(traces) == 2


@pytest.mark.parametrize("policy", [*POLICIES, "scheduled"])
def test_a_recorded_trace_replays_to_the_same_actions(policy: str) -> None:
    cluster = replace(load("random-slowdown"), faults=(Fault("crash", 2, at_s=1.0), Fault("join", 2, at_s=2.0)))
    run = simulate(policy=policy, workers=4, servers=3, cluster=cluster, iterations=40)
    again = Trace.from_bytes(run.trace.to_bytes())
    assert again.to_bytes() == run.trace.to_bytes()
    assert replay(again, machine_of) == []


@pytest.mark.parametrize("policy", [*POLICIES, "scheduled"])
def test_a_crash_a_join_and_a_leave_do_not_stop_the_others(policy: str) -> None:
    faults = (
        Fault("crash", 1, at_iteration=5),
        Fault("join", 1, at_s=3.0),
        Fault("leave", 0, at_s=4.0),
        Fault("join", 4, at_s=2.5),
        Fault("pause", 2, at_s=1.0, for_s=1.5),
    )
    cluster = replace(load("lognormal:sigma=0.3"), faults=faults)
    run = simulate(policy=policy, workers=4, servers=3, cluster=cluster, iterations=60)
    reached = {}
    for record in run.trace:
        if record.node.role == "worker" and type(record.event).__name__ == "GradientReady":
            reached[record.node.rank, record.incarnation] = record.event.iteration
    assert reached[1, 0] < 59, "it died early"
    assert {key for key, iteration in reached.items() if iteration == 59} == {(2, 0), (3, 0), (1, 1), (4, 0)}
    joined = next(r for r in run.trace if r.node == ("worker", 1) and r.incarnation == 1)
    assert isinstance(joined.event, ViewChanged)


def test_a_joining_worker_starts_at_the_shards_iteration() -> None:
    cluster = replace(load("steady"), faults=(Fault("join", 3, at_s=2.05),))
    run = simulate(policy="bsp", workers=3, servers=2, cluster=cluster, iterations=40)
    first = next(
        action.iteration
        for record in run.trace
        if record.node == ("worker", 3)
        for action in record.actions
        if type(action).__name__ == "Compute"
    )
    assert first in (20, 21, 22)


def test_a_crash_is_noticed_after_detect_s_and_releases_those_who_wait() -> None:
    cluster = replace(load("steady:detect_s=0.3"), faults=(Fault("crash", 0, at_s=0.05),))
    run = simulate(policy="bsp", workers=3, cluster=cluster, iterations=10)
    released = [
        record.event.at
        for record in run.trace
        if record.node.role == "server" and isinstance(record.event, ViewChanged)
        and any(isinstance(action, Answer) for action in record.actions)
    ]  # fmt: skip
    assert released == [pytest.approx(0.3505)]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.ci)])
def test_under_6x_random_slowdown_relaxed_policies_reach_the_target_sooner_than_bsp(seed: int) -> None:
    arguments = {"workers": 8, "servers": 2, "cluster": "random-slowdown:factor=6", "target": "accuracy=0.9"}
    times = {policy: simulate(policy=policy, **arguments, seed=seed).time_to_target_s for policy in POLICIES}
    bsp = times.pop("bsp")
    assert bsp is not None
    for policy, time_s in times.items():
        assert time_s is not None, policy
        assert time_s < 0.85 * bsp, policy


def test_history_and_summary_have_what_the_documents_promise() -> None:
    run = simulate(policy="backup:extra=1", workers=4, servers=2, cluster="random-slowdown", iterations=30)
    first, last = run.history[0], run.history[-1]
    assert (first.time_s, first.updates) == (0.0, 0)
    assert last.time_s <= run.time_s
    assert last.accuracy > first.accuracy
    assert last.loss < first.loss
    summary = run.summary()
    assert set(summary) == {
        "policy", "time_to_target_s", "iterations", "updates", "time_s", "wait_share", "dpr_per_100", "staleness",
        "dropped", "bytes", "slices", "gradients", "slowest_worker", "evaluated", "final",
    }  # fmt: skip
    assert set(summary["staleness"]) == {"min", "mean", "median", "max"}
    assert {"push", "pull"} <= set(summary["bytes"])
    assert summary["updates"] == 30


def test_a_missed_target_is_a_result() -> None:
    run = simulate(policy="bsp", workers=2, iterations=5, target="accuracy=0.99")
    assert run.time_to_target_s is None
    assert run.summary()["time_to_target_s"] is None


def test_a_diverging_run_ends_and_says_so() -> None:
    run = simulate("quadratic", "asp", workers=4, iterations=400, optimizer="sgd:lr=1e6")
    assert run.summary()["final"]["loss"] is None


def test_asp_steps_with_lr_over_n_and_backup_drops_what_is_late() -> None:
    asp = simulate(policy="asp", workers=4, iterations=5)
    weights = {a.weight for r in asp.trace for a in r.actions if isinstance(a, Apply)}
    assert 0.25 in weights
    backup = simulate(policy="backup:extra=1", workers=4, servers=2, cluster="one-slow:factor=3", iterations=20)
    late = [a for r in backup.trace for a in r.actions if isinstance(a, Drop)]
    assert late
    assert all(drop.handle.source == 0 and drop.reason.startswith("late") for drop in late)


def test_large_slices_queue_at_the_server() -> None:
    """Four workers push at the same moment; the slices arrive one after the other at the server's bandwidth."""
    run = simulate("quadratic", "asp", workers=4, iterations=1, cluster="steady:bandwidth=24,latency_s=0")
    arrivals = [r.event.at for r in run.trace if isinstance(r.event, PushArrived)]
    gaps = [after - before for before, after in pairwise(arrivals)]
    assert gaps == [pytest.approx(1.0)] * 3, "24 bytes a slice (6 floats) at 24 bytes a second"


def test_simulate_is_public() -> None:
    assert paceline.simulate is simulate
