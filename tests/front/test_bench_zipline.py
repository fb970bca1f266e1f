"""`paceline bench zipline`: that plan and the compiled search agree, what it prints, and without a compiler."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from paceline import cli
from paceline.bench import zipline as bench
from paceline.errors import PacelineError
from paceline.zipline import generate, zipline_opt_bs

compiler = shutil.which("g++")
needs_compiler = pytest.mark.skipif(compiler is None, reason="no g++")


@needs_compiler
def test_the_compiled_search_is_zipline_opt_bs_ties_included(tmp_path: Path) -> None:
    compiled = bench.compiled(compiler or "", tmp_path)
    random = np.random.default_rng(0)
    for _ in range(300):
        shape = (random.integers(1, 8), random.integers(1, 8))
        times = np.sort(random.integers(0, 12, shape), axis=1).astype(float)
        assert compiled(times) == zipline_opt_bs(times)
    times = generate(200, 15, random)
    assert compiled(times) == zipline_opt_bs(times)


@needs_compiler
def test_a_plan_is_sooner_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten times is what a quiet machine shows; tests run on busy ones, so twice."""
    path = tmp_path / "out.json"
    assert cli.run(["bench", "zipline", "--workers", "1000", "--rounds", "5", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["workers"], row["iterations"], row["paper_opt_bs_ms"]) == (1000, 150, 566.0)
    assert row["ratio"] > 2
    assert "ZipLineOptBS in C++" in capsys.readouterr().out


def test_without_a_compiler_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "COMPILERS", ("no-such-compiler",))
    path = tmp_path / "out.json"
    line = ["bench", "zipline", "--workers", "10", "--iterations", "3", "--rounds", "1", "--json", str(path)]
    assert cli.run(line) == 0
    said = capsys.readouterr().out
    assert "no C++ compiler (no-such-compiler), so ZipLineOptBS is not measured: install one" in said
    assert "\n-: there is no compiler for the search in C++, or the paper has no figure for this size\n" in said
    (row,) = json.loads(path.read_text())["rows"]
    assert row["ratio"] is None
    assert row["plan_ms"] > 0


def test_a_compiler_that_fails_is_named_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=r"^/bin/false cannot compile zipline_opt_bs.cpp: no message$"):
        bench.compiled("/bin/false", tmp_path)


def test_searches_that_differ_give_no_result() -> None:
    times = generate(10, 5, np.random.default_rng(0))
    wrong = bench.plan(times[:, :1])
    with pytest.raises(PacelineError, match="differ for 10 workers"):
        bench.measure({"plan": bench.plan, "opt_bs": lambda _: wrong}, times, 1)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--workers", "0"], "workers=0 is out of range: 1 or more"),
        (["--iterations", "0"], "iterations=0 is out of range: 1 or more"),
        (["--rounds", "0"], "rounds=0 is out of range: 1 or more"),
        (["--json", "no/such/folder/x.json"], "does not exist or cannot be written"),
    ],
)
def test_wrong_input_gets_one_line(option: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "zipline", *option]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
