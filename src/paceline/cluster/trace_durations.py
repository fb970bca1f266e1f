"""How long iterations took in a run that was recorded, worker by worker: from its trace, or from step times.

Where a worker's batches differ, its times tell how much of an iteration is fixed and how much is in proportion to its
samples (`fit_per_sample`).
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paceline.core.actions import Compute
from paceline.core.events import GradientReady
from paceline.core.trace import Trace
from paceline.errors import ConfigError, PacelineError

TRACE = "trace.jsonl"
SCENARIOS = Path(__file__).parent / "scenarios"


class Iteration(NamedTuple):
    """How long an iteration took, and what its gradient weighed: its samples, where batches are unequal."""

    seconds: float
    weight: float


Recording = tuple[tuple[Iteration, ...], ...]
"""The iterations of each worker."""


def iterations_in(file: str | None) -> Recording:
    """Returns the iterations of each worker that finished one."""
    if not file:
        raise ConfigError(f"replay needs file=PATH, a {TRACE} or the folder of a run that has one")
    path = Path(file) / TRACE if Path(file).is_dir() else Path(file)
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise ConfigError(f"replay:file={file} cannot be read: {error.strerror}") from None
    except PacelineError as error:
        raise ConfigError(f"replay:file={file}: {error}") from None


@lru_cache(maxsize=4)
def _read(path: Path, changed: int) -> Recording:
    """Reads the file once for each time `changed` at which it was written."""
    began: dict[tuple[int, int, int], float] = {}
    took: dict[int, list[Iteration]] = {}
    for record in Trace.from_bytes(path.read_bytes()):
        if record.node.role != "worker":
            continue
        rank, incarnation, event = record.node.rank, record.incarnation, record.event
        if isinstance(event, GradientReady) and (rank, incarnation, event.iteration) in began:
            seconds = event.at - began.pop((rank, incarnation, event.iteration))
            step = Iteration(seconds / event.steps, event.weight / event.steps)  # of a round, all steps as the mean
            took.setdefault(rank, []).extend([step] * event.steps)
        for action in record.actions:
            if isinstance(action, Compute):
                began[rank, incarnation, action.iteration] = event.at
    recording = tuple(tuple(took[rank]) for rank in sorted(took))
    if not any(seconds > 0 for mine in recording for seconds, _ in mine):
        raise PacelineError("no worker finished an iteration in this trace")
    return recording


@lru_cache(maxsize=4)
def production_job(job: str) -> Recording:
    """Returns the steps of one of the production jobs that come with paceline."""
    lines = (SCENARIOS / f"production-{job}.csv").read_text(encoding="utf-8").splitlines()
    _, *rows = [line.split(",")[1:] for line in lines if not line.startswith("#")]
    return tuple(tuple(Iteration(float(seconds), 1.0) for seconds in rank) for rank in zip(*rows, strict=True))


def mean_weight(recording: Recording) -> float:
    """Returns the mean over workers of what their gradients weighed: an equal batch."""
    return float(np.mean([np.mean([weight for _, weight in mine]) for mine in recording]))


def fit_per_sample(recording: Recording) -> float | None:
    """Returns the part of an iteration on an equal batch that is in proportion to the samples; None if none varied.

    It is a line through each worker's times by its samples; workers whose samples varied more count for more.
    """
    mean = mean_weight(recording)
    fixed = growing = 0.0
    for mine in recording:
        seconds, weights = (np.array(column) for column in zip(*mine, strict=True))
        spread = float(np.var(weights)) / mean**2
        if spread > 1e-6:
            slope = max(0.0, float(np.cov(weights, seconds, bias=True)[0, 1] / np.var(weights)))
            rest = max(0.0, float(np.mean(seconds) - slope * np.mean(weights)))
            total = slope * mean + rest
            if total > 0:
                growing += spread * slope * mean / total
                fixed += spread * rest / total
    return growing / (growing + fixed) if growing + fixed else None
