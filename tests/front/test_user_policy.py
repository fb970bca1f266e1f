"""A user's own policy: the guide's example is run as it stands; live, replayed, mixed; errors of one line."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest

import paceline
from paceline import cli, policies
from paceline.api import Job, train_job_live
from paceline.core.spec import text_fields
from paceline.errors import ConfigError
from paceline.policies import SSP, CentralPolicy, Waiting, parse
from paceline.run import Run
from paceline.testing import play

GUIDE = Path(__file__).parents[2] / "docs" / "write-your-own-policy.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the guide; we are in it."""
    blocks = re.findall(r"```python (\S+)\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["sprints.py", "test_sprints.py", "timed.py"]
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class TestGuide:
    def test_its_test_passes(self, folder: Path) -> None:
        tested = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_sprints.py"],
            capture_output=True, text=True, cwd=folder,
        )  # fmt: skip
        assert tested.returncode == 0, tested.stdout
        assert "52 passed" in tested.stdout

    def test_its_command_line_works(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (line,) = re.findall(r"\$ paceline (compare .*)", GUIDE.read_text())
        assert cli.run(line.split()) == 0
        assert f"{folder}/sprints.py:Sprints:length=4: 40 iterations" in capsys.readouterr().out

    @pytest.mark.parametrize("text", ["./sprints.py:Sprints:length=3", "./timed.py:TimedSprints:seconds=2"])
    def test_its_policies_keep_the_rules(self, folder: Path, text: str) -> None:
        policy = parse(text)
        assert isinstance(policy, CentralPolicy)
        parks = sum(play(policy, workers=4, iterations=10, seed=seed).counts["Park"] for seed in range(30))
        assert parks > 20


class TestEverywhere:
    def test_the_text_form_has_the_whole_path(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        policy = parse("./sprints.py:Sprints:length=2")
        assert str(policy) == f"{folder}/sprints.py:Sprints:length=2"
        monkeypatch.chdir("/")
        assert parse(str(policy)) == policy

    def test_in_virtual_time_and_replayed(self, folder: Path) -> None:
        run = paceline.simulate("quadratic", "./sprints.py:Sprints(length=2)", workers=3, servers=2, iterations=10)
        assert run.metrics.dpr_per_100 > 0
        assert run.replay() == []

    @pytest.mark.parametrize(
        "text", ["./sprints.py:Sprints:length=2", "./timed.py:TimedSprints+bsp", "bsp@0,./sprints.py:Sprints@3"]
    )
    def test_live_and_replayed(self, folder: Path, text: str) -> None:
        run = live(text)
        assert run.failures == []
        assert str(folder) in run.policy
        assert run.replay() == []

    def test_in_a_mix_a_switch_and_waited_on(self, folder: Path) -> None:
        own = parse("./sprints.py:Sprints:length=2")
        assert str(parse(f"{own}+ssp:staleness=1")) == f"{own}+ssp:staleness=1"
        assert str(parse(f"bsp@0,{own}@5")) == f"bsp@0,{own}@5"
        waiting = parse("waiting:delay_s=1,base=./sprints.py:Sprints(length=2)")
        assert isinstance(waiting, Waiting)
        assert waiting.base_policy == own
        assert parse(str(waiting)) == waiting

    def test_under_paceline_run(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "train.py").write_text(
            "import torch, paceline\n"
            "model = torch.nn.Linear(2, 1)\n"
            "opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)\n"
            "while opt.global_step < 4:\n"
            "    def closure():\n"
            "        opt.zero_grad()\n"
            "        loss = model(torch.ones(1, 2)).pow(2).sum()\n"
            "        loss.backward()\n"
            "        return loss\n"
            "    opt.step(closure)\n"
        )
        assert cli.run(["run", "--policy", "./sprints.py:Sprints", "--dir", "kept", "train.py"]) == 0
        assert f'"policy": "{folder}/sprints.py:Sprints:length=5"' in Path("kept/config.json").read_text()
        assert cli.run(["report", "kept"]) == 0

    def test_an_object_of_a_class_of_ones_own(self) -> None:
        run = paceline.simulate("quadratic", Pairs(), workers=2, iterations=6)
        assert run.policy == "pairs"
        assert run.replay() == []
        assert paceline.launch(partial(train_quadratic, 5), policy=Pairs()).replay() == []

    def test_not_under_the_name_of_a_built_in(self) -> None:
        @dataclass(frozen=True)
        class Impostor(SSP):
            pass

        with pytest.raises(ConfigError, match="Impostor has the name 'ssp' of one of paceline's policies"):
            paceline.simulate("quadratic", Impostor(), workers=2, iterations=6)


@dataclass(frozen=True)
class Pairs(CentralPolicy):
    name: ClassVar[str] = "pairs"
    on_arrival: ClassVar[bool] = True

    def may_pull(self, i: int, V: int) -> bool:
        return i < V or i % 2 == 0

    def freed_at(self, i: int, V: int) -> int:
        return i + 1


def train_quadratic(iterations: int) -> None:
    from paceline import workloads
    from paceline.tensors import optimizers
    from paceline.workload_training import train

    train(workloads.load("quadratic"), optimizers.parse("sgd:lr=0.05"), 8, iterations, 0)


def live(text: str) -> Run:
    return train_job_live(Job("quadratic", text, 2, 2, "steady", 6, None, None, None, 0))


BAD = [
    ("./nothing.py:X", "there is no file '{folder}/nothing.py' to take the policy from"),
    ("./sprints.py", "'./sprints.py' names no class: write FILE.py:CLASS, as ./mine.py:MyPolicy"),
    ("./sprints.py:Sprint", "'{folder}/sprints.py' has no 'Sprint' (policies in it: Sprints)"),
    ("./sprints.py:dataclass", "dataclass in '{folder}/sprints.py' is not a policy"),
    ("./sprints.py:Sprints:length=0", "sprints:length=0 is out of range: 1 or more"),
    ("./sprints.py:Sprints:size=1", "sprints has no parameter 'size' (it has: length)"),
    ("./broken.py:X", "{folder}/broken.py:1 failed: ZeroDivisionError: division by zero"),
    ("./typo.py:X", "{folder}/typo.py:1 failed: SyntaxError"),
    ("./plain.py:NoArrival", "NoArrival in '{folder}/plain.py' does not say on_arrival: set it to True or False"),
    ("./plain.py:NoData", "NoData in '{folder}/plain.py' is not a dataclass: put @dataclass(frozen=True) on top of it"),
]


@pytest.mark.parametrize(("text", "line"), BAD)
def test_errors_are_one_line_and_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, line: str
) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "typo.py").write_text("class X(:\n")
    (folder / "plain.py").write_text(
        "from paceline.policies import CentralPolicy\n"
        "class NoArrival(CentralPolicy): pass\n"
        "class NoData(CentralPolicy): on_arrival = True\n"
    )
    assert cli.run(["simulate", "--policy", text]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("paceline: " + line.format(folder=folder))


def test_a_file_that_was_changed_is_read_again(folder: Path) -> None:
    first = parse("./sprints.py:Sprints")
    text = (folder / "sprints.py").read_text().replace("parameter(5,", "parameter(55,")
    (folder / "sprints.py").write_text(text)
    assert (first.length, parse("./sprints.py:Sprints").length) == (5, 55)  # type: ignore[attr-defined]


def test_the_catalogue_is_shown_with_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["policies"]) == 0
    shown = capsys.readouterr().out
    for name, policy in policies.CATALOGUE.items():
        assert f"\n{name}  " in "\n" + shown
        for field in text_fields(policy):
            assert f"    {field.name}=" in shown
    assert "bsp@0,ssp:staleness=3@100" in shown
    assert "ssp:staleness=3+backup:extra=1" in shown
    assert "FILE.py:CLASS" in shown
