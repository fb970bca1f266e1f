"""Which policies can clip the mean gradient (`clip_mean`), asked by both runtimes before a run begins."""

from __future__ import annotations

from paceline.core.policy import CentralPolicy, Policy
from paceline.errors import ConfigError
from paceline.tensors.optimizers import Extras


def check_clip_mean(policy: Policy, extras: Extras) -> None:
    """Refuse, in one line, to clip the mean under a policy that does not step on one."""
    if extras.clip_mean is None:
        return
    if not isinstance(policy, CentralPolicy):
        why = f"{policy} averages parameters, not gradients"
    elif single := next((each for each in policy.constituents() if each.on_arrival), None):
        why = f"{single} steps on each gradient when it arrives"
    else:
        return
    raise ConfigError(
        f"clip_mean={extras.clip_mean:g} needs a policy that steps on the mean of an iteration (bsp, backup, "
        f"deadline), but {why}: use clip={extras.clip_mean:g}, which scales each worker's own gradient"
    )
