"""SpecSync: begin at once, and begin again if much has changed since.

The rule. Workers push and pull as under `base`. A worker that has its parameters tells the scheduler and computes. The
scheduler looks after ABORT_TIME: if the others have pushed more than m * ABORT_RATE times by then (m workers), the
worker gives up what it has, pulls again and starts over, on parameters that have these updates in them; once in an
iteration at most. Naive waiting pays its delay in every iteration; this pays only when there is something to be had for
it. (SpecSync, Zhang et al. 2018, IV and V, Algorithm 2; the machines are in `core/speculation.py`.) Both numbers are
tuned by the scheduler once an epoch from the pushes of the last (Algorithm 1, `policies/specsync_tuning.py`), or fixed
with `abort_time` (seconds) and `abort_rate`; `paceline tune specsync` tries a grid of those.

What it promises. What `base` promises: asp, or ssp and its kin. The second pull of an iteration waits for nobody, so
nothing is parked that would not be, and parameters only get fresher.

What it gives up. What was computed until the abort, up to half an iteration; another answer of every shard; two
small messages an iteration through one node. Where ASP converges well anyhow there is little to win by it. A policy
that takes means (bsp, backup, deadline) has no use for it: there all gradients of an iteration are computed on the
same version, and a worker that began again would make the others wait. One worker alone never speculates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.core.machine import Machine
from paceline.core.messages import Members, Role
from paceline.core.spec import option, parameter
from paceline.core.speculation import Speculation, SpeculativeWorker, Speculator
from paceline.errors import ConfigError
from paceline.policies.specsync_tuning import tune
from paceline.policies.wrapper import PolicyWrapper


@dataclass(frozen=True)
class SpecSync(PolicyWrapper):
    """A worker gives up a computation and starts over on fresh parameters when others have pushed much since."""

    name: ClassVar[str] = "specsync"
    paper: ClassVar[str] = "Zhang et al. 2018 (speculative synchronization)"
    balances: ClassVar[bool] = False
    refuses_local_steps: ClassVar[str] = "a round that is begun again would lose the steps it has taken"
    has_scheduler: ClassVar[bool] = True
    servers_may_change: ClassVar[bool] = False

    base: str = parameter("asp", doc="the policy that decides who waits: asp, or of ssp's kind, as ssp(staleness=3)")
    abort_time: float | None = option(None, low=0, doc="seconds after which an iteration is looked at; tuned if none")
    abort_rate: float | None = option(None, low=0, doc="pushes by others, as a share of m, that end it; tuned if none")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.stands_alone() or not self.base_policy.on_arrival:
            raise ConfigError(
                f"specsync:base={self.base} cannot be speculated on: name one policy that applies gradients on arrival "
                "(asp, ssp, dssp, pssp)"
            )
        if (self.abort_time is None) != (self.abort_rate is None):
            raise ConfigError("specsync takes abort_time and abort_rate together, or neither and tunes them itself")
        self.write_base()

    def machine(self, role: Role, rank: int, members: Members, seed: int) -> Machine:
        if role == "worker":
            return SpeculativeWorker(rank, members)
        if role == "scheduler":
            if self.abort_time is None or self.abort_rate is None:
                return Speculator(None, tune)
            return Speculator(Speculation(self.abort_time, self.abort_rate), None)
        return self.base_policy.machine(role, rank, members, seed)
