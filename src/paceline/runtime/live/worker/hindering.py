"""A scenario in a live worker: iterations take as long as it says, faults at an iteration strike, links are slow."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from paceline import cluster
from paceline.runtime.live import wire
from paceline.runtime.live.configuration import LiveConfig
from paceline.runtime.live.process import Stopped

LOOK_S = 0.001
"""How often a worker that sleeps in place of computing looks whether it is to stop."""


class Hindrance:
    """What the scenario of a run does to worker `rank` in this life of it."""

    def __init__(self, config: LiveConfig, rank: int, incarnation: int) -> None:
        self.scenario = cluster.from_table(config.cluster) if config.cluster is not None else None
        faults = self.scenario.faults if self.scenario is not None and incarnation == 0 else ()
        self.faults = [f for f in faults if f.worker == rank and f.at_iteration is not None]
        resizes = self.scenario.resizes if self.scenario is not None else ()
        self.resizes = [(entry, each) for entry, each in enumerate(resizes) if each.at_iteration is not None]
        self.link = self.scenario.link(rank) if self.scenario is not None else None
        if self.scenario is not None:
            self.slowdown = self.scenario.slowdowns(rank, config.members.workers, config.seed)

    def slow_down(self, started: float, look: Callable[[], None] | None = None) -> None:
        """Make the computation that began at `started` as long as the scenario says; `look` now and then meanwhile."""
        if self.scenario is None:
            return
        took = time.monotonic() - started
        known = self.scenario.undisturbed_s()
        undisturbed = took if known is None else known
        until = time.monotonic() - took + self.slowdown() * undisturbed
        while (remaining := until - time.monotonic()) > 0:
            time.sleep(remaining if look is None else min(remaining, LOOK_S))
            if look is not None:
                look()

    def strike(self, iteration: int) -> None:
        """Let the faults of this iteration, or of one that was skipped, happen."""
        for fault in [f for f in self.faults if iteration >= (f.at_iteration or 0)]:
            self.faults.remove(fault)
            if fault.kind in ("crash", "restart"):
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.kind == "leave":
                raise Stopped
            elif fault.kind == "pause":
                time.sleep(fault.for_s)

    def wanted_servers(self, iteration: int) -> list[wire.Want]:
        """What the scenario wants at this iteration, or wanted at one that was skipped."""
        due = [(entry, each) for entry, each in self.resizes if iteration >= (each.at_iteration or 0)]
        self.resizes = [each for each in self.resizes if each not in due]
        return [wire.Want(each.count, entry=entry) for entry, each in due]

    def pass_link(self, nbytes: int) -> None:
        """A slow connection: a gradient takes its time on it before it is pushed, an answer after."""
        if self.link is not None:
            time.sleep(self.link.seconds(nbytes))
