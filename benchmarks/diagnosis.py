"""Whether `paceline explain` names the right worker and the right cause, how soon, and whether it cries wolf.

    python benchmarks/diagnosis.py [--virtual 200] [--healthy 50] [--live 8] [--seed 0]

Virtual runs have one worker, drawn at random, slowed down from a random iteration on (computing), or behind a slow line
from the start (link), under four policies, with log-normal noise. Healthy ones have the noise alone, or slowness that
changes hands. Live ones run a script whose worker 1 loads data, computes, sleeps or collects garbage for longer from
its 40th iteration on. Prints one line for each cause.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from paceline import simulate
from paceline.run import Run
from paceline.watching import snapshot as shown
from paceline.watching.driver_records import Begun
from paceline.watching.run_reader import RunReader
from paceline.watching.view import RunWatch

POLICIES = ("bsp", "ssp:staleness=3", "asp", "backup:extra=1")
CAUSES = {"data": "loading data", "compute": "computing", "sleep": "host", "gc": "garbage collection"}
LOOK_S = 0.02
"""Of virtual time, in which an iteration takes 0.1 s."""


@dataclass
class Score:
    """What came out for one cause."""

    runs: int = 0
    worker: int = 0
    cause: int = 0
    alarms: int = 0
    """Runs in which somebody else was named."""
    delays: list[int] = field(default_factory=list)
    """Iterations from the first slow one until it was named."""

    def line(self, name: str) -> str:
        delays = sorted(self.delays)
        soon = f", after {delays[len(delays) // 2]} iterations, at most {delays[-1]}" if delays else ""
        found = f"right worker {self.worker}, right cause {self.cause}{soon}; " if name != "healthy" else ""
        return f"{name}: {self.runs} runs: {found}false alarms in {self.alarms}"


def followed(run: Run, slow: int | None, cause: str, begins: int, score: Score) -> None:
    """Looks at a run all along, as somebody who watches would."""
    header = run.trace.header
    watch = RunWatch("run")
    members = header.members
    watch.take_driver(Begun(0.0, 0.0, header.policy, members.workers, members.servers, header.slice_bytes))
    next_s, named, right, wrong = 0.0, False, False, False
    for record in sorted(run.trace.records, key=lambda record: record.event.at):
        if record.event.at >= next_s:
            next_s = record.event.at + LOOK_S
            view = watch.snapshot(record.event.at, shown.RUNS)
            for found in view.findings:
                if found.rank == slow and not found.who.startswith("server"):
                    if not named:
                        done = watch.cutters[found.rank, 0].done
                        score.delays.append(sum(each.index >= begins for each in done))
                    named = True
                    right |= found.cause == cause
                else:
                    wrong = True
        watch.take(record)
    score.runs += 1
    score.worker += named
    score.cause += right
    score.alarms += wrong


def virtual(number: int, healthy: int, seed: int) -> dict[str, Score]:
    random_ = random.Random(seed)
    scores = {"computing": Score(), "link": Score(), "healthy": Score()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scenario.toml"
        for place in range(number + healthy):
            kind = "healthy" if place >= number else ("computing", "link")[place % 2]
            slow, begins = random_.randrange(4), random_.randrange(8, 25)
            factor = random_.uniform(1.6, 5.0)
            noise = 'model = "lognormal"\nsigma = 0.1\n'
            if kind == "computing":
                text = f'{noise}[[slowdown]]\nmodel = "one-slow"\nworker = {slow}\nfactor = {factor}\n'
                text += f"workers = [{slow}]\nfrom_iteration = {begins}\n"
            elif kind == "link":
                text, begins = f"{noise}[[link]]\nworkers = [{slow}]\nlatency_s = {0.02 * factor}\n", 0
            else:
                text = noise if place % 2 else 'model = "random-slowdown"\nfactor = 4\n'
            path.write_text(text)
            run = simulate(
                "quadratic", POLICIES[place % 4], workers=4, servers=2, cluster=str(path), iterations=60,
                seed=random_.randrange(1 << 30),
            )  # fmt: skip
            followed(run, None if kind == "healthy" else slow, kind, begins, scores[kind])
    return scores


SCRIPT = """
import gc, sys, time, torch, paceline
world = paceline.init()
model = torch.nn.Linear(20, 1)
x = torch.randn(64, 20)
opt = paceline.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
kept = [[each] for each in range(600_000)] if sys.argv[1] == "gc" and world.rank == 1 else []
for step in range(100):
    cause = sys.argv[1] if world.rank == 1 and step >= 40 else ""
    if cause == "data":
        time.sleep(0.03)
    opt.zero_grad()
    time.sleep(0.015)
    if cause == "compute":
        began = time.process_time()
        while time.process_time() - began < 0.03:
            pass
    elif cause == "sleep":
        time.sleep(0.03)
    elif cause == "gc":
        gc.collect()
    model(x).sum().backward()
    opt.step()
"""


def live(number: int) -> dict[str, Score]:
    scores = {f"live {cause}": Score() for cause in CAUSES}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        for place in range(number):
            cause = list(CAUSES)[place % len(CAUSES)]
            kept = Path(folder) / f"run-{place}"
            command = ["run", "--workers", "3", "--dir", str(kept), str(script), cause]
            program = subprocess.Popen(
                [sys.executable, "-m", "paceline", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            score, said = scores[f"live {cause}"], Counter[str]()
            while not (kept / "config.json").exists() and program.poll() is None:
                time.sleep(0.05)
            reader = RunReader(kept)
            while not reader.is_read or program.poll() is None:
                time.sleep(0.25)
                reader.poll()
                for found in reader.snapshot().findings:
                    said[found.cause if found.rank == 1 else "somebody else"] += 1
            score.runs += 1
            score.alarms += "somebody else" in said
            score.worker += bool(said - Counter({"somebody else": 1 << 30}))
            score.cause += bool(said) and said.most_common(1)[0][0] == CAUSES[cause]
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--virtual", type=int, default=200)
    parser.add_argument("--healthy", type=int, default=50)
    parser.add_argument("--live", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name, score in virtual(arguments.virtual, arguments.healthy, arguments.seed).items():
        print(score.line(name), flush=True)
    for name, score in live(arguments.live).items():
        print(score.line(name), flush=True)


if __name__ == "__main__":
    main()
