"""What `overlap=True` saves: how long `step` takes after backward, with and without. A command, not a test:

    python benchmarks/overlap.py --json overlap.json                  # ten million parameters, on the CPU
    python benchmarks/overlap.py --device cuda --params 100000000
    python benchmarks/overlap.py --transport tcp --batch 128 --link-mb-s 400    # as between hosts, with keys

Runs with and without are interleaved; medians are given. On the CPU the copying moves from `step` into backward,
where the gradient is still in the cache; on a GPU it runs beside backward. Over TCP frames leave in backward too, by a
thread of the link's. The loopback itself is as fast as a core is free to encrypt and copy; with --link-mb-s the kernel
holds what a worker sends to so much (SO_MAX_PACING_RATE), as a network would. Answers come at full speed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import socket
import statistics
import time
from pathlib import Path

import torch
from torch import nn

import paceline
from paceline import policies
from paceline.core.messages import Members
from paceline.function_workers import function_starter
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.protocol.configuration import MultihostOptions

LAYERS = 10
SO_MAX_PACING_RATE = 47
"""Of Linux; Python has no name for it."""
PARTS = ("backward", "step", "iteration")


def measure(args: argparse.Namespace, overlap: bool) -> dict[str, list[float]]:
    """Milliseconds of each part, from all iterations of worker 0."""
    width = round(math.sqrt(args.params / LAYERS))

    def work() -> None:
        torch.set_num_threads(1)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS))).to(args.device)
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=1e-6), overlap=overlap)
        if args.link_mb_s:
            slow_down(args.link_mb_s * 1e6)
        batch = torch.randn(args.batch, width, device=args.device)
        for count in range(args.warm + args.iterations):
            began = time.perf_counter()
            opt.zero_grad()
            loss = model(batch).pow(2).mean()
            wait(args.device)
            forward = time.perf_counter()
            loss.backward()
            wait(args.device)
            backward = time.perf_counter()
            opt.step()
            wait(args.device)
            end = time.perf_counter()
            if count >= args.warm and paceline.init().rank == 0:
                paceline.log(loss=1000 * (backward - forward), accuracy=1000 * (end - backward))
                paceline.log(loss=1000 * (end - began))

    plan = RunPlan(
        members=Members(args.workers, args.servers),
        starter=function_starter(work),
        policy=policies.parse("asp"),
        multihost=MultihostOptions("127.0.0.1", "", shared_memory=False) if args.transport == "tcp" else None,
    )
    run = Driver(plan).run()
    assert not run.failures, run.failures
    split = [(point.loss, point.accuracy) for point in run.history]
    return {
        "backward": [first for first, second in split if second is not None],
        "step": [second for _, second in split if second is not None],
        "iteration": [first for first, second in split if second is None],
    }


def slow_down(bytes_per_s: float) -> None:
    """What this process sends over TCP takes its time from now on."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            if os.readlink(entry).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    if connection.family == socket.AF_INET:
                        connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, round(bytes_per_s))


def wait(device: str) -> None:
    """So that each part is charged for its own work. Copies that run beside it are not waited for."""
    if device.startswith("cuda"):
        torch.cuda.current_stream().synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--transport", choices=("shm", "tcp"), default="shm")
    parser.add_argument("--link-mb-s", type=float, default=0.0, help="over tcp; 0: as fast as it goes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ways = {"without": False, "with": True}
    times: dict[str, dict[str, list[float]]] = {way: {part: [] for part in PARTS} for way in ways}
    for _ in range(args.rounds):
        for way, overlap in ways.items():
            for part, found in measure(args, overlap).items():
                times[way][part] += found
    medians = {way: {part: statistics.median(found) for part, found in parts.items()} for way, parts in times.items()}
    ratios = {part: medians["without"][part] / medians["with"][part] for part in PARTS}
    limit = f" at {args.link_mb_s:g} MB/s" if args.link_mb_s else ""
    where = f"{args.params:.0e} parameters on {args.device}, {args.transport}{limit}"
    print(f"{where}, {args.workers} worker(s), {args.servers} server(s), asp; ms")
    print(f"{'':10} {'without':>9} {'with':>9} {'ratio':>7}")
    for part in PARTS:
        print(f"{part:10} {medians['without'][part]:9.2f} {medians['with'][part]:9.2f} {ratios[part]:6.2f}x")
    if args.json is not None:
        settings = {name: str(value) if name == "json" else value for name, value in vars(args).items()}
        args.json.write_text(json.dumps({"settings": settings, "median_ms": medians, "ratio": ratios}, indent=2))


if __name__ == "__main__":
    main()
