"""Peers in virtual time: Hop on the complete graph is BSP, links and machines show, and peers may come and go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from paceline import cli, policies, simulate
from paceline.api import Job
from paceline.cluster import Cluster, Fault, Link, from_table
from paceline.core.actions import Compute, Reduce
from paceline.errors import ConfigError
from paceline.report.peers import apartness
from paceline.run import Run
from paceline.runtime.virtual.engine import Engine
from paceline.runtime.virtual.network import Network
from paceline.runtime.virtual.tensor_backends import PeerTensors, Training
from paceline.runtime.virtual.training import run_on
from paceline.runtime.virtual.world import SimulationPlan
from tests.reference import largest_difference

CHURN = (
    Fault("crash", 2, at_s=1.0),
    Fault("leave", 5, at_s=1.5),
    Fault("join", 2, at_s=2.5),
    Fault("restart", 0, at_iteration=20, for_s=0.4),
    Fault("pause", 3, at_s=2.0, for_s=1.0),
)
POLICIES = [
    "hop:graph=ring",
    "hop:graph=ring-based,order=serial,max_gap=3",
    "hop:graph=ring-based,backup=1,max_gap=4,skip=5",
    "hop:graph=exponential,staleness=3",
    "hop:graph=ring,notify_ack=true",
    "adpsgd:graph=ring",
    "adpsgd:graph=complete",
]


def reached(run: Run) -> dict[int, int]:
    """The iteration each peer entered last."""
    last: dict[int, int] = {}
    for record in run.trace:
        for action in record.actions:
            if isinstance(action, Compute):
                last[record.node.rank] = action.iteration
    return last


@pytest.mark.parametrize(
    ("optimizer", "cluster"),
    [("sgd:lr=0.1", "random-slowdown:factor=6"), ("sgd:lr=0.1,weight_decay=0.001", "pareto:shape=1.2,latency_s=0.05")],
)
def test_standard_serial_on_the_complete_graph_is_bsp_with_a_server(optimizer: str, cluster: str) -> None:
    given = {"workers": 4, "cluster": cluster, "iterations": 60, "optimizer": optimizer}
    bsp = simulate(policy="bsp", **given)  # type: ignore[arg-type]
    hop = simulate(policy="hop:graph=complete,order=serial", **given)  # type: ignore[arg-type]
    assert largest_difference(hop.parameters, bsp.parameters) < 1e-5
    assert hop.consensus[-1][1] < 1e-5
    assert hop.evaluated == "the average of the peers"
    assert hop.summary()["evaluated"] == hop.evaluated


def test_parallel_order_is_another_thing_and_peers_differ() -> None:
    serial, parallel = (
        simulate("quadratic", f"hop:graph=ring,order={order}", workers=5, iterations=60)
        for order in ("serial", "parallel")
    )
    assert largest_difference(serial.parameters, parallel.parameters) > 1e-4
    assert max(apart for _, apart in parallel.consensus) > 1e-3


@pytest.mark.parametrize("policy", POLICIES)
def test_peers_come_and_go_and_the_rest_go_on(policy: str) -> None:
    cluster = Cluster(faults=CHURN)
    run = simulate("quadratic", policy, workers=8, cluster=cluster, iterations=60)
    assert {peer: at for peer, at in reached(run).items() if peer != 5 and at < 60} == {}
    assert run.replay() == []
    assert (
        run.trace.to_bytes()
        == simulate("quadratic", policy, workers=8, cluster=cluster, iterations=60).trace.to_bytes()
    )
    first, last = run.history[0].loss, run.history[-1].loss
    assert first is not None
    assert last is not None
    assert last < 0.5 * first


def test_whoever_joins_begins_with_its_neighbours_parameters() -> None:
    """And not with the model of the beginning: the average would be pulled back to it."""
    calm = simulate("quadratic", "hop:graph=ring", workers=6, iterations=80)
    churn = Cluster(faults=(Fault("crash", 2, at_s=4.0), Fault("join", 2, at_s=5.0)))
    run = simulate("quadratic", "hop:graph=ring", workers=6, cluster=churn, iterations=80)
    joined = [record for record in run.trace if record.node == ("peer", 2) and record.incarnation == 1]
    average = next(action for record in joined for action in record.actions if isinstance(action, Reduce))
    assert {handle.source for handle in average.handles} == {1, 3}
    assert average.own == 0
    assert average.iteration > 30
    assert run.history[-1].loss == pytest.approx(calm.history[-1].loss, rel=0.2)


@pytest.mark.parametrize("policy", ["adpsgd:graph=complete", "hop:graph=complete,backup=1,max_gap=4"])
def test_whoever_joins_counts_in_the_average_once_it_has_parameters(policy: str) -> None:
    """Its link is slow: while its first parameters travel, what is evaluated is of the others alone."""
    cluster = Cluster(
        faults=(Fault("crash", 2, at_s=3.0), Fault("join", 2, at_s=5.0)),
        links=(Link((2,), latency_s=0.6),),
    )
    job = Job("quadratic", policy, 4, 1, cluster, 80, None, None, None, 0)
    counted: list[tuple[float, int, bool]] = []

    class Watched(PeerTensors):
        def evaluate(self) -> None:
            super().evaluate()
            if 2 in self.peers and self.engine.now > 5.0:
                mean = torch.stack([self.peers[rank].values for rank in self.begun]).mean(0)
                assert torch.allclose(self.flat, mean)
                counted.append((self.engine.now, len(self.holders()), 2 in self.begun))

    plan = SimulationPlan(job.policy, cluster, job.members, 80, checked=True)
    run = run_on(Watched(plan, Training(job.workload, job.optimizer, batch=job.batch), Engine()), plan)
    without = [at for at, holders, begun in counted if not begun]
    assert without, "evaluated between its coming and its first parameters"
    assert {holders for _, holders, begun in counted if not begun} == {3}
    assert {holders for _, holders, begun in counted if begun} == {4}
    losses = [point.loss or 0.0 for point in run.history if 4.0 < point.time_s <= max(without)]
    assert max(losses) < 2 * losses[0], "the model of the beginning is in none of them"


def test_when_a_peer_goes_those_it_joined_are_joined() -> None:
    """On a ring without 2, 1 and 3 average with each other."""
    run = simulate(
        "quadratic", "hop:graph=ring", workers=6, cluster=Cluster(faults=(Fault("leave", 2, at_s=1.0),)), iterations=30
    )
    last = [r for r in run.trace if r.node == ("peer", 1) and any(isinstance(a, Reduce) for a in r.actions)][-1]
    average = next(action for action in last.actions if isinstance(action, Reduce))
    assert [handle.source for handle in average.handles] == [0, 3]
    assert average.weights == pytest.approx((1 / 3, 1 / 3))


# The network.


def seconds(policy: str, cluster: str | Cluster, workers: int = 8) -> float:
    return simulate("quadratic", policy, workers=workers, cluster=cluster, iterations=20).time_s


def test_a_slow_edge_and_a_slow_link_slow_down_those_who_use_them() -> None:
    edge = from_table({"edge": [{"between": [0, 4], "latency_s": 0.5}]})
    assert seconds("hop:graph=ring", edge) == pytest.approx(seconds("hop:graph=ring", "steady"), rel=0.01)
    assert seconds("hop:graph=ring-based", edge) > 4 * seconds("hop:graph=ring-based", "steady")
    link = from_table({"link": [{"workers": [3], "latency_s": 0.5}]})
    assert seconds("hop:graph=ring", link) > 4 * seconds("hop:graph=ring", "steady")


def test_peers_of_one_machine_share_its_card() -> None:
    """The ring has four edges between two machines, the complete graph thirty-two."""
    network = Network(Cluster(machines=(4, 4), machine_bandwidth=1e3, machine_latency_s=0.25))
    assert network.arrival(0.0, 0, 1, 1000) == pytest.approx(0.0005, abs=1e-5)
    assert network.arrival(0.0, 0, 4, 1000) == pytest.approx(1.25, abs=1e-5)
    assert network.arrival(0.0, 1, 5, 1000) == pytest.approx(2.25, abs=1e-5)
    assert network.arrival(0.0, 6, 2, 1000) == pytest.approx(1.25, abs=1e-5)
    cluster = "steady:machines=4:4,machine_bandwidth=10000"
    exchanging = {graph: seconds(f"hop:graph={graph},order=serial", cluster) - 2.0 for graph in ("complete", "ring")}
    assert exchanging["complete"] > 8 * exchanging["ring"]


# What peers must show, in small.


def test_backup_neighbours_make_iterations_faster_under_random_slowdown() -> None:
    def pace(mode: str) -> float:
        run = simulate(
            "quadratic", f"hop:graph=ring-based{mode}", workers=16, cluster="random-slowdown:factor=6", iterations=100
        )
        found = apartness(run.trace).iteration_s
        return sum(found.values()) / len(found)

    assert pace("") / pace(",backup=1,max_gap=8") >= 1.3
    assert pace(",order=serial") / pace(",order=serial,backup=1,max_gap=8") >= 1.6


def test_skipping_frees_the_others_from_a_peer_that_is_slow_for_good() -> None:
    def slowdown(mode: str) -> float:
        both = []
        for cluster in ("one-slow:factor=4", "steady"):
            run = simulate("quadratic", f"hop:backup=1,max_gap=8{mode}", workers=16, cluster=cluster, iterations=200)
            found = apartness(run.trace).iteration_s
            both.append(sum(s for peer, s in found.items() if peer) / 15)
        return both[0] / both[1]

    assert slowdown("") >= 3
    assert slowdown(",skip=10,trigger=2") <= 1.25


def test_sorted_shards_give_each_peer_its_own_labels() -> None:
    run = simulate("digits-mlp", "hop:graph=ring", workers=10, iterations=5, shards="sorted")
    even = simulate("digits-mlp", "hop:graph=ring", workers=10, iterations=5)
    assert run.consensus[-1][1] > 2 * even.consensus[-1][1]
    with pytest.raises(ConfigError, match="needs labels"):
        simulate("quadratic", "hop", workers=4, iterations=5, shards="sorted")


def test_what_is_measured_of_peers() -> None:
    run = simulate(
        "quadratic", "hop:graph=ring,staleness=3", workers=4, cluster="random-slowdown:factor=6", iterations=40
    )
    metrics, found = run.metrics, apartness(run.trace)
    assert metrics.iterations == 40
    assert metrics.updates == 40
    assert 0 < metrics.staleness["max"] <= 3
    assert metrics.bytes["update"] == run.trace.header.slice_bytes[0] * 4 * 2 * 41
    assert 0 < metrics.wait_share < 1
    assert max(found.gaps) <= 4 * 2
    assert found.queued <= 2
    assert torch.isfinite(torch.tensor([apart for _, apart in run.consensus])).all()


def test_a_graph_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "graph.edges"
    path.write_text("0 1\n1 2\n2 0\n0 2\n")
    run = simulate("quadratic", f"hop:graph={path}", workers=3, iterations=10)
    assert run.replay() == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("simulate --policy hop:graph=rng", "unknown graph 'rng', did you mean 'ring'?"),
        ("simulate --policy hop:backup=1", "hop:backup needs max_gap"),
        (
            "simulate --policy hop:graph=ring,backup=2,max_gap=3",
            "leaves peer 0 nobody to wait for: it has 2 in-neighbours",
        ),
        ("simulate --policy hop:max_gap=3,skip=4", "hop:skip needs max_gap, and backup or staleness"),
        ("simulate --policy hop:backup=1,max_gap=3,skip=4,trigger=4", "trigger=4 never fires: with max_gap=3"),
        ("simulate --policy hop:staleness=1,max_gap=9,skip=4,trigger=3", "trigger may be from 1 to 2"),
        ("simulate --policy hop:trigger=3", "hop:trigger needs skip"),
        ("simulate --policy hop:notify_ack=true,staleness=1", "hop:notify_ack bounds the gap by itself"),
        ("simulate --policy hop:order=random", "hop:order=random is not one of parallel, serial"),
        ("simulate --policy hop:weights=some", "hop:weights=some is not one of balanced, uniform"),
        ("simulate --policy hop:graph=hierarchical", "needs machines="),
        ("simulate --policy hop:graph=hierarchical,machines=4:2", "places 6 peers, there are 8"),
        ("simulate --policy hop:graph=ring,machines=4:4", "machines= is for the graphs hierarchical"),
        ("simulate --policy hop:graph=double-ring --workers 7", "7 peers cannot be halved"),
        ("simulate --policy hop:graph=torus --workers 7", "7 peers fill no grid"),
        ("simulate --policy hop:graph=nothing.edges", "nothing.edges': No such file"),
        ("simulate --policy adpsgd:graph=exponential", "has edges that go one way"),
        ("simulate --policy hop --by-layer", "has no servers: slicing and by_layer"),
        ("simulate --policy bsp --cluster steady:machines=4:4", "are for policies without servers: bsp has some"),
        ("simulate --policy hop --cluster steady:machines=4:3", "places 7 peers, there are 8"),
        ("simulate --policy hop --servers 2", "servers=2: hop:graph=ring-based has no servers, leave it out"),
        ("compare hop adpsgd --servers 2", "servers=2: hop:graph=ring-based has no servers, leave it out"),
        ("simulate --policy hop:graph=a,b.edges", "'b.edges' in 'hop:graph=a,b.edges' is not KEY=VALUE"),
        ("graph a,b.edges", "a,b.edges' has ',' in its path"),
        ("compare hop+bsp", "cannot be one of several policies: it has no parameter servers"),
    ],
)
def test_bad_input_gets_one_clear_line(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(line.split()) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_beside_a_policy_with_servers_their_number_may_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    line = "compare bsp hop:graph=ring --servers 2 --workers 3 --workload quadratic --iterations 2"
    assert cli.run(line.split()) == 0
    assert "3 workers, 2 servers" in capsys.readouterr().out


def test_a_graph_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.edges"
    path.write_text("0 1\n1 2\n2 0\n")
    policy = policies.parse(f"hop:graph={path}")
    assert isinstance(policy, policies.Hop)
    before = policy.topology(3)
    assert policy.topology(3) is before
    path.write_text("0 1\n1 2\n2 1\n1 0\n")
    os.utime(path, ns=(1, 1))
    assert policy.topology(3).edges == ((0, 1), (1, 0), (1, 2), (2, 1))


@pytest.mark.parametrize("name", ["a,b.edges", "a(b).edges", "a+b.edges", "a@2.edges"])
def test_a_path_that_a_policys_text_cannot_hold_is_refused(name: str, tmp_path: Path) -> None:
    for policy in (policies.Hop, policies.ADPSGD):
        with pytest.raises(ConfigError, match="which has another meaning in a policy's text: rename or copy"):
            policy(graph=str(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0 1\n1 2\n", "not strongly connected: peer 0 cannot be reached from peer 1"),
        ("0 1\n1 0\n2 0\n", "not strongly connected: peer 2 cannot be reached from peer 0"),
        ("0 1\n1 0\n", "has 2 nodes, there are 3 peers"),
        ("0 1\n1 7\n7 0\n", "the graph has an edge 1 -> 7: peers are 0 to 2"),
    ],
)
def test_a_graph_that_cannot_be_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.edges"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        simulate("quadratic", f"hop:graph={path}", workers=3, iterations=2)


def test_the_report_shows_how_far_apart_peers_were(tmp_path: Path) -> None:
    run = simulate(
        "quadratic", "hop:graph=ring,backup=1,max_gap=3,skip=4", workers=6, cluster="one-slow:factor=5", iterations=40
    )
    view = run.view().peers
    assert view is not None
    assert (view.bound, view.room) == (9, 8)
    assert 3 <= max(row["gap"] or 0 for row in view.gaps) <= 9
    assert view.jumps > 3
    page = run.report(tmp_path / "run.html").read_text()
    assert "How far apart the peers were" in page
    assert "bound 9" in page
    assert "Distance from the average" in page
    assert simulate("quadratic", "bsp", workers=2, iterations=2).view().peers is None
