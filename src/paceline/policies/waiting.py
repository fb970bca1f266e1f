"""Naive waiting: a worker pushes, rests for a constant time, and only then pulls.

The rule. Between its push and its pull each worker waits `delay_s`, so that more of the others' updates are in what it
reads. Everything else is the policy it is put on top of, `base`: ASP as in the paper, or another. (SpecSync, Zhang et
al. 2018, III: the straw man that speculation improves on. There, of an iteration of 14 s, waiting 1 s helped and 5 s
hurt.)

What it promises. Fresher parameters, by as many updates as the others make in that time.

What it gives up. The time itself, in every iteration, whether anybody pushed or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.core.machine import Machine
from paceline.core.messages import Members, Role
from paceline.core.spec import parameter
from paceline.core.worker import Worker
from paceline.errors import ConfigError
from paceline.policies.wrapper import PolicyWrapper


@dataclass(frozen=True)
class Waiting(PolicyWrapper):
    """A worker rests for a constant time between its push and its pull; the rest is up to `base`."""

    name: ClassVar[str] = "waiting"
    paper: ClassVar[str] = "Zhang et al. 2018, section III (naive waiting)"

    delay_s: float = parameter(0.02, low=0, doc="seconds between push and pull")
    base: str = parameter("asp", doc="the policy it is put on top of, as ssp(staleness=3)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.stands_alone():
            raise ConfigError(
                f"waiting:base={self.base} cannot be waited on top of: name one policy that is not waiting"
            )
        self.write_base()

    def machine(self, role: Role, rank: int, members: Members, seed: int) -> Machine:
        if role == "worker":
            return Worker(rank, members, rest_s=self.delay_s)
        return self.base_policy.machine(role, rank, members, seed)
