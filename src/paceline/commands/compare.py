"""`paceline compare` and `paceline simulate`: policies on a bundled workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import tyro

from paceline import policies
from paceline.api import Job, check_servers_used, simulate_job, train_job_live
from paceline.commands.options import Flag, Training
from paceline.commands.terminal import (
    ProgressDisplay,
    console,
    print_evaluated,
    print_result,
    print_slices,
    print_wall,
    show_table,
    size_of,
)
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
        print_slices(runs)
        print_wall(runs)
        print_evaluated(runs)
        _print_data(jobs[0])
        _print_layers(runs)
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
        print_slices([run])
        print_evaluated([run])
        _print_data(job)
        _print_layers([run])
        for path in self.save([run], job.config()):
            console.print(f"wrote {path}", soft_wrap=True)
        return 0


def _do(job: Job, train: Callable[..., Run]) -> Run:
    for warning in job.warnings if train is simulate_job else ():  # a live run says it by itself
        console.print(f"warning: {warning}", soft_wrap=True)
    with ProgressDisplay(str(job.policy), job.target) as watch:
        run = train(job, watch=watch)
    print_result(run)
    return run


def _size(jobs: list[Job]) -> str:
    """Returns how many take part. If some policies have servers and some have none, workers are peers under these."""
    return size_of(max((job.members for job in jobs), key=lambda members: members.servers))


def _print_layers(runs: list[Run]) -> None:
    """Prints staleness layer by layer, as in Table 1 of Chen et al. 2016, bottom first."""
    for run in runs:
        for layer, numbers in run.staleness_by_layer().items():
            line = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
            console.print(f"{run.policy}, staleness of layer {layer}: {line}", soft_wrap=True)


def _print_data(job: Job) -> None:
    if job.workload.data:
        console.print(f"data: {job.workload.data}", soft_wrap=True)
