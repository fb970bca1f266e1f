"""`paceline compare` and `paceline simulate`: policies on a bundled workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import tyro

from paceline import policies
from paceline.api import Job, check_servers_used, simulate_job, train_job_live
from paceline.commands.options import Flag, Training
from paceline.commands.screen import Watching, console, show_table, size_of, tell_evaluated, tell_result, tell_slices
from paceline.errors import ConfigError
from paceline.run import Run


@dataclass(kw_only=True)
class Compare(Training):
    """Compare policies on one workload under one scenario, in virtual time or live.

    paceline compare bsp ssp:staleness=3 backup:extra=1 asp --cluster random-slowdown:factor=6 --target accuracy=0.95
    """

    policies: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Policies as text: bsp, asp, ssp:staleness=3, backup:extra=1 (`paceline policies` lists them)."""
    live: Flag = False
    """Run in real processes on this machine, with the scenario's slowdowns as sleeps, instead of virtual time."""

    def main(self) -> int:
        self.check()
        if not self.policies:
            raise ConfigError(f"name at least one policy to compare (known: {', '.join(policies.CATALOGUE)})")
        check_servers_used(self.policies, self.servers)
        jobs = [Job(policy=policy, **self.arguments()) for policy in self.policies]
        train = train_job_live if self.live else simulate_job
        runs = [_do(job, train) for job in jobs]
        where = "live, in real processes" if self.live else "in virtual time"
        show_table(runs, f"{jobs[0].workload.name}, {_size(jobs)}, {where}")
        tell_slices(runs)
        tell_evaluated(runs)
        _tell_data(jobs[0])
        _tell_layers(runs)
        for path in self.save(runs, jobs[0].config()):
            console.print(f"wrote {path}", soft_wrap=True)
        return 0


@dataclass(kw_only=True)
class Simulate(Training):
    """Train with one policy in virtual time.

    paceline simulate --policy ssp:staleness=3 --cluster one-slow:factor=4 --workers 8 --iterations 200
    """

    policy: str = "bsp"
    """The policy as text (`paceline policies` lists them)."""

    def main(self) -> int:
        self.check()
        check_servers_used([self.policy], self.servers)
        job = Job(policy=self.policy, **self.arguments())
        run = _do(job, simulate_job)
        show_table([run], f"{job.workload.name}, {_size([job])}, in virtual time")
        tell_slices([run])
        tell_evaluated([run])
        _tell_data(job)
        _tell_layers([run])
        for path in self.save([run], job.config()):
            console.print(f"wrote {path}", soft_wrap=True)
        return 0


def _do(job: Job, train: Callable[..., Run]) -> Run:
    for warning in job.warnings if train is simulate_job else ():  # a live run says it by itself
        console.print(f"warning: {warning}", soft_wrap=True)
    with Watching(str(job.policy), job.target) as watch:
        run = train(job, watch=watch)
    tell_result(run)
    return run


def _size(jobs: list[Job]) -> str:
    """How many take part. Where some policies have servers and some have none, workers are peers under these."""
    return size_of(max((job.members for job in jobs), key=lambda members: members.servers))


def _tell_layers(runs: list[Run]) -> None:
    """Staleness layer by layer, as 004's Table 1, bottom first."""
    for run in runs:
        for layer, numbers in run.staleness_by_layer().items():
            line = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
            console.print(f"{run.policy}, staleness of layer {layer}: {line}", soft_wrap=True)


def _tell_data(job: Job) -> None:
    if job.workload.data:
        console.print(f"data: {job.workload.data}", soft_wrap=True)
