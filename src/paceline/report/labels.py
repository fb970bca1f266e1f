"""What the page calls things: workers push and pull; where there are no servers, peers send updates."""

from __future__ import annotations

import re

from paceline.report.report_model import RunView

GLOSSARY = (
    ("waiting", "share of the workers' lifetimes in which their pulls were parked"),
    ("DPR", "delayed pull request: a pull that a shard parked; per 100 iterations, all workers and shards"),
    (
        "updates stale",
        "updates a shard took between handing out parameters and using the gradient they led to; "
        "a bound in a policy's name, as staleness=3, counts iterations of workers instead",
    ),
    ("dropped", "gradients that did not count on at least one shard"),
)
OF_PEERS = (
    ("waiting", "share of the peers' lifetimes in which they waited for their neighbours"),
    ("iterations stale", "how many iterations older a neighbour's parameters were than the average they went into"),
    ("dropped", "parameters that came too late for any average, and gradients that were not finite or were skipped"),
    ("updates", "steps of each peer's own optimizer, in the mean"),
)

STALE = (
    "Share of the gradients by staleness: how many updates were made between reading the parameters and using the "
    "gradient. "
)
STALE_OF_PEERS = (
    "Share of the neighbours' parameters by staleness: how many iterations older they were than the average they went "
    "into. "
)
STALENESS = re.compile("(updates|iterations) stale")
AXES = "All runs have the same axis across, each its own upwards."

CAUSES = "Seconds of waiting of all workers, by the worker whose push ended it; below, by the reason given."
CAUSES_OF_PEERS = "Seconds of waiting of all peers, by the peer whose message ended it; below, by the reason given."


def figure(metric: str, value: float) -> str:
    """The value of a metric as it is told: of accuracy three decimals, of others four digits."""
    return f"{value:.3f}" if metric == "accuracy" else f"{value:.4g}"


def all_peers(runs: list[RunView]) -> bool:
    """Whether none of the runs had servers."""
    return bool(runs) and all(run.peers is not None for run in runs)


def noun(runs: list[RunView]) -> str:
    """Returns what those who compute are called; workers, if they are that in one of the runs."""
    return "peer" if all_peers(runs) else "worker"


def glossary(runs: list[RunView]) -> tuple[tuple[str, str], ...]:
    if all_peers(runs):
        return OF_PEERS
    if not any(run.peers is not None for run in runs):
        return GLOSSARY
    both = GLOSSARY + tuple((f"{term}, of peers", meaning) for term, meaning in OF_PEERS)
    return tuple((STALENESS.sub("staleness", term), meaning) for term, meaning in both)


def causes(runs: list[RunView]) -> str:
    return CAUSES_OF_PEERS if all_peers(runs) else CAUSES


def moved(runs: list[RunView]) -> str:
    """Returns the heading over how much was sent."""
    if all_peers(runs):
        return "MB sent"
    return "MB pushed / pulled" + (", or sent" if any(run.peers is not None for run in runs) else "")


def stale(runs: list[RunView]) -> str:
    return "How stale the updates were" if all_peers(runs) else "How stale the gradients were"


def stale_note(runs: list[RunView]) -> str:
    if all_peers(runs):
        return STALE_OF_PEERS + AXES
    return STALE + (f"Of peers: {STALE_OF_PEERS}" if any(run.peers is not None for run in runs) else "") + AXES
