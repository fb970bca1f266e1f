"""`paceline bench peers`: parameters exchanged with two neighbours and averaged; paceline beside a ring over Gloo.

Nothing is computed: both sides only send, receive and average. Everybody is warm, rounds are interleaved, medians
count. Beside them the memory of a peer, as it was found: the slots in /dev/shm, its parameters among them, and room for
a gradient, over the size of the model; and what is allowed, |in| (1 + max_gap) + 3.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline import session
from paceline.api import launch
from paceline.bench import peers
from paceline.optim import Optimizer

NEIGHBOURS = 2
WARM = 50


@dataclass
class Row:
    params: int
    peers: int
    policy: str
    paceline_ms: float
    gloo_ms: float
    ratio: float
    memory_floats: float
    """Of one peer, over `params`: the most that any peer had."""
    allowed_floats: int


def run(sizes: list[int], size: int, max_gap: int, rounds: int, say: Callable[[str], None]) -> list[Row]:
    return [_row(params, size, max_gap, rounds, say) for params in sizes]


def _row(params: int, size: int, max_gap: int, rounds: int, say: Callable[[str], None]) -> Row:
    policy = f"hop:graph=ring,max_gap={max_gap}"
    options = {"params": params, "warm": WARM, "count": max(20, 300_000_000 // max(params, 100_000))}
    ours: list[float] = []
    theirs: list[float] = []
    held: list[float] = []
    for number in range(rounds):
        took_ms, floats = measure_paceline(policy, size, options)
        ours.append(took_ms)
        held.append(floats)
        theirs.append(max(peers.measure("ring", size, options)))
        say(f"{params:.0e} round {number + 1}/{rounds}: paceline {ours[-1]:.3g} ms, Gloo {theirs[-1]:.3g} ms")
    mine, gloo = statistics.median(ours), statistics.median(theirs)
    allowed = NEIGHBOURS * (1 + max_gap) + 3
    return Row(params, size, policy, mine, gloo, gloo / mine, max(held), allowed)


def measure_paceline(policy: str, size: int, options: dict[str, Any]) -> tuple[float, float]:
    """Milliseconds of one iteration of the slowest peer, and the most floats of a peer, over parameters."""

    def work() -> None:
        world = session.init()
        parameter = torch.nn.Parameter(torch.zeros(options["params"]))
        opt = Optimizer(torch.optim.SGD([parameter], lr=0.1))
        for _ in range(options["warm"]):
            opt.step()
        began = time.perf_counter()
        for _ in range(options["count"]):
            opt.step()
        took_ms = 1000 * (time.perf_counter() - began) / options["count"]
        assert world.live is not None
        slots = sum(
            entry.stat().st_size for entry in os.scandir(world.live.folder) if is_slot_of(entry.name, world.rank)
        )
        gradient = 1
        session.log(loss=took_ms, accuracy=slots / (4 * options["params"]) + gradient)

    run = launch(work, workers=size, policy=policy)
    times_ms = [point.loss for point in run.history if point.loss is not None]
    floats = [point.accuracy for point in run.history if point.accuracy is not None]
    return max(times_ms), max(floats)


def is_slot_of(name: str, rank: int) -> bool:
    return name.startswith(f"slot-{rank}.")
