"""`paceline.log`: any name and any single number is kept, shown, and may be a target."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline import cli, run_folder, session
from paceline.core.messages import Members
from paceline.errors import ConfigError, PacelineError
from paceline.function_workers import function_starter
from paceline.report.html import render
from paceline.run import Point, Run, Target
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.protocol import wire

SCRIPT = """
import torch, paceline
world = paceline.init()
model = torch.nn.Linear(2, 1)
opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(400):
    opt.zero_grad()
    model(torch.ones(4, 2)).square().mean().backward()
    opt.step()
    if world.rank == 0:
        paceline.log(val_loss=torch.tensor(10.0 - step), **{"perplexity/eval": 3.5})
        paceline.log(loss=1.0)
"""


def work() -> None:
    world = paceline.init()
    model = nn.Linear(2, 1)
    opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(200):
        opt.zero_grad()
        model(torch.ones(4, 2)).square().mean().backward()
        opt.step()
        if world.rank == 0:
            paceline.log(val_loss=torch.tensor(10.0 - step), **{"perplexity/eval": 3.5})
            paceline.log(loss=1.0)


@pytest.fixture(scope="module")
def run() -> Run:
    return paceline.launch(work, workers=2, policy="asp", target="val_loss<=2", timeout_s=60)


def test_a_run_ends_when_a_metric_of_ones_own_is_low_enough(run: Run) -> None:
    assert run.time_to_target_s is not None
    assert [point.values["val_loss"] for point in run.history if "val_loss" in point.values][:9] == list(
        map(float, range(10, 1, -1))
    )
    assert run.final["perplexity/eval"] == 3.5
    assert run.summary()["final"]["val_loss"] <= 2
    assert "reached val_loss<=2 after" in run.outcome()


def test_what_is_logged_is_in_the_report_and_its_names_stay_text(run: Run) -> None:
    view = run.view()
    page = render([view], {"target": str(run.target)})
    for words in ("final val_loss", "final perplexity/eval", "target 2", "<figcaption>val_loss</figcaption>"):
        assert words in page
    hostile = "<img src=x>"
    view.history[-1][hostile] = view.summary["final"][hostile] = 1.0
    assert hostile not in render([view], {})
    assert "&lt;img" in render([view], {})


def test_what_is_logged_is_in_the_folder_and_on_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    options = ["--workers", "1", "--policy", "asp", "--target", "val_loss<=5", "--dir", str(folder), str(script)]
    assert cli.run(["run", *options]) == 0
    out = capsys.readouterr().out
    assert "asp: reached val_loss<=5 after" in out
    assert "val_loss" in out.split("mean / max")[0], "the table's column is the target's metric"
    assert "asp, last logged: perplexity/eval 3.5" in out
    kept = json.loads((folder / "metrics.json").read_text())
    assert kept["history"][0]["val_loss"] == 10.0
    assert set(kept["history"][0]) == {"time_s", "updates", "val_loss", "perplexity/eval"}
    loaded = run_folder.load(folder)
    assert loaded.final["val_loss"] <= 5
    assert loaded.target == Target("val_loss", 5.0, "<=")
    assert loaded.history[1].loss == 1.0


def test_a_target_nobody_logs_is_said() -> None:
    def silent() -> None:
        opt = paceline.Optimizer(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1))
        opt.skip_step()
        paceline.log(loss=1.0)

    run = paceline.launch(silent, workers=1, target="acuracy>=0.9", timeout_s=60)
    assert run.outcome().startswith("missed acuracy>=0.9 in")
    from paceline.commands.terminal import console, print_result

    with console.capture() as captured:
        print_result(run)
    assert "no worker has logged acuracy: logged was: loss" in captured.get()


@pytest.mark.parametrize(
    ("text", "value", "reached"),
    [
        ("val_loss<=2", 2.0, True), ("val_loss<=2", 2.1, False), ("f1>=0.5", 0.5, True), ("f1>=0.5", 0.4, False),
        ("accuracy=0.95", 0.96, True), ("accuracy>=0.95", 0.94, False), ("loss=0.1", 0.1, True),
        ("loss<=0.1", 0.2, False), ("accuracy<=0.5", 0.4, True), ("f1>=0.5", math.nan, False),
        (" f1 >= 0.5 ", 0.6, True),
    ],
)  # fmt: skip
def test_targets_either_way(text: str, value: float, reached: bool) -> None:
    target = Target.parse(text)
    assert target.reached(Point(1.0, 1, {target.metric: value})) is reached
    assert not target.reached(Point(1.0, 1, {"other": value}))
    assert str(target) == text.replace(" ", "")
    assert Target.parse(str(target)) == target


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("val_loss=2", "does not say which way: write val_loss<=2 or val_loss>=2"),
        ("val_loss<=low", "needs a number after val_loss<="),
        ("val loss<=2", "unknown target"), ("<=2", "unknown target"), ("loss", "unknown target"),
        ("accuracy>=1.5", "accuracy is from 0 to 1"), ("f1>=nan", "f1 is a finite number"),
    ],
)  # fmt: skip
def test_targets_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Target.parse(text)


@pytest.mark.parametrize("value", [1, 0.5, True, torch.tensor(2.0), torch.tensor(3), torch.ones(()).double()])
def test_one_number_of_any_kind(value: object) -> None:
    session.forget()
    world = session.init()
    paceline.log(anything=value)
    session.forget()
    assert world.logged == [{"anything": float(value)}]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", torch.zeros(1)), ("loss", "0.5"), ("loss", None), ("loss", 1j), ("loss", 10**400), ("loss", [1.0]),
        ("", 1.0), ("a" * 65, 1.0), ("two words", 1.0), ("a<b", 1.0), ("a=b", 1.0), ("a\nb", 1.0), ("1st", 1.0),
        ("time_s", 1.0), ("updates", 1.0), ("\x1b[2J", 1.0),
    ],
)  # fmt: skip
def test_what_cannot_be_logged(name: str, value: object) -> None:
    with pytest.raises(PacelineError, match=r"paceline\.log"):
        paceline.log(**{name: value})


def test_the_driver_checks_names_again() -> None:
    from paceline.runtime.live.driver.logged_metrics import MOST_NAMES

    said: list[str] = []
    driver = Driver(RunPlan(Members(1, 1), function_starter(print)), say=said.append)
    for values in ({"loss": 1.0, "<b>": 2.0}, {"\x1b[2J": 1.0}, {"time_s": 0.0}, {"a" * 65: 0.0}):
        driver.parts.mailbox.hear(wire.Log(0, 1.0, 1, 1, values))
    driver.parts.mailbox.hear(wire.Log(0, math.nan, 1, 1, {"loss": 1.0}))
    assert [point.values for point in driver.parts.logged.history] == [{"loss": 1.0}]
    for number in range(2 * MOST_NAMES):
        driver.parts.mailbox.hear(wire.Log(0, 1.0, 1, 1, {f"n{number}": 1.0}))
    assert len(driver.parts.logged.history) == MOST_NAMES
    driver.close()
    assert len(said) == 1
    assert "left out" in said[0]
