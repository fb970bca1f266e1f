"""Change the number of servers at random instants, and kill workers and servers meanwhile. A command, not a test:

    python benchmarks/soak_servers.py --runs 20
    python benchmarks/soak_servers.py --runs 5 --policy scheduled --kill-servers

Each run trains digits on 3 workers, with one policy, while one to five servers are asked for every so often. It fails
loudly if a run hangs, if a gradient is used twice on any element, if one of a worker that was never killed is not used
on every element (applied or dropped), or if the trace does not replay. With --kill-servers, servers are restarted from
checkpoints, so updates are lost, and only hangs and replay are looked at.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

from paceline import policies, workloads
from paceline.cluster import load
from paceline.core.actions import Apply, Drop
from paceline.core.messages import Members
from paceline.function_workers import function_starter
from paceline.run import Run
from paceline.runtime.live.driver.checkpointing import CheckpointOptions
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.runtime.live.protocol import resizing_messages
from paceline.tensors import optimizers
from paceline.workload_training import train

POLICIES = (
    "bsp", "ssp:staleness=3", "asp", "backup:extra=1", "deadline", "dssp:low=1,high=4", "scheduled",
    "ssp:staleness=3,lazy=true", "bsp@0,asp@60", "waiting:delay_s=0.005,base=ssp(staleness=1)",
)  # fmt: skip
ITERATIONS = 300
KILLS = 5
"""Of workers in a run: the pause before a rank comes back doubles each time."""


class Trouble:
    """What happens to a run, between two turns of its driver."""

    def __init__(self, driver: Driver, draw: random.Random, kill_servers: bool) -> None:
        self.driver, self.draw, self.kill_servers = driver, draw, kill_servers
        self.asked = self.killed = self.servers_killed = 0
        self.due_s = dict.fromkeys(("ask", "kill", "kill server"), 0.0)
        self.turn = driver.turn
        driver.turn = self.turn_and_trouble  # type: ignore[method-assign]

    def is_due(self, what: str, longest_s: float) -> bool:
        now = time.monotonic()
        if now < self.due_s[what]:
            return False
        self.due_s[what] = now + self.draw.uniform(0.05, longest_s)
        return True

    def turn_and_trouble(self) -> None:
        self.turn()
        driver = self.driver
        if (
            not driver.parts.state.begun
            or driver.parts.state.finishing
            or len(driver.parts.logged.history) > ITERATIONS * 0.9
        ):
            return
        if self.is_due("ask", 0.5):
            self.asked += 1
            driver.parts.resizing.want(resizing_messages.Want(self.draw.randint(1, 5)))
        workers = [child for child in driver.parts.workers.live() if child.rank]
        if workers and self.killed < KILLS and self.is_due("kill", 1.0):
            self.killed += 1
            self.draw.choice(workers).kill()
        restartable = (
            self.kill_servers and driver.parts.checkpointer is not None and driver.parts.checkpointer.last is not None
        )
        if restartable and self.is_due("kill server", 1.5):
            self.servers_killed += 1
            self.draw.choice([child for child in driver.parts.children.values() if child.role == "server"]).kill()


def check(run: Run, servers_killed: int) -> None:
    assert run.replay() == [], "the trace does not replay"
    if servers_killed:
        return
    used: Counter[tuple[int, int, int]] = Counter()
    for record in run.trace:
        for action in record.actions:
            if isinstance(action, Apply | Drop):
                for handle in action.handles if isinstance(action, Apply) else (action.handle,):
                    used[handle.source, handle.incarnation, handle.iteration] += handle.nbytes
    whole = sum(value.nbytes for value in run.parameters.values())
    assert max(used.values()) == whole, "a gradient was used twice"
    assert all(nbytes == whole for gradient, nbytes in used.items() if gradient[0] == 0), "part of one was lost"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--policy", help="one policy instead of all in turn")
    parser.add_argument("--kill-servers", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    work = partial(train, workloads.load("digits-mlp"), optimizers.parse("sgd:lr=0.05,momentum=0.9"), 32, ITERATIONS, 0)
    for number in range(given.runs):
        policy = given.policy or POLICIES[number % len(POLICIES)]
        with tempfile.TemporaryDirectory() as folder:
            plan = RunPlan(
                Members(3, 1 + number % 2),
                function_starter(work),
                policies.parse(policy),
                load("random-slowdown:factor=4,compute_s=0.005"),
                given.seed + number,
                care=FaultPolicy(restarts=100, timeout_s=120),
                checkpointing=CheckpointOptions(Path(folder), every_updates=10) if given.kill_servers else None,
            )
            driver = Driver(plan, say=lambda line: None)
            trouble = Trouble(driver, random.Random(given.seed + number), given.kill_servers)
            started = time.monotonic()
            run = driver.run()
            check(run, trouble.servers_killed)
        print(
            f"{policy}: {time.monotonic() - started:.1f} s, {len(run.server_changes)} changes of {trouble.asked} asked "
            f"for, {trouble.killed} workers and {trouble.servers_killed} servers killed",
            flush=True,
        )


if __name__ == "__main__":
    main()
