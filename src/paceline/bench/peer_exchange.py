"""`paceline bench peers`: parameters exchanged with two neighbours and averaged; paceline beside a ring over Gloo.

Nothing is computed: both sides only send, receive and average. Everybody is warm, rounds are interleaved, medians
count; also those of the processor time of one peer, which others on the machine disturb less. Beside them the memory of
a peer, as it was found: the slots in /dev/shm, its parameters among them, and room for a gradient, over the size of the
model; and what is allowed, |in| (1 + max_gap) + 3.
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
from paceline.bench import competitors
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
    paceline_cpu_ms: float
    """The processor time of one peer."""
    gloo_cpu_ms: float
    cpu_ratio: float
    memory_floats: float
    """The most floats that any peer had, over `params`."""
    allowed_floats: int


def run(sizes: list[int], size: int, max_gap: int, rounds: int, say: Callable[[str], None]) -> list[Row]:
    return [_row(params, size, max_gap, rounds, say) for params in sizes]


def _row(params: int, size: int, max_gap: int, rounds: int, say: Callable[[str], None]) -> Row:
    policy = f"hop:graph=ring,max_gap={max_gap}"
    options = {"params": params, "warm": WARM, "count": max(20, 300_000_000 // max(params, 100_000))}
    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    held = 0.0
    for number in range(rounds):
        took_ms, worked_ms, floats = measure_paceline(policy, size, options)
        ours.append((took_ms, worked_ms))
        held = max(held, floats)
        measured = competitors.measure("ring", size, options)
        theirs.append((max(took for took, _ in measured), statistics.mean(worked for _, worked in measured)))
        say(f"{params:.0e} round {number + 1}/{rounds}: paceline {took_ms:.3g} ms, Gloo {theirs[-1][0]:.3g} ms")
    mine, mine_cpu = (statistics.median(values) for values in zip(*ours, strict=True))
    gloo, gloo_cpu = (statistics.median(values) for values in zip(*theirs, strict=True))
    allowed = NEIGHBOURS * (1 + max_gap) + 3
    return Row(params, size, policy, mine, gloo, gloo / mine, mine_cpu, gloo_cpu, gloo_cpu / mine_cpu, held, allowed)


def measure_paceline(policy: str, size: int, options: dict[str, Any]) -> tuple[float, float, float]:
    """Returns the milliseconds of the slowest peer's iteration, the mean processor time of a peer, and the most floats
    of one."""

    def work() -> None:
        world = session.init()
        parameter = torch.nn.Parameter(torch.zeros(options["params"]))
        opt = Optimizer(torch.optim.SGD([parameter], lr=0.1))
        for _ in range(options["warm"]):
            opt.step()
        began, worked = time.perf_counter(), time.process_time()
        for _ in range(options["count"]):
            opt.step()
        scale = 1000 / options["count"]
        session.log(loss=scale * (time.process_time() - worked))
        took_ms = scale * (time.perf_counter() - began)
        assert world.run is not None
        slots = sum(
            entry.stat().st_size for entry in os.scandir(world.run.folder) if is_slot_of(entry.name, world.rank)
        )
        gradient = 1
        session.log(loss=took_ms, accuracy=slots / (4 * options["params"]) + gradient)

    run = launch(work, workers=size, policy=policy)
    worked_ms = [point.loss for point in run.history if point.loss is not None and point.accuracy is None]
    whole = [(point.loss, point.accuracy) for point in run.history if point.accuracy is not None]
    return max(took or 0.0 for took, _ in whole), statistics.mean(worked_ms), max(floats for _, floats in whole)


def is_slot_of(name: str, rank: int) -> bool:
    return name.startswith(f"slot-{rank}.")
