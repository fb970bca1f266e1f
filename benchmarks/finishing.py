"""What a model is worth when the first worker has done its iterations, and when the straggler has.

    python benchmarks/finishing.py [POLICY ...]

A virtual run with one slow worker of sixteen and a fixed number of iterations: when the others are done, the slow one
trains on alone. Workers that have finished keep their share of N, so its steps stay lr/16, and the model stays as good.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline import simulate
from paceline.core.actions import Apply
from paceline.core.events import GradientReady, ParametersArrived

WORKERS = 16
POLICIES = ("asp", "ssp", "dssp", "pssp", "elastic", "specsync", "waiting")
"""Those that step on arrival; any policy may be named."""


class Row(NamedTuple):
    policy: str
    first_done: float
    """Test accuracy when the first worker is done."""
    end: float
    """Test accuracy at the end of the run."""
    weights: frozenset[float]
    """The weights of all steps."""


def measure(policy: str) -> Row:
    """Train once under this policy."""
    run = simulate(
        "digits-mlp", policy, workers=WORKERS, cluster="one-slow:factor=4", iterations=60, optimizer="sgd:lr=1.0",
        batch=8, seed=0,
    )  # fmt: skip
    own = (GradientReady, ParametersArrived)  # the latter only where there are servers
    last_s = {record.node: record.event.at for record in run.trace if isinstance(record.event, own)}
    before = [point for point in run.history if point.time_s <= min(last_s.values())]
    steps = [action for record in run.trace for action in record.actions if isinstance(action, Apply)]
    weights = frozenset(step.weight for step in steps)
    return Row(policy, before[-1].accuracy or 0.0, run.history[-1].accuracy or 0.0, weights)


def rows(policies: Sequence[str] = POLICIES) -> Iterator[Row]:
    """One row for each policy."""
    return map(measure, policies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policies", nargs="*", default=POLICIES, metavar="POLICY")
    options = parser.parse_args()
    print(f"{'policy':36} {'first worker done':>18} {'end':>8}   accuracy, digits-mlp, {WORKERS} workers")
    for row in rows(options.policies):
        print(f"{row.policy:36} {row.first_done:18.3f} {row.end:8.3f}")


if __name__ == "__main__":
    main()
