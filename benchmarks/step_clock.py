"""What measuring an iteration costs: the calls of `StepClock` and `TurnClock`, alone, with caches warm and cold.

    python benchmarks/step_clock.py [--cold]

Cold: 8 MB are written between two iterations, as a gradient is. Prints microseconds of an iteration.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from paceline.core.messages import Node
from paceline.runtime.live.trainer.step_clock import StepClock


def measure(iterations: int, cold: bool) -> list[float]:
    """Returns the seconds that measuring each of some iterations took."""
    memory, took = np.zeros(1 << 20), []
    with tempfile.TemporaryDirectory() as folder:
        run: Any = SimpleNamespace(
            rank=0, incarnation=0, epoch_s=time.monotonic(), config=SimpleNamespace(output=folder)
        )
        clock = StepClock(run, Node("worker", 0))
        clock.introduce(("memory",))
        for iteration in range(iterations):
            if cold:
                memory += 1.0
            before = time.perf_counter()
            clock.prepared()
            clock.computed()
            clock.injected()
            clock.copied()
            clock.pushed()
            clock.answered(iteration)
            took.append(time.perf_counter() - before)
        clock.close()
        assert next(Path(folder).iterdir()).stat().st_size > 0
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--cold", action="store_true")
    arguments = parser.parse_args()
    took = [1e6 * seconds for seconds in measure(arguments.iterations, arguments.cold)]
    print(f"mean {statistics.fmean(took):.1f} us, median {statistics.median(took):.1f} us, of an iteration")


if __name__ == "__main__":
    main()
