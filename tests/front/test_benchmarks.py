"""The commands of `benchmarks/` that are too long for the suite: they use what there is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOUND = ("[attr-defined]", "[call-arg]", "[import-not-found]", "[name-defined]")


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_benchmarks_use_what_there_is() -> None:
    """mypy sees attributes, arguments and modules that have another name now."""
    command = [sys.executable, "-m", "mypy", "--no-strict-optional", "--implicit-reexport", "--ignore-missing-imports"]
    quiet = ["--follow-imports=silent", "--no-warn-unused-ignores", "--explicit-package-bases", "--cache-dir=/dev/null"]
    said = subprocess.run([*command, *quiet, "benchmarks"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "Found" in said.stdout or "Success" in said.stdout, said.stdout + said.stderr
    wrong = [line for line in said.stdout.splitlines() if line.startswith("benchmarks/") and line.endswith(FOUND)]
    assert wrong == []
