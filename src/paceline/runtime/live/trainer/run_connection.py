"""The connection of a process that runs the user's script to its run: who it is there, and its socket to the driver."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from paceline.runtime.live.messaging.unix_sockets import Link, Waiter
from paceline.runtime.live.protocol import wire
from paceline.runtime.live.protocol.configuration import LiveConfig
from paceline.runtime.live.trainer.scenario_injection import ScenarioInjection


class RunConnection:
    """A process of a run, which `paceline.Optimizer` makes a worker or a peer."""

    def __init__(self, folder: Path, rank: int, incarnation: int) -> None:
        self.folder = folder
        self.rank = rank
        self.incarnation = incarnation
        self.config = msgspec.json.decode((folder / "config").read_bytes(), type=LiveConfig)
        self.driver = Link(folder / "driver", b"worker:%d:%d" % (rank, incarnation))
        self.waiter = Waiter()
        self.waiter.watch(self.driver)
        self.scenario = ScenarioInjection(self.config, rank, incarnation)
        self.pid = os.getpid()
        self.epoch_s = time.monotonic()
        """The monotonic time of the run's second 0; until the run has begun, when this process connected."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> RunConnection:
        """Returns the connection that the environment variables of a worker's process describe."""
        folder = Path(environment["PACELINE_FOLDER"])
        return cls(folder, int(environment["PACELINE_RANK"]), int(environment["PACELINE_INCARNATION"]))

    def now(self) -> float:
        """Returns the seconds since the run began."""
        return time.monotonic() - self.epoch_s

    def send(self, message: wire.ToDriver) -> None:
        """Sends a message to the driver."""
        self.driver.send(wire.encode(message))

    def log(self, values: dict[str, float], iteration: int = 0, updates: int = 0) -> None:
        """Sends metrics of the script to the driver."""
        self.send(wire.Log(self.rank, self.now(), iteration, updates, values))

    def leave(self, well: bool) -> None:
        """Ends this process's part in the run; if all is well the driver is told that its script has finished."""
        if well:
            self.send(wire.Leave(self.rank, self.incarnation, finished=not self.scenario.has_left))
        self.close()

    def close(self) -> None:
        """Closes the connection to the driver."""
        self.driver.close()
        self.waiter.close()
