"""Scenario files: what each key does in virtual time, what may stand in them, and the same object for live runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest

from paceline import cli, cluster, simulate
from paceline.cluster import CATALOGUE, Cluster, Fault, Link, Slowdown, bundled, from_table, load, to_table
from paceline.cluster.files import TABLES
from paceline.core.spec import text_fields
from paceline.errors import ConfigError
from paceline.report.worker_spans import spans

ROOT = Path(__file__).parents[2]
EVERYTHING = """
model = "factors"
by_worker = [1, 2]
compute_s = 0.1
[[slowdown]]
model = "one-slow"
worker = 0
factor = 3
from_iteration = 2
until_iteration = 4
[[slowdown]]
model = "lognormal"
sigma = 0.5
workers = [3]
[[link]]
workers = [1]
latency_s = 0.5
bandwidth = 1e6
[[fault]]
kind = "restart"
worker = 2
at_s = 1
for_s = 0.4
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    return str(path)


def factors(scenario: Cluster, worker: int, count: int = 6) -> list[float]:
    slowdown = scenario.slowdowns(worker, 4, 0)
    return [slowdown() for _ in range(count)]


def test_slowdowns_multiply_for_their_workers_and_iterations(tmp_path) -> None:
    scenario = load(written(tmp_path, EVERYTHING))
    assert factors(scenario, 0) == [1, 1, 3, 3, 1, 1]
    assert factors(scenario, 1) == [2] * 6
    noisy = factors(scenario, 3, 2000)
    assert len(set(noisy)) == 2000
    assert sorted(noisy)[1000] == pytest.approx(2, rel=0.1)
    assert scenario.link(1) == Link((1,), 0.5, 1e6)
    assert scenario.link(0) is None


@pytest.mark.parametrize("name", [*bundled(), "everything"])
def test_a_live_runs_processes_are_told_the_same_scenario(name: str, tmp_path) -> None:
    scenario = load(written(tmp_path, EVERYTHING) if name == "everything" else name)
    again = from_table(json.loads(json.dumps(to_table(scenario), allow_nan=False)))
    assert again == scenario
    assert factors(again, 1, 50) == factors(scenario, 1, 50)


@pytest.mark.parametrize("name", bundled())
@pytest.mark.parametrize("policy", ["bsp", "ssp:staleness=2", "backup:extra=1", "asp"])
def test_paceline_s_own_scenarios_run(name: str, policy: str) -> None:
    run = simulate("quadratic", policy, workers=4, servers=2, cluster=name, iterations=60)
    assert run.history[-1].loss < 0.1
    assert run.replay() == []


def test_a_short_name_takes_changes() -> None:
    assert load("noisy-neighbours:compute_s=0.02,factor=9").compute_s == 0.02
    assert load("noisy-neighbours:factor=9").factor == 9
    with pytest.raises(ConfigError, match="bursts has no parameter 'fctor'"):
        load("noisy-neighbours:fctor=9")


def test_bursts_are_as_long_and_as_frequent_as_they_say() -> None:
    draw = load("bursts:factor=4,probability=0.02,length=20").slowdowns(0, 1, 0)
    slow = [draw() > 1 for _ in range(60_000)]
    begins = sum(now and not before for before, now in pairwise(slow))
    assert sum(slow) / begins == pytest.approx(20, rel=0.1)
    assert begins / slow.count(False) == pytest.approx(0.02, rel=0.1)


def test_a_recorded_run_replays_its_durations(tmp_path) -> None:
    first = simulate("quadratic", "asp", workers=3, cluster="lognormal:sigma=1,compute_s=0.2", iterations=12)
    (tmp_path / "trace.jsonl").write_bytes(first.trace.to_bytes())
    took = {}
    for text in (f"replay:file={tmp_path}", f"replay:file={tmp_path}/trace.jsonl,compute_s=0.5"):
        again = simulate("quadratic", "asp", workers=3, cluster=text, iterations=24)
        for run, label in ((first, "first"), (again, text)):
            lanes = spans(run.trace, run.time_s)
            took[label] = [s.seconds for s in lanes if s.kind == "compute" and s.worker == 1][:-1]
    once = took["first"]
    assert took[f"replay:file={tmp_path}"] == pytest.approx(once + once), "over and over"
    scaled = took[f"replay:file={tmp_path}/trace.jsonl,compute_s=0.5"]
    assert scaled[0] / scaled[1] == pytest.approx(once[0] / once[1])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("replay", "replay needs file=PATH"),
        ("replay:file=nowhere.jsonl", "replay:file=nowhere.jsonl cannot be read: No such file"),
        ("replay:file={folder}/bad.jsonl", "this is not a paceline trace"),
        ("spot-instance", "did you mean 'spot-instances'?"),
    ],
)
def test_what_cannot_be_replayed_gets_one_line(text: str, said: str, tmp_path, capsys) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")
    assert cli.run(["simulate", "--cluster", text.format(folder=tmp_path)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_slow_link_delays_its_worker_and_nobody_else() -> None:
    """quadratic's slice is 24 bytes: 24 bytes/s is a second up and a second down, besides twice 0.25 s."""
    scenario = replace(load("steady:compute_s=1,latency_s=0"), links=(Link((0,), 0.25, 24.0),))
    run = simulate("quadratic", "asp", workers=3, cluster=scenario, iterations=5)
    ends = {rank: [] for rank in range(3)}
    for record in run.trace:
        if record.node.role == "worker" and type(record.event).__name__ == "GradientReady":
            ends[record.node.rank].append(record.event.at)
    # The first pull: a request, 0.25 s, and an answer, 1.25 s; an iteration: compute 1, push 1.25, answer 1.25.
    assert ends[0] == pytest.approx([2.5 + 3.5 * k for k in range(5)], abs=1e-3)
    for rank in (1, 2):
        assert ends[rank] == pytest.approx([1.0 + k for k in range(5)], abs=1e-3)


def test_a_restart_is_a_loss_and_a_join() -> None:
    scenario = replace(load("steady:detect_s=0.1"), faults=(Fault("restart", 1, at_iteration=5, for_s=1.0),))
    run = simulate("quadratic", "asp", workers=3, cluster=scenario, iterations=40)
    lives = [r.incarnation for r in run.trace if r.node == ("worker", 1)]
    assert set(lives) == {0, 1}
    first = next(r for r in run.trace if r.node == ("worker", 1) and r.incarnation == 1)
    assert first.event.at == pytest.approx(0.55 + 1.0, abs=0.02)
    iterations = [r.event.iteration for r in run.trace if r.node == ("worker", 1) and hasattr(r.event, "iteration")]
    assert max(iterations) == 39, "it comes back to the end"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[fault]]\nkind = "crash"\nworker = "two"\nat_s = 1', r"[[fault]] 1: worker='two' must be a whole number, 0"),
        (
            '[[fault]]\nkind = "crash"\nworker = 1\nat_s = -1',
            "[[fault]] 1: at_s=-1 is out of range: a number",
        ),
        ('[[fault]]\nkind = "boom"\nworker = 1', "kind='boom' must be one of crash, leave, join, pause, restart"),
        ("[[fault]]\nworker = 1", "[[fault]] 1 lacks kind: one of crash"),
        ("fault = 3", "fault must be a list of tables: write [[fault]]"),
        ("[[link]]\nworkers = 2", "[[link]] 1: workers=2 must be a list of whole numbers"),
        (
            "[[link]]\nworkers = [1]\nbandwidth = 0",
            "bandwidth=0 is out of range: a number of bytes a second, 1",
        ),
        ("[[link]]\nlatency_s = 0.1", "[[link]] 1 lacks workers"),
        ("[[link]]\nworkers = [9]", "link of worker 9: workers are 0 to 7"),
        ('[[slowdown]]\nmodel = "lognormal"\nsgma = 1', "[[slowdown]] 1: lognormal has no parameter 'sgma'"),
        ('[[slowdown]]\nmodel = "pareto"\nshape = 0', "[[slowdown]] 1: pareto:shape=0 is out of range: 0.1 or more"),
        ('[[slowdown]]\nmodel = "steady"\nfrom_iteration = 1.5', "from_iteration=1.5 must be a whole number"),
        ('[[slowdown]]\nmodel = "steady"\nworkers = [8]', "slowdown of worker 8: workers are 0 to 7"),
    ],
)
def test_a_wrong_key_gets_one_line_with_its_value_and_what_is_allowed(text: str, said: str, tmp_path, capsys) -> None:
    assert cli.run(["simulate", "--cluster", written(tmp_path, text)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_the_last_link_that_names_a_worker_counts() -> None:
    scenario = Cluster(links=(Link((0, 1), 1.0), Link((1,), 2.0)))
    assert [scenario.link(rank).latency_s for rank in (0, 1)] == [1.0, 2.0]


def test_slowdowns_draw_apart() -> None:
    """Two equal models must not draw the same numbers, or their product would be a square."""
    both = Cluster(also=(Slowdown(load("lognormal:sigma=1")), Slowdown(load("lognormal:sigma=1"))))
    draws = list(islice(iter(both.slowdowns(0, 1, 0), None), 4000))
    single = load("lognormal:sigma=1").slowdowns(0, 1, 0)
    first = [single() for _ in range(4000)]
    assert all(abs(draw - one**2) > 1e-12 for draw, one in zip(draws, first, strict=True))


def test_the_page_names_every_model_key_and_scenario() -> None:
    page = (ROOT / "docs" / "scenarios.md").read_text()
    page = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    words = set(re.findall(r"`([^`]+)`", page))
    for model in CATALOGUE.values():
        assert model.name in words
        assert {field.name for field in text_fields(model)} <= words, model.name
    for table in (Fault, Link):
        assert set(table.__struct_fields__) <= words
    assert set(bundled()) <= words
    assert {f"[[{name}]]" for name in TABLES} <= words
    assert {"from_iteration", "until_iteration"} <= words


def test_the_command_lists_them(capsys) -> None:
    assert cli.run(["scenarios"]) == 0
    out = capsys.readouterr().out
    for word in (*CATALOGUE, *bundled(), "probability=0.02", "from 0 to 1"):
        assert word in out
    assert cluster.bundled()
