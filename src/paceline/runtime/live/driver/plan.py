"""What a live run is to be: who takes part, under which policy, how faults are dealt with, what is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.cluster import Cluster
from paceline.core.messages import Members
from paceline.core.policy import Policy
from paceline.run import Target
from paceline.runtime.live.configuration import Abroad
from paceline.runtime.live.driver.children import StartWorker
from paceline.runtime.live.driver.hosts import Hosts, Meeting
from paceline.runtime.live.driver.keeping import Keeping
from paceline.runtime.live.driver.watching import Care
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
    meeting: Meeting | None = None
    """Where agents of other hosts meet the driver, who then runs the workers; without one they all run here."""
    opened: Callable[[Hosts], None] = lambda hosts: None
    """Called when agents may come."""
    tick: Callable[[], None] = lambda: None
    """Called now and then: what places the processes may have something to say."""
    abroad: Abroad | None = None
    """How it crosses hosts, if it may."""
    servers_asked: int | None = None
    """How many servers somebody has asked for: too many, if the script's policy has none."""
