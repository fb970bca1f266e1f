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
from collections.abc import Callable
from pathlib import Path

import torch

import paceline
from paceline import policies, session
from paceline.core.messages import Members
from paceline.function_workers import function_starter
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.health import FaultPolicy

WORKERS = 8
OTHERS = 3
"""Workers that train while another one is killed, at least."""
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
        note(folder, rank, steps)
        if (folder / "enough").exists():
            paceline.stop()


def note(folder: Path, rank: int, steps: int) -> None:
    """Leaves word of how many steps this worker has taken, whole or not at all."""
    part = folder / f"part-{rank}"
    part.write_text(str(steps))
    part.replace(folder / f"steps-{rank}")


def steps_of(folder: Path, rank: int) -> int:
    try:
        return int((folder / f"steps-{rank}").read_text())
    except FileNotFoundError:
        return 0


def wait_for(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + PATIENCE_S
    while not (held := holds()) and time.monotonic() < until:
        time.sleep(0.005)
    return held


def training(folder: Path) -> dict[int, int]:
    """Returns the steps of each worker that has taken some."""
    steps = {rank: steps_of(folder, rank) for rank in range(WORKERS)}
    return {rank: count for rank, count in steps.items() if count}


def kill_all(driver: Driver, folder: Path, count: int, found: dict[str, list[int]]) -> None:
    """Kills one worker after another, at a random moment, and sees the others go on each time."""
    chance = random.Random(0)

    def all_there() -> bool:
        return len(training(folder)) == WORKERS

    try:
        wait_for(all_there)
        found["used"].append(used_mib())
        for _ in range(count):
            if not wait_for(lambda: len(training(folder)) > OTHERS):
                found["stuck"].append(-1)
                return
            time.sleep(chance.uniform(0, 0.05))
            victim = chance.choice(sorted(training(folder)))
            next(each for each in driver.parts.workers.live() if each.rank == victim).kill()
            time.sleep(0.02)  # what it was about to note is noted
            (folder / f"steps-{victim}").unlink(missing_ok=True)
            others = {rank: steps for rank, steps in training(folder).items() if rank != victim}
            if not wait_for(lambda others=others: all(steps_of(folder, r) > steps for r, steps in others.items())):
                found["stuck"].append(victim)
                return
            found["killed"].append(victim)
        wait_for(all_there)
        found["used"].append(used_mib())
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
