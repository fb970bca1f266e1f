"""The machines that run in the driver's process: a scheduler if the policy has one, a reducer if means are clipped, a
planner if rounds of local steps are planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.core.events import ServersChanged
from paceline.core.local_steps import LocalSteps
from paceline.core.messages import Members, Resync, View
from paceline.runtime.live.driver.messenger import Messenger
from paceline.runtime.live.driver.norm_reduction import NormReduction
from paceline.runtime.live.driver.round_planning import RoundPlanning
from paceline.runtime.live.driver.run_state import Model
from paceline.runtime.live.driver.scheduler_runner import SchedulerRunner
from paceline.runtime.live.protocol import round_messages, wire


@dataclass(eq=False)
class Coordinators:
    """Starts the scheduler and the reducer if the model needs them, and passes events on to those that there are."""

    folder: Path
    seed: int
    now: Callable[[], float]
    messenger: Messenger
    ring: Callable[[Resync], None] | None
    scheduler: SchedulerRunner | None = None
    reducer: NormReduction | None = None
    planner: RoundPlanning | None = None

    def start(self, model: Model, members: Members) -> None:
        """Starts those that the model and the policy need."""
        if model.policy.has_scheduler:
            machine = model.policy.machine("scheduler", 0, members, self.seed)
            self.scheduler = SchedulerRunner(machine, self.folder, self.now, self.messenger, self.ring)
        if model.optimizer.extras.clip_mean is not None:
            self.reducer = NormReduction(members.servers, self.now, self.messenger.to_server)

    def start_planner(self, local: LocalSteps | None) -> None:
        """Starts the planner of rounds, if they are planned."""
        if local is not None and local.is_planned:
            self.planner = RoundPlanning(local, self.now, self.messenger)

    @property
    def waits(self) -> Mapping[int, str]:
        """Why each worker waits that the scheduler holds back."""
        return self.scheduler.waits if self.scheduler is not None else {}

    @property
    def clips_mean(self) -> bool:
        return self.reducer is not None

    def hear_scheduler(self, message: wire.Ask) -> None:
        if self.scheduler is not None:
            self.scheduler.hear(message.message)

    def hear_reducer(self, message: wire.Measured) -> None:
        if self.reducer is not None:
            self.reducer.hear(message)

    def hear_planner(self, message: round_messages.Begun) -> None:
        if self.planner is not None:
            self.planner.hear(message.message)

    def announce(self, view: View) -> None:
        if self.planner is not None:
            self.planner.announce(view)
        if self.scheduler is not None:
            self.scheduler.announce(view)

    def change_servers(self, event: ServersChanged) -> None:
        for machine in (self.scheduler, self.reducer):
            if machine is not None:
                machine.change_servers(event)

    def until_timer(self, at_most_s: float) -> float:
        """Returns how long to wait for a message."""
        return self.scheduler.until_timer(at_most_s) if self.scheduler is not None else at_most_s

    def fire_timers(self) -> None:
        if self.scheduler is not None:
            self.scheduler.fire_timers()

    def close(self) -> None:
        if self.scheduler is not None:
            self.scheduler.close()
