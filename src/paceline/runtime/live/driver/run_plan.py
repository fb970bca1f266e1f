"""What a live run is to be: who takes part, under which policy, how faults are dealt with, what is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.cluster import Cluster
from paceline.core.local_steps import LocalSteps
from paceline.core.messages import Members
from paceline.core.policy import Policy
from paceline.errors import ConfigError
from paceline.run import Target
from paceline.runtime.live.driver.checkpointing import CheckpointOptions
from paceline.runtime.live.driver.children import WorkerStarter
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.runtime.live.driver.remote_hosts import Meeting, RemoteHosts
from paceline.runtime.live.driver.run_state import RunState
from paceline.runtime.live.driver.shutdown_signals import ShutdownSignals
from paceline.runtime.live.protocol.configuration import MultihostOptions
from paceline.tensors.layout import EPS


@dataclass(frozen=True)
class OpenRun:
    """A run that agents of other hosts may come to, as it is for whoever places them."""

    hosts: RemoteHosts
    state: RunState
    interrupts: ShutdownSignals
    say: Callable[[str], None]
    may_start: Callable[[int], bool]
    """Whether a worker that has ended may be started again."""


@dataclass(frozen=True)
class RunPlan:
    """What to run. The policy may be left to the script; `starter` starts the workers."""

    members: Members
    starter: WorkerStarter
    policy: Policy | None = None
    cluster: Cluster | None = None
    seed: int = 0
    target: Target | None = None
    care: FaultPolicy = field(default_factory=FaultPolicy)
    checkpointing: CheckpointOptions | None = None
    slicing: str = EPS
    meeting: Meeting | None = None
    """Where agents of other hosts meet the driver, who then runs the workers; without one they all run here."""
    opened: Callable[[OpenRun], None] = lambda run: None
    """Called when agents may come."""
    tick: Callable[[], None] = lambda: None
    """Called now and then: what places the processes may have something to say."""
    multihost: MultihostOptions | None = None
    """How it crosses hosts, if it may."""
    servers_on: str = "auto"
    """Where the servers have the parameters: "cpu", "gpu", or "auto", where the models are."""
    servers_asked: int | None = None
    """How many servers somebody has asked for: too many, if the script's policy has none."""
    local_steps: LocalSteps | None = None
    """How workers train alone between exchanges; the script's if None."""

    @property
    def obstacle_to_devices(self) -> str:
        """Why this run must have its parameters on the CPU; "" if they may be on a device."""
        if self.multihost is not None:
            return "the run may cross hosts"
        if self.checkpointing is not None and self.checkpointing.durable is not None:
            return "a durable server logs what it has in memory of its own"
        return ""

    def check(self) -> None:
        """Refuses what cannot be together."""
        spread = self.meeting is not None and self.meeting.spread
        if spread and self.checkpointing is not None and self.checkpointing.durable is not None:
            raise ConfigError("a durable run has its servers beside the driver: its logs are on that host's disk")
