"""Where a trainer's clipping of gradients happens in a run: on the servers, to the mean, wherever that is possible.

Trainers clip what DDP has averaged. The gradients of a paceline worker are its own, so the norm is taken away from the
trainer and said to `paceline.Optimizer`: `clip_mean` under a policy that steps on a mean, which bsp needs to equal one
process, else `clip`, by which each worker clips its own gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from paceline import session
from paceline.errors import ConfigError
from paceline.optim import choose, read_options
from paceline.policies.bsp import BSP
from paceline.runtime.clipping import check_clip_mean
from paceline.runtime.live.protocol.driver_texts import policy_of
from paceline.tensors.optimizers import Extras

if TYPE_CHECKING:
    from paceline.core.policy import Policy


def with_clipping(options: str, norm: float | None, policy: str | Policy | None) -> Extras:
    """Returns the options of an optimizer whose gradients are to have at most this norm; None and 0 ask for nothing."""
    extras = read_options(options)
    if not norm or extras.clip is not None or extras.clip_mean is not None:
        return extras
    clipped = msgspec.structs.replace(extras, clip_mean=float(norm))
    try:
        check_clip_mean(policy_in_force(policy), clipped)
    except ConfigError:
        return msgspec.structs.replace(extras, clip=float(norm))
    return clipped


def has_local_steps(policy: str | Policy | None) -> bool:
    """Returns whether each worker takes steps of its own between exchanges: these the trainer clips by itself."""
    run = session.init().run
    _, local = choose(policy, None, None, None)
    return local is not None or (run is not None and run.config.local_steps is not None)


def policy_in_force(policy: str | Policy | None) -> Policy:
    """Returns the policy of the run, or else the script's own; bsp if neither names one."""
    own, _ = choose(policy, None, None, None)
    run = session.init().run
    if run is not None and run.config.policy is not None:
        return policy_of(run.config.policy, run.config, own)
    return own if own is not None else BSP()
