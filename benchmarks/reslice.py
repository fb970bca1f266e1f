"""How much moves, and how long training is held, when the number of servers changes in a live run.

    python benchmarks/reslice.py                  # 3 workers, SSP, Adam, models of 1e5 to 1e7 parameters
    python benchmarks/reslice.py --parameters 1000000 --compute-s 0.05

For each size one run that goes through 2, 3, 2, 1, 4 and 1 servers, each asked for ten iterations after the last.
`held` is from telling the workers to stand still until they are told to go on; `moving` is the part of it in which
nobody computes: servers give, take, start and end. The rest is the slowest worker's way to its next push. `least` is
the share that must move, from the numbers of servers alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn

import paceline
from paceline.cluster import Resize, load
from paceline.run import ServerChange

SERVERS = (2, 3, 2, 1, 4, 1)
EVERY = 10


def train(parameters: int, iterations: int) -> None:
    """A model of this size whose gradients cost nothing."""
    paceline.init()
    model = nn.Linear(parameters // 100, 100, bias=False)
    opt = paceline.Optimizer(torch.optim.Adam(model.parameters(), lr=1e-4), model=model)
    gradient = torch.randn_like(model.weight)
    while opt.global_step < iterations:
        model.weight.grad = gradient
        opt.step()


def measure(parameters: int, compute_s: float, policy: str) -> tuple[list[ServerChange], float]:
    resizes = tuple(Resize(count, at_iteration=EVERY * n) for n, count in enumerate(SERVERS[1:], 1))
    scenario = replace(load(f"steady:compute_s={compute_s}"), resizes=resizes)
    iterations = EVERY * len(SERVERS) + round(3 / compute_s)
    started = time.monotonic()
    run = paceline.launch(
        lambda: train(parameters, iterations), workers=3, servers=SERVERS[0], policy=policy, cluster=scenario
    )
    assert [change.after for change in run.server_changes] == list(SERVERS[1:]), run.server_changes
    return run.server_changes, time.monotonic() - started


def least(before: int, after: int) -> float:
    """The share of equal slices that has to move."""
    return abs(after - before) / max(after, before)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--compute-s", type=float, default=0.02, help="seconds an iteration takes each worker")
    parser.add_argument("--policy", default="ssp:staleness=3")
    given = parser.parse_args(arguments)
    print("parameters  servers  moved    least    held s  moving s")
    for parameters in given.parameters:
        changes, took_s = measure(parameters, given.compute_s, given.policy)
        for (before, after), change in zip(pairwise(SERVERS), changes, strict=True):
            print(
                f"{parameters:>10}  {before} -> {after}   {change.moved_share:6.2%}  {least(before, after):6.2%}"
                f"  {change.held_s:6.3f}  {change.moving_s:8.3f}"
            )
        print(f"{'':>10}  the run took {took_s:.1f} s")


if __name__ == "__main__":
    main()
