"""Scheduled: one scheduler decides for all shards together, as ps-lite does; the baseline of overlapping.

The rule. Pushes go to the shards as ever. A pull goes to the scheduler first, which holds it until the pull condition
of `base` holds for the *slowest shard*: under BSP, until every shard has finished the iteration. Then the worker pulls
from all shards at once. So pushing and pulling never overlap: nobody reads a slice while another is still being
written. (FluentPS, Yao et al. 2019, III.D and Figures 4, 5: "it does not allow the fast workers to send pull requests
until the slowest worker update all parameter shards". `core/scheduler.py`.)

What it promises. What `base` promises, and that all shards a worker reads from have finished the same iterations.
BSP is single-process training either way.

What it gives up. Time, and nothing is gained by it: three more messages one after the other in each iteration (shard
to scheduler to worker to shard), the slices that were ready early lie idle, and everything passes one node. It is
here to be compared with. `base` is a policy whose conditions have no memory: bsp, asp, ssp, backup, deadline. (ps-lite
has BSP, ASP and bounded delay; Yao et al. 2019, Table I.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.core.machine import Machine
from paceline.core.messages import Members, Role
from paceline.core.pull_gate import PullGate
from paceline.core.scheduler import ReportingShard, ScheduledWorker, Scheduler
from paceline.core.spec import parameter
from paceline.errors import ConfigError
from paceline.policies.wrapper import PolicyWrapper


@dataclass(frozen=True)
class Scheduled(PolicyWrapper):
    """One scheduler decides for all shards, so pushes and pulls do not overlap; the conditions are those of `base`."""

    name: ClassVar[str] = "scheduled"
    paper: ClassVar[str] = "Yao et al. 2019, III.D (non-overlap synchronization, as in ps-lite)"
    has_scheduler: ClassVar[bool] = True
    refuses_local_steps: ClassVar[str] = "it is a baseline for overlapping exchanges, and with rounds few are left"

    base: str = parameter("bsp", doc="the policy whose conditions the scheduler applies, as ssp(staleness=3)")

    def __post_init__(self) -> None:
        super().__post_init__()
        gate = type(self.base_policy.gate(0, Members(1, 1), 0))
        if not self.stands_alone() or (gate.may_pull, gate.freed_at) != (PullGate.may_pull, PullGate.freed_at):
            raise ConfigError(
                f"scheduled:base={self.base} cannot be decided by a scheduler: "
                "name one policy whose pull condition has no memory (bsp, asp, ssp, backup, deadline)"
            )
        self.write_base()

    def machine(self, role: Role, rank: int, members: Members, seed: int) -> Machine:
        if role == "worker":
            return ScheduledWorker(rank, members)
        if role == "server":
            return ReportingShard(self.base_policy, rank, members, seed)
        if role == "scheduler":
            return Scheduler(self.base_policy, members)
        raise ConfigError(f"{self} has no machine for the role {role!r}")
