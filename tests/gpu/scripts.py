"""Runs the scripts of this folder: processes that fork others, which no process that has used CUDA can."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def run(script: str, *arguments: str, timeout: float = 110) -> dict:
    """Returns what the script says in its last line."""
    command = [sys.executable, str(Path(__file__).parent / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
