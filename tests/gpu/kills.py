"""Kills workers on one GPU again and again: `kills.py COUNT POLICY`. Says in JSON what became of it.

A process of its own, which never touches CUDA: its forks, servers and workers, do.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

import paceline
from paceline import policies, session
from paceline.core.messages import Members
from paceline.function_workers import function_starter
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.health import FaultPolicy

WORKERS = 3
PATIENCE_S = 60.0
PARAMETERS = 8_000_000


def used_mib() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def work(folder: Path) -> None:
    rank = session.init().rank
    device = torch.device("cuda", 0)
    weights = torch.nn.Parameter(torch.zeros(PARAMETERS, device=device))
    opt = paceline.Optimizer(torch.optim.AdamW([weights], lr=1e-3))
    steps = 0
    while not opt.done:
        opt.zero_grad()
        (weights * torch.randn(1, device=device)).sum().backward()
        opt.step()
        steps += 1
        (folder / f"steps-{rank}").write_text(str(steps))
        if (folder / "enough").exists():
            paceline.stop()


def steps_of(folder: Path, rank: int) -> int:
    try:
        return int((folder / f"steps-{rank}").read_text() or 0)
    except FileNotFoundError:
        return 0


def wait_for(holds) -> bool:
    until = time.monotonic() + PATIENCE_S
    while not holds() and time.monotonic() < until:
        time.sleep(0.005)
    return bool(holds())


def kill_all(driver: Driver, folder: Path, count: int, found: dict[str, list[int]]) -> None:
    """Kills one worker after another, at a random moment, and sees the others go on each time."""
    chance = random.Random(0)
    try:
        for _ in range(count):
            before = [steps_of(folder, rank) for rank in range(WORKERS)]
            if not wait_for(
                lambda before=before: all(steps_of(folder, r) not in (0, before[r]) for r in range(WORKERS))
            ):
                found["stuck"].append(-1)
                return
            found["used"].append(used_mib())
            time.sleep(chance.uniform(0, 0.05))
            victim = chance.randrange(WORKERS)
            child = next(each for each in driver.parts.workers.live() if each.rank == victim)
            child.kill()
            others = {rank: steps_of(folder, rank) for rank in range(WORKERS) if rank != victim}
            (folder / f"steps-{victim}").write_text("0")
            if not wait_for(lambda others=others: all(steps_of(folder, r) > n + 2 for r, n in others.items())):
                found["stuck"].append(victim)
                return
            found["killed"].append(victim)
    finally:
        (folder / "enough").touch()


def main() -> None:
    count, policy = int(sys.argv[1]), sys.argv[2]
    found: dict[str, list[int]] = {"killed": [], "stuck": [], "used": [], "idle": [used_mib()]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = RunPlan(
            Members(WORKERS, 1), function_starter(lambda: work(folder)), policies.parse(policy),
            care=FaultPolicy(restarts=count + 10, timeout_s=400), servers_on="gpu",
        )  # fmt: skip
        driver = Driver(plan, say=lambda line: print(line, file=sys.stderr))
        killer = threading.Thread(target=kill_all, args=(driver, folder, count, found))
        killer.start()
        driver.run()
        killer.join()
    wait_for(lambda: used_mib() <= found["idle"][0])
    found["idle"].append(used_mib())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
