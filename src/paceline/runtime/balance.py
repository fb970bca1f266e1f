"""Which policies balanced batches make sense for, asked by both runtimes."""

from __future__ import annotations

from paceline.core.policy import CentralPolicy, Policy
from paceline.errors import ConfigError


def check_balance(policy: Policy) -> None:
    """Refuses, in one line, to balance batches where nobody waits for slower workers by iterations."""
    parts = policy.constituents() if isinstance(policy, CentralPolicy) else (policy,)
    if not policy.balances or not any(part.balances for part in parts):
        raise ConfigError(
            f"balance=True is for policies under which workers wait for slower ones (bsp, backup, deadline, ssp, hop), "
            f"not for {policy}: there everybody goes at its own pace already"
        )
