"""The paper's synthetic workers (Zhao et al. 2021, section 6.1).

Each worker has an interval, uniform in 1000 to 1500 ms, and a start, uniform in 10 to 50 ms; its j-th iteration ends
at start + j * interval. The generator "simulates the iterations of all the workers for a short period" before the next
R are predicted; how short, the paper does not say. It matters: straight from the common start all first iterations
end within half a second of each other, the first column is always the best choice, and every heuristic finds it.
After 30 s workers are out of step, and the waits are those of the paper's Table 3.
"""

from __future__ import annotations

import numpy as np

from paceline.errors import ConfigError
from paceline.policies.zipline import Times

INTERVAL_MS = (1000.0, 1500.0)
START_MS = (10.0, 50.0)
RUN_MS = 30_000.0


def generate(workers: int, iterations: int, random: np.random.Generator, run_ms: float = RUN_MS) -> Times:
    """Returns when each worker will end each of its next iterations, in ms, after all have run for `run_ms`."""
    if workers < 1 or iterations < 1 or workers != int(workers) or iterations != int(iterations):
        raise ConfigError(f"a matrix of {workers} workers and {iterations} iterations: whole numbers from 1 on")
    interval = random.uniform(*INTERVAL_MS, (workers, 1))
    start = random.uniform(*START_MS, (workers, 1))
    done = np.maximum(0, np.floor((run_ms - start) / interval))
    times: Times = start + (done + np.arange(1, iterations + 1)) * interval
    return times
