"""What `compare` says of runs that cannot be compared."""

from __future__ import annotations

import re

import pytest
from msgspec import structs

from paceline import cli, simulate
from paceline.report.html import render
from paceline.report.notes import notes
from paceline.report.report_model import target_of
from paceline.report.tables import cause_table

Screen = pytest.CaptureFixture[str]


def rows(
    capsys: pytest.CaptureFixture[str], *policies: str, optimizer: str = "sgd:lr=0.1"
) -> tuple[str, dict[str, str]]:
    options = ["--workload", "quadratic", "--workers", "4", "--iterations", "30", "--cluster", "one-slow:factor=3"]
    assert cli.run(["compare", *policies, *options, "--optimizer", optimizer]) == 0
    said = capsys.readouterr().out
    return said, {
        line.split()[0]: line for line in said.splitlines() if " / " in line and not line.startswith("slices")
    }


def printed(capsys: Screen, *line: str) -> str:
    """What a comparison prints, lines that were folded in one again."""
    assert cli.run(["compare", *line, "--workload", "quadratic", "--workers", "4"]) == 0
    return " ".join(capsys.readouterr().out.split())


SLOW = ("--cluster", "one-slow:factor=3", "--iterations", "30")


def test_a_dash_is_explained_where_it_stands(capsys: Screen) -> None:
    said = printed(capsys, "bsp", "asp", *SLOW, "--optimizer", "sgd:lr=1e30")
    assert "no speed-up over bsp: it diverged" in said
    said = printed(capsys, "bsp", "backup:extra=1", *SLOW)
    assert re.search(r"no speed-up for backup:extra=1: it computed \d+ gradients, bsp \d+", said)
    said = printed(capsys, "bsp", "asp", *SLOW, "--target", "loss=1e-12")
    assert "no speed-up over bsp: it did not reach loss=1e-12" in said
    assert "no speed-up" not in printed(capsys, "bsp", "asp", *SLOW)


def test_staleness_of_updates_and_a_bound_in_iterations_are_told_apart(capsys: Screen) -> None:
    said = printed(capsys, "bsp", "ssp:staleness=3", *SLOW)
    assert "updates stale: those the servers made between reading parameters and using the gradient" in said
    assert "the staleness in ssp:staleness=3 counts iterations of workers" in said
    assert "counts iterations" not in printed(capsys, "bsp", "asp", *SLOW)
    said = printed(capsys, "asp", "hop:graph=ring", *SLOW)
    assert "staleness is counted in updates where there are servers, and in iterations where there are peers" in said


def test_only_a_target_compares_policies_if_a_worker_is_slow(capsys: Screen) -> None:
    note = "without a target a run lasts until it has done its iterations, whoever waits for whom, and only a target"
    said = printed(capsys, "bsp", "asp", *SLOW)
    assert f"the slowest worker computes 3.0 times as long as the others: {note} compares policies (--target)" in said
    assert note not in printed(capsys, "bsp", "asp", *SLOW, "--target", "loss=0.5")
    assert note not in printed(capsys, "bsp", "asp", "--iterations", "30", "--cluster", "steady")
    assert note not in printed(capsys, "asp", *SLOW), "nothing is compared"


def test_a_run_that_fell_behind_its_target_again_is_told(capsys: Screen) -> None:
    run = simulate("quadratic", "asp", workers=2, iterations=30, target="loss=0.5")
    view = run.view()
    target = target_of({"target": "loss=0.5"})
    assert target is not None
    assert notes([view], target) == []
    last = {**view.summary["final"], "loss": 0.6}
    worse = structs.replace(view, summary={**view.summary, "final": last})
    assert notes([worse], target) == ["final loss of asp: at the end, a little after loss=0.5 was reached"]


def test_a_printed_run_is_one_short_line() -> None:
    for policy in ("bsp", "hop:graph=ring"):
        run = simulate("quadratic", policy, workers=4, iterations=30)
        assert str(run) == repr(run)
        assert len(str(run)) < 120
        assert re.fullmatch(r"<Run \S+, virtual: 30 iterations in [\d.]+ s, loss [\d.]+>", str(run))


def test_a_run_that_diverged_has_no_speed_up(capsys: Screen) -> None:
    said, table = rows(capsys, "bsp", "asp", optimizer="sgd:lr=1e30")
    assert "1.00x" not in table["asp"]
    assert " - " in table["asp"]
    assert "asp diverged at iteration 2" in said


def test_nor_has_one_that_did_fewer_iterations(capsys: Screen) -> None:
    _, table = rows(capsys, "bsp", "asp", "backup:extra=1")
    assert "x " in table["asp"]
    assert "x " not in table["backup:extra=1"], "its slow worker skips what it is late for"


def test_the_page_says_so_too() -> None:
    run = simulate("quadratic", "bsp", workers=2, iterations=30, optimizer="sgd:lr=1e30")
    assert run.summary()["diverged"] is True
    assert "diverged at iteration 1" in render([run.view()], {})


def test_resting_is_not_waiting_for_a_push() -> None:
    options = {"workload": "quadratic", "workers": 4, "iterations": 20, "cluster": "one-slow:factor=4"}
    rests = simulate(policy="waiting", **options).view()
    late = simulate(policy="deadline", **options).view()
    alone = cause_table([rests])
    assert "nobody: its own rest before a pull" in alone
    assert "no push" not in alone
    assert "no push: a deadline, a loss, or the end of the run" in cause_table([late])
    assert "rest before" not in cause_table([late])
