"""What a scenario does to a live worker: it slows iterations and connections down, and injects faults."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from paceline.runtime.live.protocol import resizing_messages
from paceline.runtime.live.protocol.configuration import LiveConfig
from paceline.runtime.live.protocol.driver_texts import scenario_of
from paceline.runtime.live.system.training_end import Stopped

LOOK_S = 0.001
"""How often a worker that sleeps in place of computing checks whether its computation is given up."""


class ScenarioInjection:
    """What the scenario of a run does to this incarnation of worker `rank`."""

    def __init__(self, config: LiveConfig, rank: int, incarnation: int) -> None:
        self.scenario = scenario_of(config)
        faults = self.scenario.faults if self.scenario is not None and incarnation == 0 else ()
        self.faults = [f for f in faults if f.worker == rank and f.at_iteration is not None]
        resizes = self.scenario.resizes if self.scenario is not None else ()
        self.resizes = [(entry, each) for entry, each in enumerate(resizes) if each.at_iteration is not None]
        self.has_left = False
        """Whether a fault has this worker leave before its script has ended."""
        self.link = self.scenario.link(rank) if self.scenario is not None else None
        self.slowdown: Callable[[], float] | None = None
        """Returns how many times longer than undisturbed the next computation takes."""
        if self.scenario is not None:
            self.slowdown = self.scenario.slowdowns(rank, config.members.workers, config.seed)

    def slow_down(self, started: float, batch: float = 1.0, look: Callable[[], None] | None = None) -> None:
        """Makes the computation that began at `started` as long as the scenario says; calls `look` meanwhile.

        It is on `batch` times the samples of an equal batch.
        """
        if self.scenario is None or self.slowdown is None:
            return
        took = time.monotonic() - started
        known = self.scenario.undisturbed_s()
        undisturbed = took if known is None else known * self.scenario.of_batch(batch)
        until = time.monotonic() - took + self.slowdown() * undisturbed
        while (remaining := until - time.monotonic()) > 0:
            time.sleep(remaining if look is None else min(remaining, LOOK_S))
            if look is not None:
                look()

    def inject_faults(self, iteration: int) -> None:
        """Injects the faults of this iteration, or of one that was skipped."""
        for fault in [f for f in self.faults if iteration >= (f.at_iteration or 0)]:
            self.faults.remove(fault)
            if fault.kind in ("crash", "restart"):
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.kind == "leave":
                self.has_left = True
                raise Stopped
            elif fault.kind == "pause":
                time.sleep(fault.for_s)

    def wanted_servers(self, iteration: int) -> list[resizing_messages.Want]:
        """Returns the numbers of servers that the scenario wants at this iteration, or at one that was skipped."""
        due = [(entry, each) for entry, each in self.resizes if iteration >= (each.at_iteration or 0)]
        self.resizes = [each for each in self.resizes if each not in due]
        return [resizing_messages.Want(each.count, entry=entry) for entry, each in due]

    def pass_link(self, nbytes: int) -> None:
        """Takes the time that a gradient before the push, or an answer after it, needs on a slow connection."""
        if self.link is not None:
            time.sleep(self.link.seconds(nbytes))
