"""Kill peers at random instants, run after run, and check what must hold. A command, not a test:

    python benchmarks/soak_peers.py --kills 100

Each run trains digits with one policy without servers, on samples from paceline.Sampler; peers, peer 0 among them, are
killed with SIGKILL at random moments and started again. It fails loudly if a run hangs or ends early, if parameters
are averaged twice or out of nowhere, if a sample of a finished epoch was part of no gradient that was applied (by what
the peers wrote down, step by step), if the trace does not replay, or if a process or a file in /dev/shm is left.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import torch
from soak_kills import left_behind
from torch.utils.data import DataLoader

import paceline
from paceline import policies, workloads
from paceline.cluster import load
from paceline.core.actions import Drop, Reduce
from paceline.core.events import OfferArrived, ReplyArrived, UpdateArrived
from paceline.core.messages import Members
from paceline.function_workers import function_starter
from paceline.run import Run, Target
from paceline.runtime.execution import handle_of
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.testing.samples import RecordedSampler, lost
from paceline.workloads.base import Workload

POLICIES = (
    "hop:graph=ring-based",
    "hop:graph=ring-based,backup=1,max_gap=4",
    "hop:graph=ring,staleness=3,max_gap=4",
    "hop:graph=ring-based,backup=1,max_gap=4,skip=4",
    "hop:graph=ring,notify_ack=true",
    "hop:graph=complete,order=serial",
    "adpsgd:graph=ring",
    "adpsgd:graph=complete",
)
PEERS = 6
TARGET = Target("accuracy", 0.85)


def train(workload: Workload, folder: Path) -> None:
    """Train for ever; the first and the last evaluate now and then. What counted is written down after each step."""
    world = paceline.init()
    inputs, labels = workload.train
    sampler = RecordedSampler(range(len(inputs)), folder)
    loader = DataLoader(range(len(inputs)), 16, sampler=sampler)  # type: ignore[arg-type]
    module = workload.module(0)
    opt = paceline.Optimizer(torch.optim.SGD(module.parameters(), lr=0.1), model=module)
    while True:
        for batch in loader:
            opt.zero_grad()
            workload.loss(module(inputs[batch]), labels[batch]).backward()
            try:
                opt.step()
            finally:
                sampler.used(batch.tolist(), not opt.step_was_dropped)
            if world.rank in (0, world.size - 1) and opt.global_step % 5 == 0:
                measured = workload.evaluate(module)
                paceline.log(**measured)


def one_run(policy: str, kills: int, seed: int, folder: Path) -> tuple[Run, int]:
    """A run in which `kills` peers are killed, one after the other; the last that has parameters is spared.

    Also how many epochs were finished.
    """
    work = partial(train, workloads.load("digits-mlp"), folder)  # loaded here: forks that import are poor victims
    plan = RunPlan(
        Members(PEERS, 0), function_starter(work), policies.parse(policy), load("lognormal:compute_s=0.004"),
        seed=seed, care=FaultPolicy(restarts=kills, timeout_s=120), target=None,
    )  # fmt: skip
    driver = Driver(plan, say=lambda line: None)
    chance = random.Random(seed)

    def kill() -> None:
        for _ in range(kills):
            time.sleep(chance.uniform(0.02, 0.3))
            while not driver.parts.state.begun or len(driver.parts.peers.holding) < 3:
                time.sleep(0.01)
            chance.choice(driver.parts.workers.live()).kill()
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
    assert table.finished(), "no epoch was finished"
    assert lost(folder, table) == {}, f"samples were lost: {lost(folder, table)}"
    return run, len(table.finished())


def reached(driver: Driver) -> bool:
    return any(TARGET.reached(point) for point in driver.parts.logged.history[-20:])


def check(run: Run) -> None:
    assert any(TARGET.reached(point) for point in run.history), "it did not learn"
    assert run.replay() == [], "the trace does not replay"
    processes = {(record.node, record.incarnation) for record in run.trace}
    for process in processes:
        arrived, used = set(), []
        for record in run.trace:
            if (record.node, record.incarnation) != process:
                continue
            event = record.event
            if isinstance(event, UpdateArrived):
                arrived.add(event.update.handle)
            elif isinstance(event, OfferArrived):
                arrived.add(event.offer.handle)
            elif isinstance(event, ReplyArrived):
                arrived.add(handle_of(event.reply))
            for action in record.actions:
                if isinstance(action, Reduce):
                    used += action.handles
                elif isinstance(action, Drop) and action.handle.source != process[0].rank:
                    used.append(action.handle)
        assert len(used) == len(set(used)), "parameters were used twice"
        assert set(used) <= arrived, "parameters were used that never came"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", default="", help="only policies whose text begins so: hop, adpsgd, ...")
    options = parser.parse_args()
    chosen = [policy for policy in POLICIES if policy.startswith(options.policy)]
    if not chosen:
        parser.error(f"no policy begins with {options.policy!r}: {', '.join(POLICIES)}")
    done, number, epochs, began = 0, 0, 0, time.monotonic()
    while done < options.kills:
        policy, kills = chosen[number % len(chosen)], min(5, options.kills - done)
        with tempfile.TemporaryDirectory() as folder:
            run, finished = one_run(policy, kills, options.seed + number, Path(folder))
        check(run)
        assert not left_behind(), left_behind()
        done, number, epochs = done + kills, number + 1, epochs + finished
        print(
            f"{done}/{options.kills} kills, {policy}: {run.time_s:.1f} s, {len(run.trace)} records, {finished} epochs",
            flush=True,
        )
    print(
        f"{done} kills in {number} runs, {epochs} epochs, {time.monotonic() - began:.0f} s: "
        "nothing hung, no parameters used twice, no sample lost, nothing left"
    )


if __name__ == "__main__":
    sys.exit(main())
