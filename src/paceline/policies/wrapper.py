"""A policy around another: it changes how workers and shards talk, and leaves the conditions to its `base`."""

from __future__ import annotations

from functools import cached_property

from paceline.core.messages import Members
from paceline.core.policy import CentralPolicy
from paceline.core.pull_gate import PullGate


class PolicyWrapper(CentralPolicy):
    """The base of policies with a parameter `base`, the text of the policy that they wrap."""

    base: str

    @cached_property
    def base_policy(self) -> CentralPolicy:
        """The wrapped policy. It is parsed once, since shards ask at each rise of V which policy is in force."""
        from paceline.policies import central, parse

        return central(parse(self.base))

    def stands_alone(self) -> bool:
        """Whether the base is one policy, neither a wrapper nor made of several."""
        base = self.base_policy
        return type(base).machine is CentralPolicy.machine and base.in_force(0, 0) is base

    def write_base(self) -> None:
        """Sets `base` to the text by which the other policy calls itself, nested."""
        base = self.base_policy
        name = base.origin or base.name
        arguments = str(base).removeprefix(name).removeprefix(":")
        object.__setattr__(self, "base", f"{name}({arguments})" if arguments else name)

    def in_force(self, rank: int, V: int) -> CentralPolicy:
        return self.base_policy

    def constituents(self) -> tuple[CentralPolicy, ...]:
        return self.base_policy.constituents()

    def gate(self, rank: int, members: Members, seed: int) -> PullGate:
        return self.base_policy.gate(rank, members, seed)

    def validate(self, members: Members) -> None:
        self.base_policy.validate(members)
