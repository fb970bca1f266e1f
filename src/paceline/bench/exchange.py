"""`paceline bench exchange`: push a gradient, get parameters back; paceline, DDP, torch RPC and Ray side by side.

Everybody is warm (the first exchanges are thrown away), rounds are interleaved, the median counts. Beside each
figure stands the floor: the bytes that must move, over the copy bandwidth measured in the same run. Here all use shared
memory; `tcp_exchange.py` has the same as between hosts.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline import policies, session
from paceline.bench import competitors
from paceline.bench.rounds import in_turn
from paceline.core.messages import Members
from paceline.function_workers import function_starter
from paceline.optim import Optimizer
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.protocol.configuration import MultihostOptions
from paceline.runtime.live.server.push_batching import MOST, WORTH_IT
from paceline.runtime.live.storage import shared_memory
from paceline.tensors import fused_kernels

SIZES = {100_000: (100, 1000), 1_000_000: (100, 300), 10_000_000: (10, 50)}
"""For each number of parameters: (exchanges thrown away, exchanges measured)."""


@dataclass
class Row:
    mode: str
    optimizer: str
    params: int
    workers: int
    transport: str
    wire: str
    """How floats are sent."""
    keys: bool
    """Whether the exchange is encrypted, with keys."""
    paceline: float
    unit: str
    peers: dict[str, float]
    ratio: float
    floor: float
    unlocked: float | None
    """torch RPC without a lock, which mixes versions, so it is no competitor."""
    shared_floats: float | None
    """The floats in /dev/shm and in the server, over `params`: at most workers + 2, besides what the optimizer keeps;
    None over TCP."""


def run(sizes: list[int], workers: int, rounds: int, optimizer: str, say: Callable[[str], None]) -> list[Row]:
    rows = []
    for params in sizes:
        options = {**counts(params), "transport": "shm", "optimizer": optimizer}
        for mode in ("asp", "bsp"):
            rows.append(_row(mode, params, workers, rounds, options, say))
    return rows


def counts(params: int) -> dict[str, int]:
    """Returns how many exchanges there are, and of what size."""
    warm, count = SIZES.get(params, (100, min(1000, max(20, 30_000_000 // params))))
    return {"params": params, "warm": warm, "count": count}


def _row(mode: str, params: int, workers: int, rounds: int, options: dict[str, Any], say: Callable[[str], None]) -> Row:
    def ours() -> float:
        bandwidths.append(copy_bandwidth(params, workers))
        rate, floats = measure_paceline(mode, workers, options)
        shared.append(floats)
        return rate if mode == "asp" else 1000 * workers / rate

    def told(number: int, found: dict[str, list[float]]) -> None:
        latest = ", ".join(f"{name} {values[-1]:.4g}" for name, values in found.items() if name != "unlocked")
        say(f"{mode} {params:.0e} round {number}/{rounds}: {latest}")

    bandwidths: list[float] = []
    shared: list[float] = []
    peers = peers_in_bsp(workers, options) if mode == "bsp" else peers_in_asp(workers, options)
    unlocked = {"unlocked": lambda: sum(competitors.measure("rpc_unlocked", workers + 1, options))}
    # An optimizer with a state cannot be stepped by several threads at once: it fails.
    with_unlocked = mode == "asp" and options["optimizer"] == "sgd"
    ways = {"paceline": ours, **peers, **(unlocked if with_unlocked else {})}
    medians = {name: statistics.median(values) for name, values in in_turn(ways, rounds, told).items()}
    value, torn = medians.pop("paceline"), medians.pop("unlocked", None)
    faster = mode == "asp"
    ratio = value / max(medians.values()) if faster else min(medians.values()) / value
    unit = "pushes/s" if faster else "ms"
    optimizer = options["optimizer"]
    floor = _floor(mode, params, workers, max(bandwidths), competitors.STATES[optimizer])
    return Row(
        mode, optimizer, params, workers, "shm", "float32", False, value, unit, medians, ratio, floor, torn, max(shared)
    )


def peers_in_bsp(workers: int, options: dict[str, Any]) -> dict[str, Callable[[], float]]:
    return {"ddp": lambda: max(competitors.measure("ddp", workers, options))}


def peers_in_asp(workers: int, options: dict[str, Any]) -> dict[str, Callable[[], float]]:
    """Returns who is compared with, each with what measures its pushes a second."""
    ways: dict[str, Callable[[], float]] = {"torch_rpc": lambda: sum(competitors.measure("rpc", workers + 1, options))}
    if competitors.has_ray():
        ways["ray"] = lambda: competitors.measure("ray", workers, options)[0]
    return ways


def measure_paceline(
    mode: str, workers: int, options: dict[str, Any], multihost: MultihostOptions | None = None
) -> tuple[float, float]:
    """Returns the pushes a second of all workers together, and the floats of shared memory over parameters."""

    def work() -> None:
        world = session.init()
        parameter = torch.nn.Parameter(torch.zeros(options["params"]))
        parameter.grad = torch.full((options["params"],), 1e-6)
        opt = Optimizer(competitors.make_optimizer(options.get("optimizer", "sgd"), parameter))
        for _ in range(options["warm"]):
            opt.step()
        began = time.perf_counter()
        for _ in range(options["count"]):
            opt.step()
        rate = options["count"] / (time.perf_counter() - began)
        assert world.run is not None
        held = held_in(world.run.folder)
        # If the server's own copy is not in /dev/shm it has one all the same.
        private = 0 if (world.run.folder / shared_memory.COMMON).exists() else 1
        session.log(loss=rate, accuracy=held / (4 * options["params"]) + private)

    run = Driver(RunPlan(Members(workers, 1), function_starter(work), policies.parse(mode), multihost=multihost)).run()
    rates = [point.loss for point in run.history if point.loss is not None]
    held = [point.accuracy for point in run.history if point.accuracy is not None]
    return sum(rates), max(held)


def without_a_lock(rows: list[Row]) -> list[str]:
    """Says, in a line for each size, what torch RPC does if its answers may be of two versions at once."""
    return [
        f"torch RPC at {row.params:.0e} without a lock, mixing versions: {row.unlocked:.4g} pushes/s "
        f"(paceline {row.paceline / row.unlocked:.2f}x)"
        for row in rows
        if row.unlocked is not None
    ]


def held_in(folder: Path) -> int:
    """Returns the bytes of all segments there. Those of workers that are done may be gone; the first that is done sees
    all."""
    held = 0
    for entry in folder.iterdir():
        if entry.name.startswith(("worker", shared_memory.WHOLE, shared_memory.COMMON)):
            with contextlib.suppress(FileNotFoundError):
                held += entry.stat().st_size
    return held


def _floor(mode: str, params: int, workers: int, bandwidth: float, states: int) -> float:
    """Returns the best that memory allows, over the bandwidth of copies of such gradients on all cores.

    A push: copy the gradient in (read, write) and apply it (read it, read and write the parameters, write them back).
    For large models the parameters are read and written once for several pushes. An iteration under BSP: copy all
    gradients in, read them, read and write the parameters, which all read there. What the optimizer keeps is read and
    written as often as the parameters.
    """
    if mode == "asp":
        together = min(MOST, workers) if params >= WORTH_IT else 1
        return bandwidth / (4 * params * (4 + 2 * (1 + states) / together))
    return 1000 * 4 * params * (3 * workers + 2 * (1 + states)) / bandwidth


def copy_bandwidth(params: int, workers: int) -> float:
    """Returns the most bytes a second (read plus written) that all cores move as they copy so many gradients of so many
    workers.

    They copy them again and again: small ones never leave the caches, in an exchange as here.
    """
    pairs = [(torch.ones(params), torch.zeros(params)) for _ in range(workers)]
    turns = max(1, (1 << 24) // (params * workers))
    cores = len(os.sched_getaffinity(0))

    def copy(first: int, around: bool) -> None:
        for _ in range(turns):
            for source, target in pairs[first::cores]:
                if around:
                    fused_kernels.copy_and_check_finite(source, target, around)
                else:
                    target.copy_(source)

    best = 0.0
    with ThreadPoolExecutor(cores) as threads:
        for number in range(10):
            began = time.perf_counter()
            list(threads.map(copy, range(cores), [number % 2 == 1] * cores))
            best = max(best, 2 * 4 * params * workers * turns / (time.perf_counter() - began))
    return best
