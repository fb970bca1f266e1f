"""Measures that the reproductions of Hop share. Loss and accuracy are those of the average of the peers."""

from __future__ import annotations

from statistics import fmean

from paceline.api import simulate
from paceline.core.actions import Reduce
from paceline.core.spec import write_value
from paceline.report.peers import apartness
from paceline.reproductions.base import Row
from paceline.run import Run

PEERS_BATCH = 16
RATE = 0.2


def train(
    policy: str, peers: int, cluster: str, iterations: int, seed: int, shards: str = "shuffled", device: str = "cpu"
) -> Run:
    """Trains digits-mlp by SGD, with a batch of 16 for each peer."""
    return simulate(
        "digits-mlp", policy, workers=peers, cluster=cluster, iterations=iterations, batch=PEERS_BATCH,
        optimizer=f"sgd:lr={write_value(RATE)}", seed=seed, shards=shards, device=device,
    )  # fmt: skip


def pace(run: Run, without: int | None = None) -> float:
    """Returns the mean seconds from one iteration to the next, over the peers but for `without`."""
    return fmean(seconds for peer, seconds in apartness(run.trace).iteration_s.items() if peer != without)


def loss_after(run: Run, updates: int) -> float:
    """Returns the loss when each peer had made so many steps, in the mean."""
    return next((point.loss or 0.0 for point in run.history if point.updates >= updates), run.history[-1].loss or 0.0)


def reached_loss_s(run: Run, loss: float) -> float | None:
    """Returns when the loss was first so low."""
    return next((p.time_s for p in run.history if p.loss is not None and p.loss <= loss), None)


def lead(run: Run) -> float:
    """Returns by how many iterations what went into an average was ahead of the peer, weighted, in the mean."""
    averages = [action for record in run.trace for action in record.actions if isinstance(action, Reduce)]
    ahead = (
        weight * (handle.iteration - average.iteration)
        for average in averages
        for handle, weight in zip(average.handles, average.weights, strict=True)
    )
    return sum(ahead) / len(averages)


def times_sooner(row: Row, base: Row, key: str) -> float:
    """Returns how many times sooner `row` got there than `base`; 0 if it never did."""
    return float(base[key] / row[key]) if row[key] and base[key] else 0.0


def format_times(times: float) -> str:
    return f"{times:.2f}x" if times else "never in so many iterations"
