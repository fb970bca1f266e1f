"""The synchronization policies, one algorithm per file. `parse("ssp:staleness=3")` makes one from text."""

from __future__ import annotations

from paceline.core import spec
from paceline.core.policy import Policy
from paceline.errors import ConfigError
from paceline.policies.asp import ASP
from paceline.policies.backup import Backup
from paceline.policies.bsp import BSP
from paceline.policies.ssp import SSP

CATALOGUE: dict[str, type[Policy]] = {policy.name: policy for policy in (BSP, ASP, SSP, Backup)}


def parse(policy: str | Policy) -> Policy:
    """A policy from its text form; a policy object is returned as it is."""
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise ConfigError(f"a policy is a text like 'ssp:staleness=3' or a Policy, got {policy!r}")
    return spec.parse(policy, CATALOGUE, "policy")


__all__ = ["ASP", "BSP", "CATALOGUE", "SSP", "Backup", "Policy", "parse"]
