"""Several policies in one run: another on each shard, another from some iteration on.

Each shard decides alone (FluentPS, Yao et al. 2019, III.A: "each parameter server can choose the adaptive
synchronization model to update its parameter shard"), so neither needs anything but the question which policy is in
force on shard m at V (`in_force`).

    ssp:staleness=3+backup:extra=1       shard 0 runs SSP, shard 1 Backup; repeated when there are more shards
    bsp@0,ssp:staleness=3@100            BSP up to iteration 99, SSP from iteration 100 on

A *mix* is as strict as the strictest of its shards, since a worker needs an answer from all, and its slices are
trained differently: stale gradients on one, dropped ones on another.

A *switch* takes effect on each shard when its own V gets there, V being the progress of the slowest worker
(`Shard.switch`): nothing is held over, V jumps to where the fastest worker stands, the others adopt that, and
the one gradient each of them is computing is applied when it comes. So a worker that ASP had let run 100 ahead
does not wait 100 iterations for BSP's first. The shards need not switch at the same moment: "shards disagree"
(`core/shard.py`) holds here as at any time.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from paceline.core.messages import Members
from paceline.core.policy import CentralPolicy
from paceline.errors import ConfigError


@dataclass(frozen=True)
class Mix(CentralPolicy):
    """Shard m runs the m-th of several policies."""

    name: ClassVar[str] = "mix"
    paper: ClassVar[str] = "Yao et al. 2019, III.A, Figure 2"
    policies: tuple[CentralPolicy, ...] = dataclasses.field(default=())

    def __post_init__(self) -> None:
        refuse_composites(self.policies)

    def __str__(self) -> str:
        return "+".join(map(str, self.policies))

    def in_force(self, rank: int, V: int) -> CentralPolicy:
        return self.policies[rank % len(self.policies)]

    def constituents(self) -> tuple[CentralPolicy, ...]:
        return self.policies

    def validate(self, members: Members) -> None:
        for policy in self.policies:
            policy.validate(members)
        if len(self.policies) > members.servers:
            raise ConfigError(f"{self} names {len(self.policies)} policies for {members.servers} servers")


@dataclass(frozen=True)
class Switch(CentralPolicy):
    """One policy after the other, each from an iteration on."""

    name: ClassVar[str] = "switch"
    paper: ClassVar[str] = "Yao et al. 2019, III.A (models are adjusted at runtime)"
    phases: tuple[tuple[CentralPolicy, int], ...] = dataclasses.field(default=())

    def __post_init__(self) -> None:
        refuse_composites([part for policy, _ in self.phases for part in parts(policy)])
        starts = [start for _, start in self.phases]
        if starts[:1] != [0] or any(after <= before for before, after in pairwise(starts)):
            raise ConfigError(f"{self}: the first policy begins @0, each other at a later iteration")

    def __str__(self) -> str:
        return ",".join(f"{policy}@{start}" for policy, start in self.phases)

    def in_force(self, rank: int, V: int) -> CentralPolicy:
        current = next(policy for policy, start in reversed(self.phases) if start <= V)
        return current.in_force(rank, V)

    def constituents(self) -> tuple[CentralPolicy, ...]:
        return tuple(part for policy, _ in self.phases for part in policy.constituents())

    def validate(self, members: Members) -> None:
        for policy, _ in self.phases:
            policy.validate(members)


def parts(policy: CentralPolicy) -> tuple[CentralPolicy, ...]:
    return policy.policies if isinstance(policy, Mix) else (policy,)


def refuse_composites(policies: list[CentralPolicy] | tuple[CentralPolicy, ...]) -> None:
    """Refuses policies that decide what workers do too: those cannot differ between shards or change while running."""
    if not policies:
        raise ConfigError("a mix or a switch needs at least one policy")
    for policy in policies:
        if not isinstance(policy, CentralPolicy):
            raise ConfigError(f"{policy!r} cannot be one of several policies: give a policy, as SSP(3)")
        if type(policy).machine is not CentralPolicy.machine or isinstance(policy, Mix | Switch):
            raise ConfigError(f"{policy} cannot be one of several policies: it says what workers do, not only shards")
