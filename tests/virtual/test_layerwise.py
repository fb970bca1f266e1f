"""Reading and pushing layer by layer: when each layer is read and sent, and how stale its gradients are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline import cli, simulate
from paceline.cluster import Fault, load
from paceline.core.events import ParametersArrived, PushArrived
from tests.reference import largest_difference, train_alone


def test_layers_are_read_going_up_and_sent_going_down() -> None:
    """digits-cnn has three layers; of 0.9 s forward is 0.3, 0.1 a layer, and back is 0.6, 0.2 a layer."""
    scenario = "steady:compute_s=0.9,latency_s=0"
    run = simulate("digits-cnn", "asp", workers=1, cluster=scenario, iterations=2, by_layer=True)
    assert run.layers == ("0", "2", "5")
    read = [(r.event.parameters.shard, r.event.at) for r in run.trace if isinstance(r.event, ParametersArrived)]
    sent = [(r.node.rank, r.event.at) for r in run.trace if isinstance(r.event, PushArrived)]
    assert [shard for shard, _ in read[:3]] == [0, 1, 2]
    assert [at for _, at in read[:3]] == pytest.approx([0.0, 0.1, 0.2], abs=1e-3)
    assert [shard for shard, _ in sent[:3]] == [2, 1, 0]
    assert [at for _, at in sent[:3]] == pytest.approx([0.5, 0.7, 0.9], abs=1e-3)
    assert [at for _, at in read[3:6]] == pytest.approx([0.9, 1.0, 1.1], abs=1e-3), "the next iteration"


def test_the_bottom_layer_is_the_stalest_as_in_table_1() -> None:
    """Chen et al. 2016 have 39 at the bottom and 14.5 at the top; here it is the share of time from read to push."""
    run = simulate("digits-cnn", "asp", workers=40, cluster="lognormal:sigma=0.2", iterations=12, by_layer=True)
    means = [numbers["mean"] for numbers in run.staleness_by_layer().values()]
    assert means == pytest.approx([39, 26, 13], abs=3)
    together = simulate("digits-cnn", "asp", workers=40, cluster="lognormal:sigma=0.2", iterations=12)
    assert together.metrics.staleness["mean"] == pytest.approx(39, abs=3)
    assert together.staleness_by_layer() == {}
    assert "staleness_by_layer" not in together.summary()
    assert run.summary()["staleness_by_layer"]["0"]["count"] == 480


def test_bsp_by_layer_is_still_single_process_training() -> None:
    alone = train_alone("digits-cnn", 3, 20, "sgd:lr=0.1,momentum=0.9", torch.float64)
    run = simulate(
        "digits-cnn", "bsp", workers=3, cluster="lognormal:sigma=1", iterations=20, by_layer=True, dtype="float64"
    )
    assert largest_difference(run.parameters, alone) < 1e-9
    assert run.replay() == []


@pytest.mark.parametrize("policy", ["bsp", "ssp:staleness=2", "backup:extra=1", "asp"])
def test_faults_by_layer_stop_nobody_else(policy: str) -> None:
    faults = (
        Fault("crash", 1, at_iteration=4), Fault("restart", 2, at_s=0.8, for_s=0.5), Fault("join", 1, at_s=2.0),
        Fault("pause", 0, at_s=1.0, for_s=0.4), Fault("crash", 3, at_s=2.51),
    )  # fmt: skip
    scenario = replace(load("lognormal:sigma=0.3"), faults=faults)
    run = simulate("digits-mlp", policy, workers=4, cluster=scenario, iterations=40, by_layer=True)
    reached = {}
    for record in run.trace:
        if record.node.role == "worker" and type(record.event).__name__ == "GradientReady":
            reached[record.node.rank] = record.event.iteration
    assert all(reached[rank] == 39 for rank in (0, 1, 2))
    assert run.replay() == []


def test_by_layer_on_the_command_line(capsys) -> None:
    line = "simulate --policy asp --workload digits-mlp --workers 4 --iterations 5 --by-layer"
    assert cli.run(line.split()) == 0
    out = capsys.readouterr().out
    assert "4 workers, 2 servers" in out
    assert "asp, staleness of layer 0: min" in out
    assert cli.run([*line.split(), "--servers", "3"]) == 2
    assert "servers=3 is out of range: by_layer has 2, one for each layer" in capsys.readouterr().err
    live = "compare asp --workload digits-mlp --workers 2 --by-layer --live"
    assert cli.run(live.split()) == 2
    assert "by_layer is for virtual time" in capsys.readouterr().err
