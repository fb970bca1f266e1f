"""Virtual runs without tensors: the same as those with tensors, much faster, and for any number of workers."""

from __future__ import annotations

import dataclasses
import heapq
import json
import time
from pathlib import Path
from typing import get_args

import pytest

from paceline import cli, policies, simulate
from paceline import cluster as clusters
from paceline.bench import simulator
from paceline.cluster import Cluster, Fault, Link
from paceline.core.actions import Action, Apply
from paceline.core.events import ComputeAborted, ViewChanged
from paceline.core.messages import Handle, Members
from paceline.core.trace import Trace, replay
from paceline.runtime.execution import METHODS
from paceline.runtime.virtual.backend import Backend
from paceline.runtime.virtual.peers import PeerSimulation, VirtualPeer
from paceline.runtime.virtual.server import VirtualServer
from paceline.runtime.virtual.simulation import Simulation
from paceline.runtime.virtual.worker import VirtualWorker
from paceline.runtime.virtual.world import SimulationPlan

POLICIES = [
    "bsp",
    "asp",
    "ssp:staleness=2",
    "ssp:staleness=2,lazy=true",
    "dssp:low=1,high=4",
    "pssp:staleness=1,c=0.3",
    "backup:extra=1",
    "deadline",
    "waiting:delay_s=0.05,base=bsp",
    "scheduled",
    "scheduled:base=ssp(staleness=2)",
    "elastic:lookahead=4",
    "ssp:staleness=1+backup:extra=1",
    "asp@0,bsp@10",
    "specsync:abort_time=0.03,abort_rate=0.2",
]
"""pssp with significance is not among them: without tensors nothing is significant."""

PEERS = ["hop:graph=ring-based,backup=1,max_gap=4", "hop:graph=ring,notify_ack=true", "adpsgd:graph=complete"]

CLUSTER = clusters.load("lognormal:sigma=0.7,latency_s=0.001")
SLOW = dataclasses.replace(
    clusters.load("lognormal:sigma=0.2,latency_s=0.002,bandwidth=1e4,scheduler_s=0.003"),
    links=(Link(workers=(0, 3), latency_s=0.01, bandwidth=2000.0),),
)
CHURN = (
    Fault("crash", 1, at_s=0.7),
    Fault("join", 1, at_s=1.3),
    Fault("restart", 2, at_iteration=9, for_s=0.2),
    Fault("pause", 3, at_iteration=5, for_s=0.5),
    Fault("leave", 4, at_s=1.5),
)
CLUSTERS = [CLUSTER, SLOW, dataclasses.replace(CLUSTER, faults=CHURN), dataclasses.replace(SLOW, faults=CHURN)]


def simulated(policy: str, checked: bool = False) -> Simulation:
    simulation = Simulation(SimulationPlan(policies.parse(policy), CLUSTER, Members(5, 2), 30, checked=checked))
    simulation.run()
    return simulation


@pytest.mark.parametrize("cluster", CLUSTERS, ids=["fast", "slow", "fast-churn", "slow-churn"])
@pytest.mark.parametrize("policy", POLICIES + PEERS)
def test_the_trace_is_that_of_a_run_with_tensors(policy: str, cluster: Cluster) -> None:
    """Event for event, with slices that weigh what they weigh."""
    servers = None if policy in PEERS else 2
    given = {"workers": 5, "servers": servers, "cluster": cluster, "iterations": 20, "optimizer": "sgd:lr=0.001"}
    trained = simulate("quadratic", policy, **given).trace  # type: ignore[arg-type]
    plan = SimulationPlan(policies.parse(policy), cluster, trained.header.members, 20, checked=True, goodbyes=True)
    simulation = (PeerSimulation if policy in PEERS else Simulation)(plan, Backend(trained.header.slice_bytes))
    simulation.run()
    assert simulation.trace.records == trained.records
    assert simulation.backend.updates == sum(isinstance(a, Apply) for record in trained for a in record.actions)


@pytest.mark.parametrize("policy", POLICIES)
def test_with_checks_it_is_the_same_and_can_be_played_again(policy: str) -> None:
    bare, checked = simulated(policy), simulated(policy, checked=True)
    assert (bare.engine.now, bare.backend.updates) == (checked.engine.now, checked.backend.updates)
    assert len(bare.trace) == 0
    aborts = sum(isinstance(record.event, ComputeAborted) for record in checked.trace)
    assert len(checked.trace) + aborts == checked.engine.happened, "the end of what was given up is in no trace"
    header = checked.trace.header
    assert replay(checked.trace, lambda node, _: policies.parse(header.policy).machine(*node, header.members, 0)) == []


def test_without_goodbyes_it_is_the_same_until_somebody_is_done() -> None:
    def trace(goodbyes: bool) -> Trace:
        plan = SimulationPlan(policies.parse("ssp"), CLUSTER, Members(5, 2), 30, checked=True, goodbyes=goodbyes)
        simulation = Simulation(plan)
        simulation.run()
        return simulation.trace

    heard, unheard = trace(True), trace(False)
    views = [at for at, record in enumerate(heard) if isinstance(record.event, ViewChanged)]
    first = next(at for at in views if heard.records[at].event.view.finished)  # type: ignore[union-attr]
    assert heard.records[:first] == unheard.records[:first]
    assert len(unheard) == len(heard) - 5 * 2


def seconds_of_a_queue(events: int) -> float:
    """Processor time of a queue alone: each event is made, put into it, taken out, and handed to a function."""
    queue = [(float(number), number, Handle(number, 0, 0, 0, 0)) for number in range(-1000, 0)]
    seen: dict[int, float] = {}

    def handle(at: float, message: Handle) -> None:
        seen[message.source] = at

    begin = time.process_time()
    for number in range(events):
        at, _, message = heapq.heappop(queue)
        handle(at, message)
        heapq.heappush(queue, (at + 1.0 + number % 7, number, Handle(message.source, 0, number, 0, 0)))
    return time.process_time() - begin


@pytest.mark.ci
@pytest.mark.parametrize(("policy", "cluster"), simulator.SETTINGS)
def test_an_event_costs_a_few_times_what_a_queue_alone_takes(policy: str, cluster: str) -> None:
    """With 1000 workers; in processor time, the best of several tries of each, in turn: caches are shared with others.

    How many events a second that are on a machine: `paceline bench simulator`.
    """
    tries = [
        (simulator.time_one(policy, cluster, 1000, 50, checked=False), seconds_of_a_queue(100_000)) for _ in range(5)
    ]
    an_event_s = min(seconds / events for (events, seconds), _ in tries)
    assert an_event_s < 9 * min(floor_s for _, floor_s in tries) / 100_000


def test_the_bench_writes_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"bench simulator --workers 5 20 --rounds 1 --json {tmp_path / 'out.json'}"
    simulator_events, simulator.EVENTS = simulator.EVENTS, 4000
    try:
        assert cli.run(line.split()) == 0
    finally:
        simulator.EVENTS = simulator_events
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["policy"], row["workers"]) for row in rows] == [
        (policy, workers) for policy, _ in simulator.SETTINGS for workers in (5, 20)
    ]
    assert all(row["events_per_s"] > 0 and row["checked_events_per_s"] > 0 for row in rows)
    assert "us an event" in capsys.readouterr().out


def test_the_bench_refuses_what_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "simulator", "--workers", "0"]) == 2
    assert capsys.readouterr().err == "paceline: workers=0 is out of range: 1 or more\n"


def test_every_action_has_somebody_to_carry_it_out() -> None:
    assert set(METHODS) == set(get_args(Action))
    for method in METHODS.values():
        assert any(hasattr(executor, method) for executor in (VirtualServer, VirtualWorker, VirtualPeer))
