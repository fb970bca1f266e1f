"""The planner of a live run whose rounds of local steps are planned: a machine in the driver's process.

Workers say to the driver that they begin a round, and hear from it when to end that (`core/control/round_planner.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from paceline.core.control.round_planner import RoundBegun, RoundPlanner
from paceline.core.events import ViewChanged
from paceline.core.local_steps import LocalSteps
from paceline.core.messages import View
from paceline.policies.zipline import plan
from paceline.runtime.live.driver.messenger import Messenger
from paceline.runtime.live.protocol import round_messages


class RoundPlanning:
    """Tells the machine what workers say, and the workers what it orders."""

    def __init__(self, local: LocalSteps, now: Callable[[], float], messenger: Messenger) -> None:
        self.machine = RoundPlanner(local, plan)
        self.now = now
        self.messenger = messenger

    def hear(self, message: RoundBegun) -> None:
        """A worker begins a round. Its clock is not ours."""
        self._deliver(structs.replace(message, at=self.now()))

    def announce(self, view: View) -> None:
        self._deliver(ViewChanged(self.now(), view))

    def _deliver(self, event: RoundBegun | ViewChanged) -> None:
        for order in self.machine.handle(event):
            self.messenger.to_worker(order.worker, order.incarnation, round_messages.Planned(order))
