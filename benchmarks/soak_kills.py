"""Kill workers at random instants, run after run, and check what must hold. A command, not a test:

    python benchmarks/soak_kills.py --kills 200

Each run trains digits with one policy; workers are killed with SIGKILL at random moments and started again. It
fails loudly if a run hangs or ends early, if an update is applied twice or out of nowhere, if the trace does not
replay, or if a process or a file in /dev/shm is left.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from functools import partial
from pathlib import Path

from paceline import policies, workloads
from paceline.cluster import load
from paceline.core.actions import Apply
from paceline.core.events import PushArrived
from paceline.core.messages import Members
from paceline.run import Run, Target
from paceline.runtime.live.children import function_starter
from paceline.runtime.live.launch import Driver, LivePlan
from paceline.runtime.live.watching import Care
from paceline.tensors import optimizers
from paceline.training import train

POLICIES = ("bsp", "ssp:staleness=3", "backup:extra=1", "asp")
TARGET = Target("accuracy", 0.85)


def one_run(policy: str, kills: int, seed: int) -> Run:
    """A run in which `kills` workers are killed, one after the other; worker 0, which evaluates, is spared."""
    work = partial(train, workloads.load("digits-mlp"), optimizers.parse("sgd:lr=0.1"), 32, 100_000, 0)
    plan = LivePlan(
        Members(4, 2), function_starter(work), policies.parse(policy), load("lognormal:compute_s=0.004"),
        seed=seed, care=Care(restarts=kills, timeout_s=120), target=None,
    )  # fmt: skip
    driver = Driver(plan, say=lambda line: None)
    chance = random.Random(seed)

    def kill() -> None:
        for _ in range(kills):
            time.sleep(chance.uniform(0.02, 0.4))
            victims = [child for child in driver.live_workers() if child.rank != 0]
            while not victims or not driver.begun:
                time.sleep(0.01)
                victims = [child for child in driver.live_workers() if child.rank != 0]
            chance.choice(victims).kill()
        while not any(TARGET.reached(point) for point in driver.history[-20:]):
            time.sleep(0.01)
        driver.interrupts = 1

    killer = threading.Thread(target=kill)
    killer.start()
    run = driver.run()
    killer.join()
    return run


def check(run: Run) -> None:
    assert any(TARGET.reached(point) for point in run.history), "it did not learn"
    assert run.replay() == [], "the trace does not replay"
    for shard in range(run.trace.header.members.servers):
        arrived, applied = set(), []
        for record in run.trace:
            if record.node == ("server", shard):
                if isinstance(record.event, PushArrived):
                    arrived.add(record.event.push.handle)
                applied += [
                    handle for action in record.actions if isinstance(action, Apply) for handle in action.handles
                ]
        assert len(applied) == len(set(applied)), "an update was applied twice"
        assert set(applied) <= arrived, "an update was applied that never arrived"


def left_behind() -> list[str]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [f"process {child}" for child in children] + [
        str(path) for path in Path("/dev/shm").glob(f"*paceline-{os.getpid()}-*")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    done, number, began = 0, 0, time.monotonic()
    while done < options.kills:
        policy, kills = POLICIES[number % len(POLICIES)], min(5, options.kills - done)
        run = one_run(policy, kills, options.seed + number)
        check(run)
        assert not left_behind(), left_behind()
        done, number = done + kills, number + 1
        print(f"{done}/{options.kills} kills, {policy}: {run.time_s:.1f} s, {len(run.trace)} records", flush=True)
    print(f"{done} kills in {number} runs, {time.monotonic() - began:.0f} s: nothing hung, nothing twice, nothing left")


if __name__ == "__main__":
    sys.exit(main())
