"""Random faults in random runs, and a check of everything that must hold. A command, not a test:

    python benchmarks/chaos.py --faults 200 --seed 0 --json chaos.json
    python benchmarks/chaos.py --seed 0 --run 17            # that run alone, with what it printed

Each run is `paceline run` of benchmarks/chaos_job.py with a policy, one or several servers, durable or not, and a list
of faults: workers, servers and the driver are killed (SIGKILL) or stopped for 1 to 20 seconds (SIGSTOP, SIGCONT), from
the first moment on and also while an earlier fault is being dealt with. A run whose driver was killed is resumed
(`paceline resume`). Run, faults and their moments follow from the seed and the run's number.

What must hold is looked at from outside (benchmarks/chaos_checks.py): the run ends in time and as the documents say,
the model has learned, no sample of a finished epoch and no acknowledged update is lost, no update counts twice, and no
process, shared memory, socket or unfinished file is left. Runs that the documents give up (docs/durability.md, README)
are counted by their reason. Exit code 1 if anything else happened.

Drivers are forks of this process, which has imported torch already; so are workers, but for one run in eight, in which
they are fresh interpreters as `paceline run` starts them.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import chaos_checks
import torch
from soaking import group, living

from paceline import cli
from paceline.function_workers import function_starter
from paceline.run import Run
from paceline.runtime.live.driver import children, driver, script_workers
from paceline.runtime.live.system.process_setup import die_with

JOB = str(Path(__file__).with_name("chaos_job.py"))
POLICIES = (
    "bsp", "ssp:staleness=3", "asp", "dssp:low=1,high=4", "pssp:staleness=2,c=0.3", "backup:extra=1", "deadline",
    "elastic:lookahead=5", "specsync:abort_time=0.005,abort_rate=0.1", "scheduled", "hop:graph=ring,max_gap=3",
    "adpsgd:graph=complete", "bsp@0,asp@60", "ssp:staleness=3+backup:extra=1", "waiting:delay_s=0.003,base=bsp",
    "hop:graph=complete,backup=1,max_gap=4",
)  # fmt: skip
GONE_S = 10.0
"""How long the processes of a killed driver may live on."""
ENDS_S = 90.0
"""How long a run of this size may take on a busy machine, besides what its faults cost."""
KILL_S, RESUME_S, IMPORTS_S = 10.0, 20.0, 120.0
"""What a kill costs at most (a worker's pause before it comes back), a resume, and fresh interpreters."""


@dataclass(frozen=True)
class Fault:
    """`after_s` after the fault before it, or at first the driver's start, this is done to one of the processes.

    `which` chooses among those of the role that live then. With `in_training` time counts from when somebody trains.
    """

    after_s: float
    what: str
    role: str
    which: int
    for_s: float = 0.0
    in_training: bool = False

    def __str__(self) -> str:
        return f"{self.what} {self.role}" + (f" {self.for_s:.0f} s" if self.for_s else "")


@dataclass(frozen=True)
class Plan:
    """All that is decided before a run."""

    number: int
    policy: str
    workers: int
    servers: int
    durable: bool
    checkpoints: bool
    restarts: int
    hang_timeout_s: float | None
    fresh: bool
    steps: int
    seed: int
    faults: tuple[Fault, ...]

    @property
    def peers(self) -> bool:
        return self.servers == 0

    def arguments(self, folder: Path, notes: Path) -> list[str]:
        size = ["--workers", str(self.workers)] + ["--servers", str(self.servers)] * (not self.peers)
        checkpointing = ["--durable"] * self.durable + ["--checkpoint-updates", "40"] * self.checkpoints
        care = ["--restarts", str(self.restarts)]
        care += ["--hang-timeout-s", str(self.hang_timeout_s)] if self.hang_timeout_s is not None else []
        where = ["--dir", str(folder), "--seed", str(self.seed), "--policy", self.policy]
        script = [JOB, str(notes), str(self.steps), "peers" if self.peers else "servers"]
        return ["run", *size, *checkpointing, *care, *where, *script]

    def __str__(self) -> str:
        kept = "durable" if self.durable else "checkpoints" if self.checkpoints else "not kept"
        return f"{self.policy}, {self.workers} workers, {self.servers} servers, {kept}"


def make_plan(seed: int, number: int, policies: tuple[str, ...]) -> Plan:
    """The run of this number. If it keeps only the checkpoint of the beginning, servers and driver are killed once."""
    draw = random.Random(f"{seed} {number}")
    policy = policies[number % len(policies)]
    peers = policy.startswith(("hop", "adpsgd"))
    servers = 0 if peers else draw.choice((1, 2, 2, 3)) if "+" not in policy else 2
    durable = not peers and draw.random() < 0.5
    checkpoints = not peers and (draw.random() < 0.5 if durable else draw.random() < 0.85)
    workers, restarts = draw.choice((3, 3, 4)), draw.choice((0, 100, 100, 100))
    hang_timeout_s = round(draw.uniform(4, 6), 1) if draw.random() < 0.25 else None
    killable = {"worker": 100 if restarts else workers - 2, "server": 100, "driver": 100}
    if not durable and not checkpoints:
        killable["server"] = killable["driver"] = 1
    fresh = draw.random() < 1 / 8
    faults: list[Fault] = []
    for index in range(draw.randint(3, 9)):
        role = draw.choices(("worker", "server", "driver"), (4, 0, 0.6) if peers else (4, 3, 2))[0]
        what = "kill" if draw.random() < 0.6 and killable[role] > 0 else "stop"
        killable[role] -= what == "kill"
        at_once = draw.random() < 0.3
        after_s = draw.uniform(0, 0.2) if at_once else draw.uniform(0.1, 1.2)
        long = draw.random() < (0.1 if hang_timeout_s is None else 0.3)
        for_s = 0.0 if what == "kill" else draw.uniform(8, 20) if long else min(1 + draw.expovariate(1.0), 8)
        in_training = draw.random() < (0.15 if index else 0.6)
        faults.append(Fault(round(after_s, 3), what, role, draw.randrange(12), round(for_s, 2), in_training))
    return Plan(
        number, policy, workers, servers, durable, checkpoints, restarts, hang_timeout_s,
        fresh, draw.randint(150, 400), draw.randrange(1000), tuple(faults),
    )  # fmt: skip


# The driver's process.


class RecordedDriver(driver.Driver):
    """Writes down which processes it has, and in the end which epochs are finished."""

    record: Path

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        adopt = self.parts.children.adopt

        def note(child: children.Child) -> None:
            adopt(child)
            with self.record.open("a") as file:
                file.write(f"{os.getpid()} {child.role} {child.pid}\n")

        self.parts.children.adopt = note  # type: ignore[method-assign]

    def run(self) -> Run:
        try:
            return super().run()
        finally:
            if table := self.parts.sample_dispatchers.dispatches.get(0):
                self.record.with_name("epochs").write_text(json.dumps([*range(table.first), *table.finished()]))


def fork_starter(script: list[str], *options: object) -> children.WorkerStarter:
    """In place of `script_starter`: the script in a fork."""

    def work() -> None:
        sys.argv = script
        runpy.run_path(script[0], run_name="__main__")

    return function_starter(work)


def start_driver(arguments: list[str], base: Path, fresh: bool) -> int:
    """A process group with the program in it; what all print goes to a file."""
    runner = os.getpid()
    leader = os.fork()
    if leader:
        with contextlib.suppress(OSError):
            os.setpgid(leader, leader)
        return leader
    os.setpgid(0, 0)
    die_with(runner)
    log = os.open(base / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    RecordedDriver.record = base / "processes"
    driver.Driver = RecordedDriver  # type: ignore[misc]
    if not fresh:
        script_workers.script_starter = fork_starter
    print(f"--- paceline {' '.join(arguments)}", flush=True)
    code = 1
    try:
        code = cli.run(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# One run.


@dataclass
class Outcome:
    plan: Plan
    landed: list[Fault] = field(default_factory=list)
    """The faults that found somebody."""
    ended: str = ""
    """In a word how."""
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0
    resumed: int = 0
    """How often the driver was killed and the run gone on with."""
    log: str = ""

    def line(self) -> str:
        faults = ", ".join(map(str, self.landed)) or "no fault"
        verdict = f"VIOLATION: {'; '.join(self.violations)}" if self.violations else self.ended
        return f"run {self.plan.number}: {self.plan}: {faults}: {verdict}, {self.seconds:.1f} s"


class Runner:
    """Has a run done, does to it what its plan says, and checks what comes of it."""

    def __init__(self, plan: Plan, base: Path) -> None:
        self.plan, self.base = plan, base
        self.outcome = Outcome(plan)
        self.stopped: list[tuple[float, int]] = []
        """(until when, the process's file descriptor)."""
        self.folder, self.notes = base / "run", base / "notes"
        self.drivers: list[int] = []
        self.code: int | None = None
        """The driver's exit code."""
        costs = [fault.for_s + (KILL_S if fault.what == "kill" else 0.0) for fault in plan.faults]
        resumes = RESUME_S * sum(fault.role == "driver" for fault in plan.faults)
        self.bound_s = ENDS_S + sum(costs) + resumes + IMPORTS_S * plan.fresh

    def play(self) -> Outcome:
        began = time.monotonic()
        self.begin()
        for fault in self.plan.faults:
            while fault.in_training and self.code is None and not any(self.notes.glob("*.begun")):
                self.pass_time(time.monotonic() + 0.01)
                if time.monotonic() > began + self.bound_s:
                    break
            self.pass_time(time.monotonic() + fault.after_s)
            if self.code is None:
                self.inject(fault)
        self.pass_time(began + self.bound_s)
        if self.code is None:
            self.outcome.violations.append(f"it hangs: not ended after {self.bound_s:.0f} s")
            self.show_stacks()
            os.waitpid(self.driver, 0)
        self.await_gone()
        for _, process in self.stopped:
            os.close(process)
        self.outcome.seconds = time.monotonic() - began
        self.outcome.log = (self.base / "log").read_text(errors="replace")
        if not self.outcome.violations:
            self.outcome.ended, found = chaos_checks.judge(self)
            self.outcome.violations += found
        return self.outcome

    @property
    def driver(self) -> int:
        return self.drivers[-1]

    def begin(self) -> None:
        """At first, or again if a killed driver has left nothing to go on with."""
        for folder in (self.folder, self.notes):
            shutil.rmtree(folder, ignore_errors=True)
        self.notes.mkdir()
        self.start(self.plan.arguments(self.folder, self.notes))

    def start(self, arguments: list[str]) -> None:
        self.drivers.append(start_driver(arguments, self.base, self.plan.fresh))
        self.code = None

    def pass_time(self, until: float) -> None:
        """Until then, or until the driver has ended."""
        while time.monotonic() < until and self.code is None:
            self.continue_stopped()
            ended, status = os.waitpid(self.driver, os.WNOHANG)
            if ended:
                self.code = os.waitstatus_to_exitcode(status)
                if self.outcome.resumed and chaos_checks.found_nothing(self):
                    self.begin()
            time.sleep(0.005)

    def continue_stopped(self) -> None:
        """Those whose time has come."""
        for entry in [entry for entry in self.stopped if entry[0] <= time.monotonic()]:
            self.stopped.remove(entry)
            send(entry[1], signal.SIGCONT)
            os.close(entry[1])

    def inject(self, fault: Fault) -> None:
        victims = [self.driver] if fault.role == "driver" else self.processes(fault.role)
        if not victims:
            return
        try:
            process = os.pidfd_open(victims[fault.which % len(victims)])
        except ProcessLookupError:
            return
        self.outcome.landed.append(fault)
        send(process, signal.SIGKILL if fault.what == "kill" else signal.SIGSTOP)
        if fault.what == "stop":
            self.stopped.append((time.monotonic() + fault.for_s, process))
            return
        os.close(process)
        if fault.role == "driver":
            os.waitpid(self.driver, 0)
            self.await_gone()
            self.outcome.resumed += 1
            self.start(["resume", str(self.folder)])

    def processes(self, role: str) -> list[int]:
        """The living ones that the driver has written down."""
        try:
            lines = (self.base / "processes").read_text().split("\n")
        except OSError:
            return []
        mine = [line.split() for line in lines if line.startswith(f"{self.driver} {role} ")]
        return [int(pid) for _, _, pid in mine if living(int(pid), self.driver)]

    def await_gone(self) -> None:
        """No process of the run may live much longer than its driver, or than it is stopped."""
        until = max([time.monotonic(), *(until for until, _ in self.stopped)]) + GONE_S
        while left := group(self.driver):
            self.continue_stopped()
            if time.monotonic() > until:
                self.outcome.violations.append(f"{len(left)} processes live {GONE_S:g} s after their driver's end")
                self.show_stacks()
                return
            time.sleep(0.01)

    def show_stacks(self) -> None:
        """Have all print where they are, and end them."""
        for number in (signal.SIGCONT, signal.SIGUSR1, signal.SIGKILL):
            for pid in group(self.driver):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(0.5)


def send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, number)


def play(plan: Plan, keep: bool) -> Outcome:
    """Do a run. Its folder is kept if it went wrong."""
    base = Path(tempfile.mkdtemp(prefix=f"chaos-{plan.number}-"))
    torch.set_num_threads(1)
    outcome = Runner(plan, base).play()
    if outcome.violations or keep:
        outcome.violations = [f"{violation} (see {base})" for violation in outcome.violations]
    else:
        shutil.rmtree(base)
        outcome.log = ""
    return outcome


# All runs.


def play_all(options: argparse.Namespace) -> list[Outcome]:
    """Runs, several at a time, until so many faults have landed."""
    outcomes: list[Outcome] = []
    landed, number = 0, 0
    pending: set[Future[Outcome]] = set()
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as pool:
        while landed < options.faults or pending:
            expected = landed + 5 * len(pending)
            if expected < options.faults and len(pending) < options.jobs:
                pending.add(pool.submit(play, make_plan(options.seed, number, options.policies), False))
                number += 1
                continue
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                outcome = future.result()
                outcomes.append(outcome)
                landed += len(outcome.landed)
                print(f"{landed}/{options.faults} {outcome.line()}", flush=True)
    return outcomes


def summary(outcomes: list[Outcome], seconds: float) -> str:
    landed = [fault for outcome in outcomes for fault in outcome.landed]
    kinds = Counter(f"{fault.what} {fault.role}" for fault in landed)
    ends = Counter(outcome.ended for outcome in outcomes if not outcome.violations)
    bad = sum(bool(outcome.violations) for outcome in outcomes)
    return (
        f"{len(landed)} faults ({', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}) in "
        f"{len(outcomes)} runs of {len({outcome.plan.policy for outcome in outcomes})} policies, "
        f"{sum(outcome.resumed for outcome in outcomes)} resumes, {seconds:.0f} s: "
        + ", ".join(f"{count} {end}" for end, count in ends.most_common())
        + (f"; {bad} VIOLATED" if bad else "; nothing hung, was lost or is left")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policies", nargs="+", default=POLICIES, help="take turns; all kinds if none is named")
    parser.add_argument("--run", type=int, help="only the run of this number; its folder is kept")
    parser.add_argument("--jobs", type=int, default=3, help="runs at the same time: they mostly sleep")
    parser.add_argument("--json", type=Path, help="a file for plans and outcomes")
    options = parser.parse_args()
    options.policies = tuple(options.policies)
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=0.0)  # has torch import half of itself; not in every fork
    began = time.monotonic()
    if options.run is None:
        outcomes = play_all(options)
        print(summary(outcomes, time.monotonic() - began))
    else:
        outcomes = [play(make_plan(options.seed, options.run, options.policies), keep=True)]
        print(*outcomes[0].plan.faults, outcomes[0].log, outcomes[0].line(), sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    return int(any(outcome.violations for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
