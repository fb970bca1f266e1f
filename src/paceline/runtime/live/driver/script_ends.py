"""What scripts say of the end: one ends the run for all, or has come to its own end while others go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.run import STOPPED
from paceline.runtime.live.driver.health import HealthMonitor
from paceline.runtime.live.driver.peers import Peers
from paceline.runtime.live.driver.processes import Workers
from paceline.runtime.live.driver.roster import Roster
from paceline.runtime.live.driver.run_state import RunState
from paceline.runtime.live.protocol import script_calls, wire


@dataclass(eq=False)
class ScriptEnds:
    state: RunState
    roster: Roster
    workers: Workers
    peers: Peers
    health: HealthMonitor
    say: Callable[[str], None]
    ended: dict[int, int] = field(default_factory=dict)
    """Workers whose script has come to its end, and the first iteration they have not done; until that is told."""

    def take_request(self, request: script_calls.EndRun) -> None:
        """A script has called `paceline.stop()`."""
        if self.state.begun and not self.state.stopping:
            where = f"worker {request.rank} has called paceline.stop() at iteration {request.iteration}"
            self.say(f"{where}: all end after their current iterations")
            self.workers.stop("paceline.stop()", STOPPED)

    def take_leave(self, leave: wire.Leave) -> None:
        if leave.finished and self.state.begun and not self.state.stopping:
            self.ended[leave.rank] = leave.iteration

    def tick(self) -> None:
        """Tell who ended early, once others are seen to be further: all that end together are somewhere at first."""
        pushed = self.health.pushed
        for rank, iteration in list(self.ended.items()):
            if rank in self.roster.members and not self.state.without_servers:
                del self.ended[rank]  # it has come again
                continue
            working = dict(self.peers.at_work(self.roster.view()).members)
            further = [other for other in working if pushed(other) > iteration]
            if further and not self.state.stopping:
                del self.ended[rank]
                many = f"{len(working)} others go on without it"
                alone = f"worker {min(working)} goes on alone"
                self.say(
                    f"the script of worker {rank} has ended at iteration {iteration}: "
                    f"{many if len(working) > 1 else alone}, at iteration {max(map(pushed, further))}"
                )
