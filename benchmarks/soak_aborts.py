"""Abort live runs at random instants, and look for what they leave. A command, not a test:

    python benchmarks/soak_aborts.py --runs 50

Each run is a driver of its own, in a process group of its own. It is ended in one of six ways: Ctrl-C twice, SIGTERM
twice, SIGKILL of the driver, SIGKILL of a server (without servers: of all peers), a worker that raises with --abort, or
a time limit. That there are no servers the driver is told, or the script says it and servers are started and let go.
Afterwards no process of the group may live for more than ten seconds, and after one ordinary run at the end nothing may
lie in /dev/shm (a killed driver cannot clean up; the next start does).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch

import paceline
from paceline import policies
from paceline.cluster import load
from paceline.core.messages import Members
from paceline.core.policy import PeerPolicy
from paceline.errors import PacelineError
from paceline.function_workers import function_starter
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.runtime.live.storage import shared_memory

WAYS = ("interrupt", "terminate", "kill the driver", "kill a server", "a worker raises", "time limit")
POLICIES = (
    "bsp", "ssp:staleness=3", "backup:extra=1", "asp", "elastic:lookahead=5",
    "specsync:abort_time=0.005,abort_rate=0.1",
    "hop:graph=ring,max_gap=2", "hop:graph=complete,backup=1,max_gap=3", "adpsgd:graph=complete",
)  # fmt: skip
GONE_S = 10.0


def group(leader: int) -> list[int]:
    """The living processes of a group."""
    found = []
    for stat in [each / "stat" for each in Path("/proc").iterdir() if each.name.isdigit()]:
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[2]) == leader and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def work(raise_at: int, policy: str | None) -> None:
    model = torch.nn.Linear(20, 20)
    opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), policy=policy)
    while True:

        def closure() -> torch.Tensor:
            opt.zero_grad()
            loss = model(torch.randn(4, 20)).pow(2).mean()
            loss.backward()
            return loss

        opt.step(closure)
        if opt.global_step == raise_at:
            raise ValueError("as asked")


def drive(way: str, policy: str, seed: int, after_s: float) -> None:
    """Be the driver of one run, and never return from it well."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs this in the background has it ignored
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    raise_at = 20 if way == "a worker raises" else -1
    limits = {"time limit": after_s, "kill a server": after_s + 1.0}  # a server that was killed is started again
    care = FaultPolicy(abort=way == "a worker raises", timeout_s=limits.get(way))
    peers = isinstance(policies.parse(policy), PeerPolicy)
    by_script = peers and seed // len(WAYS) % 2 == 1
    plan = RunPlan(
        Members(3, 0 if peers and not by_script else 2),
        function_starter(lambda: work(raise_at, policy if by_script else None)),
        None if by_script else policies.parse(policy),
        load("lognormal:compute_s=0.004"), seed=seed, care=care,
    )  # fmt: skip
    driver = Driver(plan, say=lambda line: None)
    if way == "kill a server":
        start = driver.turn

        def turn() -> None:
            start()
            if time.monotonic() > until:
                role = "worker" if driver.parts.state.without_servers else "server"
                victims = [child for child in driver.parts.children.values() if child.role == role]
                if victims and (role == "worker" or not killed):
                    killed.append(victims[0])
                    victims[0].kill()

        killed: list[object] = []
        until = time.monotonic() + after_s
        driver.turn = turn  # type: ignore[method-assign]
    try:
        driver.run()
    except (PacelineError, KeyboardInterrupt):
        os._exit(1)
    os._exit(0)


def abort(way: str, policy: str, seed: int, chance: random.Random) -> None:
    after_s = chance.uniform(0.0, 0.8)
    leader = os.fork()
    if leader == 0:
        drive(way, policy, seed, after_s)
    time.sleep(after_s)
    numbers = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill the driver": signal.SIGKILL}
    if way in numbers:
        for _ in range(2):
            os.kill(leader, numbers[way])
            time.sleep(chance.uniform(0.0, 0.1))
    os.waitpid(leader, 0)
    until = time.monotonic() + GONE_S
    while left := group(leader):
        assert time.monotonic() < until, f"{way}: processes {left} still live"
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    began, done = time.monotonic(), Counter[str]()
    for number in range(options.runs):
        way = WAYS[number % len(WAYS)]
        abort(way, chance.choice(POLICIES), number, chance)
        done[way] += 1
        if sys.stderr.isatty():
            print(f"\r{number + 1}/{options.runs}", end="", file=sys.stderr)
    unclean = len(shared_memory.stale())
    shared_memory.RunFolder().remove()
    left = shared_memory.stale()
    assert not left, f"left in /dev/shm: {left}"
    ways = ", ".join(f"{count} {way}" for way, count in done.items())
    print(f"{options.runs} aborted runs in {time.monotonic() - began:.0f} s ({ways}): no process left; "
          f"{unclean} folders of killed drivers, removed by the next start; nothing left")  # fmt: skip


if __name__ == "__main__":
    main()
