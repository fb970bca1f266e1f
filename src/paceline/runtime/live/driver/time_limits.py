"""How long a live run may take: to start its servers, to end when it was interrupted, altogether."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from paceline.errors import RunFailed
from paceline.runtime.live.driver.health import FaultPolicy
from paceline.runtime.live.driver.run_state import RunState
from paceline.runtime.live.driver.servers import Servers
from paceline.runtime.live.driver.shutdown_signals import ShutdownSignals

SERVERS_READY_S = 60.0


@dataclass(eq=False)
class TimeLimits:
    care: FaultPolicy
    state: RunState
    interrupts: ShutdownSignals
    servers: Servers
    servers_are_here: bool
    """Servers of other hosts may take as long as these do to come."""
    started_s: float = field(default_factory=time.monotonic)
    interrupted_s: float | None = None

    def tick(self) -> None:
        """Give the run up if something has taken too long."""
        limit, grace_s = self.care.timeout_s, self.care.grace_s
        if limit is not None and time.monotonic() - self.started_s > limit:
            raise RunFailed(f"the run did not end within {limit:g} s")
        if self.interrupts and grace_s is not None:
            self.interrupted_s = self.interrupted_s or time.monotonic()
            if time.monotonic() - self.interrupted_s > grace_s:
                raise RunFailed(f"the run was interrupted, and did not end within {grace_s:g} s")
        starting_s = time.monotonic() - self.servers.started_s
        late = not self.servers.all_there and starting_s > SERVERS_READY_S
        if not self.state.begun and late and self.servers_are_here:
            missing = min(set(range(self.servers.count)) - self.servers.there)
            raise RunFailed(f"server {missing} did not start within {SERVERS_READY_S:g} s")
