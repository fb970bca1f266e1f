"""`paceline resume`: what is finished stays as it is, and a run that was stopped says how to go on with it."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import paceline
from paceline import cli, run_folder
from paceline.function_workers import function_starter
from paceline.runtime.live.driver import script_workers
from paceline.runtime.live.storage import checkpoint

Command = Callable[..., tuple[int, str]]
RUN = ("run", "--workers", "2", "--policy", "bsp", "--cluster", "steady:compute_s=0.002", "--dir", "a run")


def script(arguments: list[str]) -> None:
    """train.py ITERATIONS [INTERRUPTS]: worker 0 presses Ctrl-C so many times at its fortieth step."""
    model = torch.nn.Linear(4, 2)
    opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
    print(f"begins at {opt.global_step}", flush=True)
    steps = 0
    while opt.global_step < int(arguments[0]):
        opt.zero_grad()
        model(torch.ones(3, 4)).pow(2).sum().backward()
        opt.step()
        steps += 1
        if paceline.init().rank:
            continue
        paceline.log(loss=1.0 / opt.global_step)
        for _ in range(int(arguments[1]) if steps == 40 and len(arguments) > 1 else 0):
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(0.5)


@pytest.fixture
def paceline_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The program in a folder with a script, whose workers are forks; its exit code and output."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(
        script_workers,
        "script_starter",
        lambda command, *given: function_starter(partial(script, command[1:])),
    )

    def run(*arguments: str) -> tuple[int, str]:
        return cli.run(list(arguments)), capfd.readouterr().out

    return run


def resume_line(said: str) -> list[str]:
    """The arguments of the line to resume, as a shell takes it apart."""
    (line,) = [line for line in said.splitlines() if line.startswith("to go on with it: ")]
    program, *arguments = shlex.split(line.removeprefix("to go on with it: "))
    assert program == "paceline"
    return arguments


def test_a_finished_run_is_not_trained_on_unless_it_is_to_be_longer(paceline_program: Command) -> None:
    folder = Path("a run")
    code, said = paceline_program(*RUN, "train.py", "20")
    assert code == 0
    assert "to go on with it" not in said
    model = (folder / run_folder.MODEL).stat()
    code, said = paceline_program("resume", "a run")
    assert code == 0
    assert "the run in a run is finished: its script has come to its end" in said
    assert "begins at" not in said
    assert (folder / run_folder.MODEL).stat() == model

    assert "begins at 20" in paceline_program("resume", "a run", "--", "30")[1]
    assert checkpoint.latest(folder / "checkpoints")[1].shards[0].iteration == 30
    assert "is finished" in paceline_program("resume", "a run")[1]
    assert "begins at 30" in paceline_program("resume", "a run", "--anyway")[1]

    assert "reached loss=0.02" in paceline_program("resume", "a run", "--target", "loss=0.02", "--", "1000")[1]
    assert "is finished: it has reached loss=0.02" in paceline_program("resume", "a run")[1]


def test_other_scripts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder.write_config(tmp_path, {"script": "train.py"})
    assert cli.run(["resume", str(tmp_path), "train.py", "30"]) == 2
    assert "resume goes on with the script of the run" in capsys.readouterr().err


def test_after_ctrl_c_the_line_to_resume_works_when_pasted(paceline_program: Command) -> None:
    code, said = paceline_program(*RUN, "train.py", "60", "1")
    assert code == 0
    begins = checkpoint.latest(Path("a run/checkpoints"))[1].shards[0].iteration
    assert 40 <= begins < 60
    code, said = paceline_program(*resume_line(said))
    assert code == 0
    assert f"begins at {begins}\n" in said
    assert "is finished" in paceline_program("resume", "a run")[1]


def test_after_a_second_ctrl_c_too(paceline_program: Command) -> None:
    code, said = paceline_program(*RUN, "train.py", "1000000", "2")
    assert code == 130
    assert resume_line(said) == ["resume", "a run"]
    code, said = paceline_program("run", "--workers", "2", "--checkpoint-updates", "5", "train.py", "1000000", "2")
    assert code == 130
    (folder,) = Path("runs").iterdir()
    assert resume_line(said) == ["resume", str(folder)]
