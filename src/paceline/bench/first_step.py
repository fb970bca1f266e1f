"""Runs a script and says when its first step was taken: `python first_step.py SCRIPT [arguments]`.

Under torchrun the script is alone in its world: each rank imports what a worker imports, and waits for nobody.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from paceline import Optimizer, session

MARK = "first step:"


def megabytes() -> float:
    """Returns the memory of this process; what it shares with n others counts for one part in n + 1."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def main() -> None:
    step = Optimizer.step

    def first(optimizer: Optimizer, *given: Any) -> Any:
        Optimizer.step = step  # type: ignore[method-assign]
        answer = optimizer.step(*given)
        print(f"\n{MARK} {time.monotonic()} {megabytes()}", flush=True)
        return answer

    Optimizer.step = first  # type: ignore[method-assign, assignment]
    for name in session.LAUNCHED:
        os.environ.pop(name, None)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
