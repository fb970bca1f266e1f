"""What `compare` says of runs that cannot be compared."""

from __future__ import annotations

import pytest

from paceline import cli, simulate
from paceline.report.html import render
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
