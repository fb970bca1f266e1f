"""What cannot be is one line and exit code 2, never a traceback, and it says which."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from paceline import cli, simulate
from paceline.commands.launcher_processes import read_options
from paceline.errors import ConfigError
from paceline.policies import PSSP, SSP, Deadline, Mix, Switch, Waiting, parse
from paceline.workloads import load

QUADRATIC = ["simulate", "--workload", "quadratic", "--workers", "3", "--iterations", "3"]

POLICY = """
    from dataclasses import dataclass
    from paceline.policies import CentralPolicy, parameter

    @dataclass(frozen=True)
    class Mine(CentralPolicy):
        on_arrival = True
        length: int = parameter(5, low=1, doc="iterations")
        def may_pull(self, i, V):
            return i < V
        def freed_at(self, i, V):
            return i + 1

    @dataclass(frozen=True)
    class NotFreed(CentralPolicy):
        on_arrival = True
        def may_pull(self, i, V):
            return i < V
"""

WORKLOADS = """
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy, one_hot

    class Good:
        batch = 16
        def __init__(self):
            x = torch.randn(64, 5)
            self.train = x, (x.sum(1) > 0).long()
        def make_module(self):
            return nn.Linear(5, 2)
        def loss(self, output, target):
            return cross_entropy(output, target)

    class Text(Good):
        batch = "16"

    class OneHot(Good):
        def __init__(self):
            super().__init__()
            self.train = self.train[0], one_hot(self.train[1], 2)
        def loss(self, output, target):
            return cross_entropy(output, target.float())

    class OtherTest(Good):
        def __init__(self):
            super().__init__()
            self.test = torch.randn(3, 7), torch.zeros(3).long()
"""


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.run([*QUADRATIC, *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--optimizer", "sgd:lr=0.1,momentum=1,stretch=true"], "a step with it fails: ZeroDivisionError"),
        (["--optimizer", "adam:betas=0.9:0.9:0.9"], "a step with it fails: ValueError: too many values"),
        (["--optimizer", "sgd:lr=none"], "optimizer 'sgd:lr=none'"),
        (["--seed", str(2**70)], f"seed={2**70} is out of range: 0 to {2**63 - 1}"),
        (["--servers", "100000"], "servers=100000 is out of range: 1 to 1024"),
        (["--servers", "100"], "servers=100 is out of range: the model has 6 parameters"),
    ],
)
def test_options(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert line in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--timeout-s", "nan"], "timeout_s=nan is out of range: more than 0"),
        (["--checkpoint-s", "0"], "checkpoint_s=0 is out of range: more than 0"),
        (["--dir", "/proc/here"], "no folder for the run can be made in /proc/here: "),
    ],
)
def test_options_of_a_live_run(options: list[str], line: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "train.py").write_text("")
    assert cli.run(["run", *options, str(tmp_path / "train.py")]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


def test_options_of_a_run_that_a_launcher_begins() -> None:
    with pytest.raises(ConfigError, match=r"PACELINE_OPTIONS: .*--polcy"):
        read_options("--polcy bsp")


def test_a_report_that_cannot_be_written_after_all_is_one_line(capsys) -> None:
    assert cli.run([*QUADRATIC, "--report", "/proc/report.html"]) == 1
    said = capsys.readouterr().err
    assert "could not be written: " in said
    assert said.count("\n") == 1


def test_every_optimizer_takes_its_step() -> None:
    for text in ("sgd:lr=0.1,momentum=0.9,stretch=true", "adam", "rprop", "asgd", "lars", "adafactor:lr=0.1", "muon"):
        assert simulate("matrix-factorization", optimizer=text, workers=1, iterations=1).time_s > 0


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: SSP(1, lazy="false"), "ssp:lazy='false' is not true or false"),
        (lambda: SSP(staleness=True), "ssp:staleness=true is not a whole number (0 or more)"),
        (lambda: PSSP(c="0.3"), "pssp:c='0.3' is not a number (from 0 to 1)"),
        (lambda: Deadline(factor=None), "deadline:factor=None is not a number (0 or more)"),
        (lambda: Waiting(base=SSP(2)), "is not a text"),
        (lambda: Mix(("ssp", "bsp")), "'ssp' cannot be one of several policies: give a policy, as SSP(3)"),
        (lambda: Mix(()), "a mix or a switch needs at least one policy"),
        (lambda: Switch(()), "a mix or a switch needs at least one policy"),
        (lambda: simulate(workload=3), "a workload is a text like 'digits-mlp' or a Workload, got 3"),
        (lambda: simulate("quadratic", optimizer=3), "an optimizer is a text like 'sgd:lr=0.1', got 3"),
    ],
)  # fmt: skip
def test_in_python(make: Callable[[], object], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert line in str(caught.value)


class TestOwnPolicies:
    @pytest.mark.parametrize("folder", ["a+b", "c@1,d", "e+f@2,g+h"])
    def test_any_folder_will_do(self, folder: str, tmp_path: Path) -> None:
        file = tmp_path / folder / "mine.py"
        file.parent.mkdir()
        file.write_text(dedent(POLICY))
        for text in (f"{file}:Mine", f"ssp+{file}:Mine:length=2+{file}:Mine@0,bsp@3,{file}:Mine@9"):
            policy = parse(text)
            assert str(parse(str(policy))) == str(policy)
            assert f"{file}:Mine:length=" in str(policy)
        with pytest.raises(ConfigError, match="each policy needs its iteration") as caught:
            parse(f"{file}:Mine@0,bsp")
        assert str(file) in str(caught.value)

    def test_without_freed_at(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "mine.py").write_text(dedent(POLICY))
        said = refused(capsys, "--policy", f"{tmp_path / 'mine.py'}:NotFreed")
        assert "makes workers wait but does not say until which V: it lacks freed_at(self, i, V)" in said


class TestOwnWorkloads:
    @pytest.fixture
    def file(self, tmp_path: Path) -> str:
        (tmp_path / "own.py").write_text(dedent(WORKLOADS))
        return str(tmp_path / "own.py")

    def test_what_is_wrong_is_said(self, file: str) -> None:
        with pytest.raises(ConfigError, match="batch='16' is not a whole number"):
            load(f"{file}:Text")
        with pytest.raises(ConfigError, match="evaluating on the test set failed: RuntimeError: mat1 and mat2"):
            load(f"{file}:OtherTest")

    def test_accuracy_is_for_classes(self, file: str) -> None:
        assert load(f"{file}:Good").metrics == ("loss", "accuracy")
        assert load(f"{file}:OneHot").metrics == ("loss",)


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ('[[slowdown]]\nmodel = "bursts"\nlatency_s = 3', "[[slowdown]] 1: latency_s is of the whole scenario"),
        ('model = "factors"\nby_worker = []', "by_worker is an empty list: give one value or more"),
        ('[[fault]]\nkind = "crash"\nworker = 9\nat_s = 1', "crash of worker 9: workers are 0 to 2"),
    ],
)
def test_scenarios(table: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(table)
    assert f"the scenario {str(file)!r}: {line}" in refused(capsys, "--cluster", str(file))


class TestData:
    def test_a_folder_that_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PACELINE_DATA", "/nowhere")
        with pytest.raises(ConfigError, match="PACELINE_DATA=/nowhere names no folder"):
            load("matrix-factorization")

    def test_packed_ratings(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        lines = "".join(f"{n % 7}\t{n % 5}\t{n % 3}\t0\n" for n in range(40))
        (tmp_path / "u.data.gz").write_bytes(gzip.compress(lines.encode()))
        monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
        assert load("matrix-factorization").data == f"40 ratings of {tmp_path / 'u.data.gz'}"
        (tmp_path / "u.data.gz").write_bytes(b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03garbage")
        with pytest.raises(ConfigError, match="cannot read"):
            load("matrix-factorization")

    def test_what_is_not_there_is_looked_for_where_the_system_has_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
        with pytest.MonkeyPatch.context() as system:
            system.setattr("paceline.workloads.data_files.SYSTEM", tmp_path / "system")
            (tmp_path / "system" / "ml-100k").mkdir(parents=True)
            lines = "".join(f"{n % 7}\t{n % 5}\t{n % 3}\t0\n" for n in range(40))
            (tmp_path / "system" / "ml-100k" / "u.data").write_text(lines)
            assert "40 ratings of" in load("matrix-factorization").data
