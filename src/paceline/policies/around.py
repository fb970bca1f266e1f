"""A policy around another: it changes how workers and shards talk, and leaves the conditions to its `base`."""

from __future__ import annotations

from functools import cached_property

from paceline.core.gate import Gate
from paceline.core.messages import Members
from paceline.core.policy import CentralPolicy


class Around(CentralPolicy):
    """To be derived from, with a parameter `base`: the text of the other policy."""

    base: str

    @cached_property
    def base_policy(self) -> CentralPolicy:
        """Read once: a shard asks at each rise of V which policy is in force."""
        from paceline.policies import central, parse

        return central(parse(self.base))

    def stands_alone(self) -> bool:
        """Whether the base is one policy, not around another nor made of several."""
        base = self.base_policy
        return type(base).machine is CentralPolicy.machine and base.in_force(0, 0) is base

    def write_base(self) -> None:
        """Have `base` be the text by which the other policy calls itself, nested."""
        base = self.base_policy
        name = base.origin or base.name
        arguments = str(base).removeprefix(name).removeprefix(":")
        object.__setattr__(self, "base", f"{name}({arguments})" if arguments else name)

    def in_force(self, rank: int, V: int) -> CentralPolicy:
        return self.base_policy

    def gate(self, rank: int, members: Members, seed: int) -> Gate:
        return self.base_policy.gate(rank, members, seed)

    def validate(self, members: Members) -> None:
        self.base_policy.validate(members)
