"""Workers that are to be started again: killed ones, as long as there are restarts left, or as a scenario says."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from paceline.runtime.live.driver.children import Child, how

if TYPE_CHECKING:
    from paceline.runtime.live.driver.launch import Driver

PAUSE_S, PAUSE_MOST_S = 0.5, 30.0


class Restarting:
    def __init__(self, driver: Driver, restarts: int) -> None:
        self.driver = driver
        self.left = restarts
        self.due: list[tuple[float, int]] = []
        """(when, rank)."""

    def take(self, child: Child, code: int) -> bool:
        """A worker's process has ended, and not well: whether it will be started again."""
        driver = self.driver
        if driver.stopping:
            return False
        pause = driver.striker.restart_pause(child, code)
        if pause is not None:
            driver.say(f"{child} {how(code)}, as the scenario says; starting it again in {pause:g} s")
        elif self.left:
            self.left -= 1
            pause = min(PAUSE_S * 2**child.incarnation, PAUSE_MOST_S)
            driver.say(f"{child} {how(code)}; starting it again in {pause:g} s ({self.left} restarts left)")
        else:
            return False
        self.due.append((time.monotonic() + pause, child.rank))
        return True

    def tick(self) -> None:
        """Start those whose time has come. Who belongs to a host that is away is started when it is back."""
        driver = self.driver
        for entry in [entry for entry in self.due if entry[0] <= time.monotonic() or driver.stopping]:
            self.due.remove(entry)
            if not driver.stopping and (driver.hosts is None or driver.hosts.has_home(entry[1])):
                driver.start_worker(entry[1])
