"""What a live run is to be: who takes part, under which policy, how faults are dealt with, what is kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.cluster import Cluster
from paceline.core.messages import Members
from paceline.core.policy import Policy
from paceline.run import Target
from paceline.runtime.live.children import StartWorker
from paceline.runtime.live.keeping import Keeping
from paceline.runtime.live.watching import Care
from paceline.tensors.layout import EPS


@dataclass(frozen=True)
class LivePlan:
    """What to run. The policy may be left to the script; `start_worker` makes the processes."""

    members: Members
    start_worker: StartWorker
    policy: Policy | None = None
    cluster: Cluster | None = None
    seed: int = 0
    target: Target | None = None
    care: Care = field(default_factory=Care)
    keeping: Keeping | None = None
    slicing: str = EPS
    servers_asked: int | None = None
    """How many servers somebody has asked for: too many, if the script's policy has none."""
