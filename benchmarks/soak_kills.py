"""Kill workers at random instants, run after run, and check what must hold. A command, not a test:

    python benchmarks/soak_kills.py --kills 200
    python benchmarks/soak_kills.py --kills 100 --local-steps 8     # within rounds of local steps

Each run trains digits with one policy, on samples from paceline.Sampler; workers are killed with SIGKILL at random
moments and started again. It fails loudly if a run hangs or ends early, if an update is applied twice or out of
nowhere, if a sample of a finished epoch was part of no gradient that counted (by what the workers wrote down, step
by step), if the trace does not replay, or if a process or a file in /dev/shm is left.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import paceline
from paceline import policies, workloads
from paceline.cluster import load
from paceline.core.actions import Apply
from paceline.core.events import PushArrived
from paceline.core.local_steps import LocalSteps, make
from paceline.core.messages import Members
from paceline.function_workers import function_starter
from paceline.run import Run, Target
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.testing.samples import RecordedSampler, lost
from paceline.workloads.base import Workload

POLICIES = (
    "bsp", "ssp:staleness=3", "backup:extra=1", "asp", "elastic:lookahead=5",
    "specsync:abort_time=0.005,abort_rate=0.1",
)  # fmt: skip
WITH_ROUNDS = ("bsp", "ssp:staleness=1", "backup:extra=1", "asp", "deadline")
TARGET = Target("accuracy", 0.85)


def train(workload: Workload, folder: Path) -> None:
    """Train for ever; worker 0 evaluates. What counted is written down after each step, also the last one.

    With local steps it has counted when the round is over: the last round is handed in when the script ends.
    """
    world = paceline.init()
    inputs, labels = workload.train
    sampler = RecordedSampler(range(len(inputs)), folder)
    loader = DataLoader(range(len(inputs)), 16, sampler=sampler)  # type: ignore[arg-type]
    module = workload.module(0)
    opt = paceline.Optimizer(torch.optim.SGD(module.parameters(), lr=0.1), model=module)
    while True:
        for batch in loader:

            def closure(batch: torch.Tensor = batch) -> torch.Tensor:
                opt.zero_grad()
                loss: torch.Tensor = workload.loss(module(inputs[batch]), labels[batch])
                loss.backward()
                return loss

            try:
                opt.step(closure)
            except SystemExit:
                sampler.used(batch.tolist(), not opt.step_was_dropped)
                raise
            sampler.used(batch.tolist(), not opt.step_was_dropped, opt.at_round_end)
            if world.rank == 0 and opt.at_round_end:
                measured = workload.evaluate(module)
                paceline.log(**measured)


def one_run(policy: str, local: LocalSteps | None, kills: int, seed: int, folder: Path) -> tuple[Run, int]:
    """A run in which `kills` workers are killed, one after the other; worker 0, which evaluates, is spared.

    With one server or two, by the seed: under BSP one shares its parameters. Also how many epochs were finished.
    """
    work = partial(train, workloads.load("digits-mlp"), folder)  # loaded here: forks that import are poor victims
    plan = RunPlan(
        Members(4, 1 + seed // 5 % 2), function_starter(work), policies.parse(policy),
        load("lognormal:compute_s=0.004"), seed=seed, care=FaultPolicy(restarts=kills, timeout_s=120), target=None,
        local_steps=local,
    )  # fmt: skip
    driver = Driver(plan, say=lambda line: None)
    chance = random.Random(seed)

    def kill() -> None:
        for _ in range(kills):
            time.sleep(chance.uniform(0.02, 0.4))
            victims = [child for child in driver.parts.workers.live() if child.rank != 0]
            while not victims or not driver.parts.state.begun:
                time.sleep(0.01)
                victims = [child for child in driver.parts.workers.live() if child.rank != 0]
            chance.choice(victims).kill()
        (table,) = driver.parts.sample_dispatchers.dispatches.values()
        touched = set(range(table.machine.unopened))
        while not (finished := set(table.finished())) >= touched or not reached(driver):
            assert driver.parts.workers.live(), f"the run ended; not finished: {touched - finished}"
            time.sleep(0.01)
        driver.parts.interrupts.count = 1

    killer = threading.Thread(target=kill)
    killer.start()
    run = driver.run()
    killer.join()
    (table,) = driver.parts.sample_dispatchers.dispatches.values()
    assert table.finished(), "no epoch was finished"  # all that kills have touched are: see above
    assert lost(folder, table) == {}, f"samples were lost: {lost(folder, table)}"
    return run, len(table.finished())


def reached(driver: Driver) -> bool:
    return any(TARGET.reached(point) for point in driver.parts.logged.history[-20:])


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
    parser.add_argument("--local-steps", help="train in rounds: 8, or auto(at_least=4,at_most=16)")
    options = parser.parse_args()
    local, soaked = make(options.local_steps), WITH_ROUNDS if options.local_steps else POLICIES
    done, number, epochs, began = 0, 0, 0, time.monotonic()
    while done < options.kills:
        policy, kills = soaked[number % len(soaked)], min(5, options.kills - done)
        with tempfile.TemporaryDirectory() as folder:
            run, finished = one_run(policy, local, kills, options.seed + number, Path(folder))
        check(run)
        assert not left_behind(), left_behind()
        done, number, epochs = done + kills, number + 1, epochs + finished
        print(
            f"{done}/{options.kills} kills, {policy}: {run.time_s:.1f} s, {len(run.trace)} records, {finished} epochs",
            flush=True,
        )
    print(
        f"{done} kills in {number} runs, {epochs} epochs, {time.monotonic() - began:.0f} s: "
        "nothing hung, no update twice, no sample lost, nothing left"
    )


if __name__ == "__main__":
    sys.exit(main())
