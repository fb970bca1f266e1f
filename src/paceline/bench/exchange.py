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
from paceline.bench import peers
from paceline.core.messages import Members
from paceline.optim import Optimizer
from paceline.runtime.live import memory
from paceline.runtime.live.configuration import Abroad
from paceline.runtime.live.driver.children import function_starter
from paceline.runtime.live.driver.launch import Driver, LivePlan
from paceline.runtime.live.server.together import MOST, WORTH_IT
from paceline.tensors import passes

SIZES = {100_000: (100, 1000), 1_000_000: (100, 300), 10_000_000: (10, 50)}
"""Parameters: (exchanges thrown away, exchanges measured)."""


@dataclass
class Row:
    mode: str
    params: int
    workers: int
    transport: str
    wire: str
    """How floats travel."""
    keys: bool
    """With CURVE."""
    paceline: float
    unit: str
    peers: dict[str, float]
    ratio: float
    floor: float
    unlocked: float | None
    """torch RPC without a lock, which mixes versions: it is no peer."""
    shared_floats: float | None
    """Floats in /dev/shm and in the server, over `params`: at most workers + 2 (SGD has no state); None over TCP."""


def run(sizes: list[int], workers: int, rounds: int, say: Callable[[str], None]) -> list[Row]:
    rows = []
    for params in sizes:
        options = {**counts(params), "transport": "shm"}
        for mode in ("asp", "bsp"):
            rows.append(_row(mode, params, workers, rounds, options, say))
    return rows


def counts(params: int) -> dict[str, int]:
    """How many exchanges, of what size."""
    warm, count = SIZES.get(params, (100, min(1000, max(20, 30_000_000 // params))))
    return {"params": params, "warm": warm, "count": count}


def _row(mode: str, params: int, workers: int, rounds: int, options: dict[str, Any], say: Callable[[str], None]) -> Row:
    ours: list[float] = []
    shared: list[float] = []
    theirs: dict[str, list[float]] = {}
    torn: list[float] = []
    bandwidth = 0.0
    for number in range(rounds):
        bandwidth = max(bandwidth, copy_bandwidth(params, workers))
        rate, floats = measure_paceline(mode, workers, options)
        ours.append(rate if mode == "asp" else 1000 * workers / rate)
        shared.append(floats)
        for name, value in _measure_peers(mode, workers, options).items():
            theirs.setdefault(name, []).append(value)
        if mode == "asp":
            torn.append(sum(peers.measure("rpc_unlocked", workers + 1, options)))
        latest = ", ".join(f"{name} {values[-1]:.4g}" for name, values in theirs.items())
        say(f"{mode} {params:.0e} round {number + 1}/{rounds}: paceline {ours[-1]:.4g}, {latest}")
    medians = {name: statistics.median(values) for name, values in theirs.items()}
    value = statistics.median(ours)
    faster = mode == "asp"
    ratio = value / max(medians.values()) if faster else min(medians.values()) / value
    unit = "pushes/s" if faster else "ms"
    floor = _floor(mode, params, workers, bandwidth)
    unlocked = statistics.median(torn) if torn else None
    return Row(
        mode, params, workers, "shm", "float32", False, value, unit, medians, ratio, floor, unlocked, max(shared)
    )


def _measure_peers(mode: str, workers: int, options: dict[str, Any]) -> dict[str, float]:
    if mode == "bsp":
        return {"ddp": max(peers.measure("ddp", workers, options))}
    measured = {"torch_rpc": sum(peers.measure("rpc", workers + 1, options))}
    if peers.has_ray():
        measured["ray"] = peers.measure("ray", workers, options)[0]
    return measured


def measure_paceline(
    mode: str, workers: int, options: dict[str, Any], abroad: Abroad | None = None
) -> tuple[float, float]:
    """Pushes a second of all workers together, and floats of shared memory over parameters."""

    def work() -> None:
        world = session.init()
        parameter = torch.nn.Parameter(torch.zeros(options["params"]))
        parameter.grad = torch.full((options["params"],), 1e-6)
        opt = Optimizer(torch.optim.SGD([parameter], lr=0.1))
        for _ in range(options["warm"]):
            opt.step()
        began = time.perf_counter()
        for _ in range(options["count"]):
            opt.step()
        rate = options["count"] / (time.perf_counter() - began)
        assert world.live is not None
        held = held_in(world.live.folder)
        # If the server's own copy is not in /dev/shm it has one all the same.
        private = 0 if (world.live.folder / memory.COMMON).exists() else 1
        session.log(loss=rate, accuracy=held / (4 * options["params"]) + private)

    run = Driver(LivePlan(Members(workers, 1), function_starter(work), policies.parse(mode), abroad=abroad)).run()
    rates = [point.loss for point in run.history if point.loss is not None]
    held = [point.accuracy for point in run.history if point.accuracy is not None]
    return sum(rates), max(held)


def without_a_lock(rows: list[Row]) -> list[str]:
    """What torch RPC does if its answers may be of two versions at once, in words: a line for each size."""
    return [
        f"torch RPC at {row.params:.0e} without a lock, mixing versions: {row.unlocked:.4g} pushes/s "
        f"(paceline {row.paceline / row.unlocked:.2f}x)"
        for row in rows
        if row.unlocked is not None
    ]


def held_in(folder: Path) -> int:
    """Bytes of all segments there. Those of workers that are done may be gone; whoever is done first sees all."""
    held = 0
    for entry in folder.iterdir():
        if entry.name.startswith(("worker", memory.WHOLE, memory.COMMON)):
            with contextlib.suppress(FileNotFoundError):
                held += entry.stat().st_size
    return held


def _floor(mode: str, params: int, workers: int, bandwidth: float) -> float:
    """The best that memory allows, over the bandwidth of copies of such gradients on all cores.

    A push: copy the gradient in (read, write) and apply it (read it, read and write the parameters, write them back).
    For large models the parameters are read and written once for several pushes. An iteration under BSP: copy all
    gradients in, read them, read and write the parameters, which all read there.
    """
    if mode == "asp":
        together = min(MOST, workers) if params >= WORTH_IT else 1
        return bandwidth / (4 * params * (4 + 2 / together))
    return 1000 * 4 * params * (3 * workers + 2) / bandwidth


def copy_bandwidth(params: int, workers: int) -> float:
    """Bytes a second (read plus written) that all cores move as they copy so many gradients of so many workers, again
    and again: small ones never leave the caches, in an exchange as here. The best that was found."""
    pairs = [(torch.ones(params), torch.zeros(params)) for _ in range(workers)]
    turns = max(1, (1 << 24) // (params * workers))
    cores = len(os.sched_getaffinity(0))

    def copy(first: int, around: bool) -> None:
        for _ in range(turns):
            for source, target in pairs[first::cores]:
                if around:
                    passes.copy_and_look(source, target, around)
                else:
                    target.copy_(source)

    best = 0.0
    with ThreadPoolExecutor(cores) as threads:
        for number in range(10):
            began = time.perf_counter()
            list(threads.map(copy, range(cores), [number % 2 == 1] * cores))
            best = max(best, 2 * 4 * params * workers * turns / (time.perf_counter() - began))
    return best
