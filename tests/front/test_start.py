"""The program begins once more, with the C library told from which size on to copy around the caches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline_start
from paceline_start import OURS, VARIABLE

PROGRAM = Path(sys.executable).with_name("paceline")
SCRIPT = """
import os, sys
import paceline
from paceline.runtime.live.worker.staging import AT_ONCE, goes_around_caches

world = paceline.init()
print("set to", repr(os.environ.get("GLIBC_TUNABLES")), goes_around_caches(4 * AT_ONCE), sys.argv[1:])
"""


def run(arguments: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    told = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return subprocess.run(
        [PROGRAM, *arguments], capture_output=True, text=True, cwd=folder, env={**told, **environment}, timeout=60
    )


@pytest.mark.skipif(not paceline_start.has_setting(), reason="this C library has no such setting")
def test_workers_copy_around_the_caches_unless_somebody_has_set_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    arguments = ["run", "--workers", "1", "script.py", "two words", "--lr", "*"]
    done = run(arguments, tmp_path)
    assert f"set to {OURS!r} True ['two words', '--lr', '*']" in done.stdout, done.stdout + done.stderr
    assert "set to '' False" in run(arguments, tmp_path, GLIBC_TUNABLES="").stdout


def test_what_is_wrong_is_said_once_and_the_exit_code_is_kept(tmp_path: Path) -> None:
    done = run(["run", "--workers", "none", "script.py"], tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout


@pytest.mark.parametrize(
    ("arguments", "again"),
    [
        (["run", "script.py"], True),
        (["bench", "exchange", "--rounds", "1"], True),
        (["join", "tcp://10.0.0.1:7000"], True),
        (["bench", "straggler"], False),
        (["policies"], False),
        (["--help"], False),
        ([], False),
    ],
)
def test_only_commands_whose_workers_copy_gradients_begin_again(arguments: list[str], again: bool, monkeypatch) -> None:
    begun: list[tuple[str, list[str], str]] = []
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(paceline_start, "has_setting", lambda: True)
    monkeypatch.setattr(os, "execv", lambda path, given: begun.append((path, given, os.environ[VARIABLE])))
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "paceline", *arguments])
    monkeypatch.setattr("paceline.cli.main", lambda: None)
    paceline_start.main()
    assert begun == [(sys.executable, [sys.executable, *sys.orig_argv[1:]], OURS)] * again


def test_if_it_cannot_begin_again_it_goes_on(monkeypatch) -> None:
    def fail(path: str, given: list[str]) -> None:
        raise OSError

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(paceline_start, "has_setting", lambda: True)
    monkeypatch.setattr(os, "execv", fail)
    paceline_start.begin_again()
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("value", "smallest"),
    [
        (OURS, paceline_start.SMALLEST),
        (f"glibc.malloc.check=1:{paceline_start.SETTING}=4096", 4096),
        ("glibc.malloc.check=1", None),
        (f"{paceline_start.SETTING}=much", None),
        ("", None),
    ],
)
def test_what_somebody_has_set_is_read(value: str, smallest: int | None, monkeypatch) -> None:
    monkeypatch.setattr(paceline_start, "has_setting", lambda: True)
    monkeypatch.setenv(VARIABLE, value)
    assert paceline_start.smallest() == smallest
    assert (VARIABLE in paceline_start.environment_without()) == (value != OURS)
    monkeypatch.setattr(paceline_start, "has_setting", lambda: False)
    assert paceline_start.smallest() is None
