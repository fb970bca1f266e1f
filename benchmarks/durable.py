"""What `--durable` costs, how fast a server comes back, and whether anything is lost. A command, not a test:

    python benchmarks/durable.py                      # pushes a second without, with, and with fsync, in turns
    python benchmarks/durable.py --recover            # a server with a shard of 100 MB is killed: when is it back?
    python benchmarks/durable.py --kills 50           # kill servers at random instants, and look for what is missing

The last fails loudly if a gradient of any worker is not used exactly once on each shard, if the trace does not replay,
or if replaying the logs into fresh machines and optimizers does not give the final parameters, bit for bit. Under BSP
every gradient is 1 and the rate is 1, so that the parameters themselves count the updates: they must be minus their
number, whatever traces and logs say.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import paceline
from paceline import policies
from paceline.cluster import load
from paceline.core.actions import Apply, Drop
from paceline.core.events import PushArrived
from paceline.core.messages import Members
from paceline.function_workers import function_starter
from paceline.run import Run
from paceline.runtime.live.driver.checkpointing import CheckpointOptions
from paceline.runtime.live.driver.driver import Driver, RunPlan
from paceline.runtime.live.driver.durability import joined, replay
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.runtime.live.protocol.records import DurabilityOptions
from paceline.runtime.live.storage import update_log

WORKERS = 3


def counting(parameters: int, iterations: int, momentum: float = 0.0) -> Callable[[], None]:
    """Every gradient is 1: the parameters count the updates."""

    def work() -> None:
        model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(parameters))})
        opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum))
        ones = torch.ones(parameters)
        while opt.global_step < iterations:
            model["w"].grad = ones.clone()
            opt.step()
            if paceline.init().rank == 0:
                paceline.log(loss=0.0)

    return work


def driver_of(
    work: Callable[[], None],
    policy: str,
    members: Members,
    folder: Path,
    how: DurabilityOptions | None,
    compute_s: float = 0.0,
) -> Driver:
    plan = RunPlan(
        members, function_starter(work), policies.parse(policy), load(f"steady:compute_s={compute_s}"),
        care=FaultPolicy(timeout_s=600), checkpointing=CheckpointOptions(folder, durable=how),
    )  # fmt: skip
    return Driver(plan, say=lambda line: None)


def rate(run: Run) -> float:
    """Pushes a second, all workers together, the first tenth left out."""
    times = [r.event.at for r in run.trace if r.node == ("server", 0) and isinstance(r.event, PushArrived)]
    times = sorted(times)[len(times) // 10 :]
    return (len(times) - 1) / (times[-1] - times[0])


def cost(sizes: list[int], rounds: int) -> None:
    modes = {"off": None, "on": DurabilityOptions(), "fsync": DurabilityOptions(fsync=True)}
    print(f"pushes a second, {WORKERS} workers, 1 server, ASP, gradients at once; median of {rounds} rounds in turns")
    print(f"{'parameters':>12} {'off':>10} {'--durable':>16} {'--durable-fsync':>18}")
    for size in sizes:
        seen: dict[str, list[float]] = {mode: [] for mode in modes}
        iterations = max(20, min(1000, 20_000_000 // size))
        for _ in range(rounds):
            for mode, how in modes.items():
                with tempfile.TemporaryDirectory(dir=".") as folder:
                    fewer = iterations // 5 if mode == "fsync" and size < 1_000_000 else iterations
                    run = driver_of(counting(size, fewer), "asp", Members(WORKERS, 1), Path(folder), how).run()
                seen[mode].append(rate(run))
        off, on, fsync = (statistics.median(seen[mode]) for mode in modes)
        print(f"{size:>12,} {off:>10,.0f} {on:>9,.0f} {on / off:>6.0%} {fsync:>11,.0f} {fsync / off:>6.0%}", flush=True)


def recover(megabytes: int) -> None:
    """Kill the server when its log is about as long as it gets: then there is most to replay."""
    parameters = megabytes * 1_000_000 // 4
    how = DurabilityOptions()
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        driver = driver_of(counting(parameters, 60, momentum=0.9), "asp", Members(2, 1), folder, how)
        turn, killed, back = driver.turn, [0.0], [0.0]
        logged = [0]

        def turn_and_kill() -> None:
            turn()
            if back[0] or not driver.parts.state.begun:
                return
            if killed[0]:
                if 0 in driver.parts.servers.configured and driver.parts.servers.incarnations[0]:
                    back[0] = time.monotonic()
                return
            segments = sorted(update_log.folder_of(folder, 0).glob(f"*{update_log.LOG}"))
            logged[0] = segments[-1].stat().st_size if segments else 0
            if logged[0] > 0.85 * how.longest(4 * parameters):
                next(child for child in driver.parts.children.values() if child.role == "server").kill()
                killed[0] = time.monotonic()

        driver.turn = turn_and_kill  # type: ignore[method-assign]
        run = driver.run()
        check(run, folder)
        print(
            f"shard of {megabytes} MB, momentum as much again, {logged[0] / 1e6:.0f} MB of log: "
            f"back {back[0] - killed[0]:.2f} s after kill -9; nothing lost"
        )


def soak(kills: int, policy: str, seed: int) -> None:
    draw = random.Random(seed)
    counts = policy == "bsp"
    iterations = 40 * kills
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        work = counting(20_000, iterations, 0.0 if counts else 0.9)
        driver = driver_of(work, policy, Members(WORKERS, 2), folder, DurabilityOptions(events=500), compute_s=0.002)
        turn, due, done = driver.turn, [0.0], [0]

        def turn_and_kill() -> None:
            turn()
            if (
                driver.parts.state.begun
                and not driver.parts.state.finishing
                and time.monotonic() > due[0]
                and done[0] < kills
            ):
                due[0] = time.monotonic() + draw.choice((0.002, 0.05, 0.2)) * draw.random()
                servers = [child for child in driver.parts.children.values() if child.role == "server"]
                draw.choice(servers).kill()
                done[0] += 1

        driver.turn = turn_and_kill  # type: ignore[method-assign]
        started = time.monotonic()
        run = driver.run()
        assert done[0] == kills, f"the run was over after {done[0]} kills"
        pushes = check(run, folder)
        if counts:
            values = next(iter(run.parameters.values())).unique().tolist()
            assert values == [-iterations], f"{iterations} updates, the parameters say {values}"
    print(
        f"{policy}: {kills} servers killed in {time.monotonic() - started:.0f} s; {pushes} pushes, each used once on "
        f"each shard; the trace replays; the logs give the final parameters, bit for bit"
        + (f"; which say {iterations} updates" if counts else ""),
        flush=True,
    )


def check(run: Run, folder: Path) -> int:
    """Look for what is missing; how many pushes there were."""
    assert run.replay() == [], "the trace does not replay"
    used: Counter[tuple[int, int, int, int]] = Counter()
    computed: set[tuple[int, int, int]] = set()
    for record in run.trace:
        if record.node.role == "worker" and type(record.event).__name__ == "GradientReady":
            computed.add((record.node.rank, record.incarnation, record.event.iteration))
        for action in record.actions if record.node.role == "server" else ():
            if isinstance(action, Apply | Drop):
                for handle in action.handles if isinstance(action, Apply) else (action.handle,):
                    used[record.node.rank, handle.source, handle.incarnation, handle.iteration] += 1
    assert max(used.values()) == 1, f"used twice: {[each for each, times in used.items() if times > 1][:5]}"
    shards = {shard for shard, *_ in used}
    lost = [(shard, *each) for shard in shards for each in computed if (shard, *each) not in used]
    assert not lost, f"lost: {lost[:5]}"
    replayed = joined(replay(folder))
    for name, value in run.parameters.items():
        assert torch.equal(replayed[name], value), f"the logs give another {name}"
    return len(computed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_000, 100_000, 1_000_000, 10_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--recover", type=int, nargs="?", const=100, metavar="MB")
    parser.add_argument("--kills", type=int)
    parser.add_argument("--policies", nargs="*", default=["bsp", "ssp:staleness=3", "asp"])
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.recover:
        recover(given.recover)
    elif given.kills:
        for policy in given.policies:
            soak(given.kills, policy, given.seed)
    else:
        cost(given.sizes, given.rounds)


if __name__ == "__main__":
    main()
