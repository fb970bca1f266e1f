"""How the parameters are cut and who decides, in virtual time: what it costs, and what a user sees of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline import cli, simulate
from paceline.cluster import Fault, load
from paceline.core.actions import Park
from paceline.run import Run
from tests.reference import largest_difference, train_alone

LATENCY_S = 0.01
FREE = f"steady:latency_s={LATENCY_S},bandwidth=1e15"


def quadratic(policy: str, cluster: str, workers: int = 4) -> Run:
    return simulate(
        "quadratic", policy, workers=workers, servers=2, cluster=cluster, iterations=10, optimizer="sgd:lr=0.01"
    )


def test_a_scheduler_costs_three_messages_an_iteration() -> None:
    """The shard's report, the release, and a pull that otherwise goes with the push."""
    apart = quadratic("scheduled", FREE).time_s - quadratic("bsp", FREE).time_s
    assert apart == pytest.approx(10 * 3 * LATENCY_S, rel=1e-6)


def test_a_busy_scheduler_is_what_everybody_queues_for() -> None:
    """The pulls come while the shards are still told the pushes; then 2 reports, then 4 releases, one by one."""
    apart = quadratic("scheduled", f"{FREE},scheduler_s=0.001").time_s - quadratic("scheduled", FREE).time_s
    assert apart == pytest.approx(10 * 0.001 * (2 + 4), rel=0.01)


def test_waiting_for_the_scheduler_is_seen_and_has_a_culprit() -> None:
    run = quadratic("scheduled", f"one-slow:factor=4,worker=2,latency_s={LATENCY_S}")
    parks = [action for record in run.trace for action in record.actions if isinstance(action, Park)]
    assert run.metrics.dpr_per_100 == 100 * len(parks) / 10
    assert any(park.waits_for == (2,) for park in parks)
    assert max(run.metrics.waiting_caused_by, key=run.metrics.waiting_caused_by.__getitem__) == 2
    assert "no shard has finished iteration #" in run.metrics.waiting_by_reason
    alone = quadratic("bsp", f"one-slow:factor=4,worker=2,latency_s={LATENCY_S}")
    assert run.metrics.wait_share == pytest.approx(alone.metrics.wait_share, abs=0.05)


def test_layer_by_layer_a_scheduler_decides_too() -> None:
    run = simulate("digits-cnn", "scheduled", workers=3, iterations=10, by_layer=True, dtype="float64")
    alone = train_alone("digits-cnn", 3, 10, run.config["optimizer"], torch.float64)
    assert largest_difference(run.parameters, alone) < 1e-9


def test_unequal_slices_take_longer_and_learn_the_same() -> None:
    cluster = "steady:bandwidth=1e6,compute_s=0.01"
    equal, unequal = (
        simulate(workers=4, servers=4, cluster=cluster, iterations=20, slicing=slicing)
        for slicing in ("eps", "key-range")
    )
    assert equal.imbalance == pytest.approx(1.0, abs=0.01)
    assert unequal.imbalance == pytest.approx(16_384 * 4 / 19_240)
    assert unequal.time_s > 1.1 * equal.time_s
    assert largest_difference(equal.parameters, unequal.parameters) == 0.0


@pytest.mark.parametrize("fault", [Fault("crash", 1, at_s=0.35), Fault("leave", 1, at_iteration=3)])
def test_a_worker_lost_while_the_scheduler_holds_others_is_not_waited_for(fault: Fault) -> None:
    cluster = replace(load("one-slow:factor=3,worker=1"), faults=(fault, Fault("join", 1, at_s=2.0)))
    run = simulate("quadratic", "scheduled", workers=3, servers=2, cluster=cluster, iterations=30)
    assert run.metrics.updates >= 30
    assert run.replay() == []


def test_the_command_line_says_how_unequal_slices_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.json"
    words = ["compare", "bsp", "scheduled", "--slicing", "key-range", "--servers", "4", "--iterations", "5"]
    assert cli.run([*words, "--json", str(results), "--report", str(tmp_path / "r.html")]) == 0
    assert "slices: 40 to 16,384 bytes, the largest is 3.41 times the mean" in capsys.readouterr().out
    told = json.loads(results.read_text())
    assert told["config"]["slicing"] == "key-range"
    assert told["runs"][1]["slices"]["bytes"] == [16384, 256, 2560, 40]
    assert "largest slice 3.41 times the mean" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--slicing", "keys"], "unknown slicing 'keys' (known: eps, key-range)"),
        (["--slicing", "key-range", "--by-layer"], "slicing=key-range cannot be had by_layer"),
        (["--slicing", "key-range", "--servers", "5"], "servers=5 is out of range: 1 to 4"),
        (["--policy", "scheduled:base=dssp"], "cannot be decided by a scheduler"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["simulate", *words]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1
