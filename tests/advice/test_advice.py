"""From a live run to a scenario, a prediction and advice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import paceline
from paceline import cli, run_folder
from paceline import cluster as clusters
from paceline.advice import advisor
from paceline.advice.calibration import calibrate
from paceline.advice.changes import Situation
from paceline.advice.validation import Plan, run_live, summary, validate
from paceline.core.messages import Members

POLICIES = ["bsp", "backup:extra=1", "ssp:staleness=3", "asp"]


def advice_for(scenario: str, workers: int) -> advisor.Advice:
    return advisor.advise(Situation(clusters.load(scenario), Members(workers, 1), (20_000,)), tried=POLICIES, seeds=3)


def test_nothing_is_to_be_changed_where_all_are_alike() -> None:
    found = advice_for("production-healthy", 3)
    assert found.changes_nothing
    assert "change nothing" in found.reason


def test_stragglers_are_found_and_asp_is_not_advised_by_its_speed() -> None:
    found = advice_for("random-slowdown:factor=6", 8)
    assert found.chosen.policy == "ssp:staleness=3"
    assert found.candidates[0].policy == "asp"
    assert next(iter(found.dominated_by)) == "stragglers"
    assert found.chosen.low <= found.chosen.predicted <= found.chosen.high


def test_exchange_is_what_costs_where_lines_are_thin() -> None:
    found = advice_for("steady:bandwidth=1e5", 4)
    assert next(iter(found.dominated_by)) == "exchange"


def test_a_target_ranks_by_the_time_to_it() -> None:
    situation = Situation(clusters.load("one-slow:factor=4"), Members(4, 1), (20_000,))
    goal = advisor.Goal("digits-mlp", "accuracy=0.5")
    found = advisor.advise(situation, goal, ["asp"], seeds=1)
    assert found.ranked_by == "time to accuracy=0.5"
    assert found.chosen.policy == "asp"  # the only other one there is


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A live run whose iterations last 10 ms, but for a worker that is three times as slow."""
    plan = Plan(("bsp",), ("one-slow:factor=3",), ("memory",), workers=2, iterations=30, compute_s=0.01)
    run = run_live(plan.job("bsp", "one-slow:factor=3"), "memory")
    folder = tmp_path_factory.mktemp("runs") / "one"
    run_folder.save(folder, run)
    return folder


def test_a_run_is_calibrated_and_done_again_in_virtual_time(measured: Path) -> None:
    found = calibrate(run_folder.load(measured), "one")
    slow, fast = found.cluster.measured
    assert slow.compute_s > 2 * fast.compute_s
    assert found.measured.iteration_s >= 0.03
    assert found.fitted_s == pytest.approx(found.measured.iteration_s, rel=0.005)
    assert found.cluster.costs is not None
    assert 0 < found.cluster.costs.worker_s < 0.01
    assert found.cluster.costs.message_s > 0


def test_the_commands_go_from_the_run_to_the_line_to_run_next(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, advice = tmp_path / "cluster.toml", tmp_path / "advice.json"
    assert cli.run(["calibrate", str(measured), "-o", str(file)]) == 0
    run = paceline.simulate("svm", "bsp", workers=2, cluster=str(file), iterations=5)
    assert run.time_s > 5 * 0.03
    options = ["--policies", "asp", "--seeds", "2", "--json", str(advice)]
    assert cli.run(["advise", str(measured), *options]) == 0
    changed = ["--without", "0", "--policies", "bsp", "--seeds", "1", "--picture", str(tmp_path / "a.svg")]
    assert cli.run(["whatif", str(measured), *changed]) == 0
    assert (tmp_path / "a.svg").read_text().count("<rect") == 3
    said = json.loads(advice.read_text())
    assert set(said) >= {"policy", "predicted", "interval", "command"}
    assert said["command"].startswith("paceline ")
    assert "without 0" in capsys.readouterr().out


def test_what_says_nothing_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan(("bsp",), ("steady",), ("memory",), workers=2, iterations=5, compute_s=0.001)
    short, other = tmp_path / "short", tmp_path / "other"
    run = run_live(plan.job("bsp", "steady"), "memory")
    run_folder.save(short, run)
    run_folder.save(other, run)
    (other / "trace.jsonl").write_bytes(b'["Header",1]\n')
    (tmp_path / "virtual").mkdir()
    run_folder.save(tmp_path / "virtual", paceline.simulate("svm", "bsp", workers=2, iterations=3))
    for arguments, why in (
        (["calibrate", str(tmp_path)], "not a run's folder"),
        (["calibrate", str(short)], "too short"),
        (["calibrate", str(other)], "another version"),
        (["calibrate", str(tmp_path / "virtual")], "no live run"),
        (["advise", str(tmp_path / "none")], "no folder of a run"),
        (["advise", "steady", "--target", "loss=1"], "belong together"),
        (["whatif", str(short)], "Name a change"),
        (["validate", "bsp", "--transports", "pigeon"], "unknown transport"),
    ):
        capsys.readouterr()
        assert cli.run(arguments) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1
        assert why in lines[0]


@pytest.mark.long
def test_virtual_time_is_close_to_live() -> None:
    plan = Plan(("bsp", "ssp:staleness=3", "asp"), ("random-slowdown", "lognormal"), ("memory", "tcp"))
    found = summary(validate(plan))
    assert len(found["rows"]) == 12
    assert found["mean_error"] < 0.06  # a busy machine; docs/advice.md has what a quiet one gives
    assert found["worst_error"] < 0.2
