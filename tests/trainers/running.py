"""Runs of a trainer's script: alone, and by several workers, each in a folder of its own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked

HERE = Path(__file__).parent


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips a test where one of these packages is not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def alone(script: str, folder: Path, *options: object) -> str:
    """Runs the script in a world of one; returns what it prints."""
    return _run([HERE / script, *options], folder)


def together(script: str, folder: Path, policy: str, *options: object, workers: int = 2, servers: int = 2) -> str:
    """Runs the script in several workers; returns what they print."""
    count = [] if policy.startswith(("hop", "adpsgd")) else ["--servers", servers]
    command = ["-m", "paceline", "run", "--workers", workers, *count, "--policy", policy, HERE / script, *options]
    return _run(command, folder)


def _run(command: list[object], folder: Path) -> str:
    folder.mkdir()
    done = forked.run(command, cwd=folder, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def difference(one: Any, other: Any) -> float:
    """Returns the largest difference of any two tensors at the same place of two nested structures."""
    if isinstance(one, torch.Tensor):
        return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max((difference(one[key], other[key]) for key in one), default=0.0)
    if isinstance(one, list | tuple):
        return max((difference(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    return 0.0
