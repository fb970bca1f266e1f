"""What the driver writes down for those who watch the run: a file in the run's folder, written a few times a second.

Without room, or without the folder, it ends, and the training goes on.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from paceline import private_files
from paceline.run import Point, Run, Target
from paceline.runtime.live.driver.run_state import RunState
from paceline.watching import driver_records
from paceline.watching.driver_records import Begun, DriverRecord, Ended, Logged, Said

logger = logging.getLogger(__name__)

EVERY_S = 0.2


class FeedFile:
    """Takes what the driver knows. `folder` is the run's; without one nothing is written."""

    def __init__(self, folder: Path | None, state: RunState) -> None:
        self.path = folder / driver_records.NAME if folder is not None else None
        self.state = state
        self.held: list[DriverRecord] = []
        self.written_s = -math.inf
        self.file: FileIO | None = None

    def begin(self, workers: int, servers: int, slice_bytes: tuple[int, ...], target: Target | None) -> None:
        """Notes that training begins, as soon as it has."""
        policy, target_text = str(self.state.model.policy), str(target) if target is not None else None
        self.write(Begun(0.0, self.state.epoch_s, policy, workers, servers, slice_bytes, target_text))

    def log(self, point: Point) -> None:
        self.write(Logged(point.time_s, point.updates, driver_records.finite(point.values)))

    def end(self, run: Run) -> None:
        self.write(Ended(self.state.now(), run.ended, tuple(run.failures)))

    def telling(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """Returns what says a line and notes it."""

        def tell(line: str) -> None:
            say(line)
            self.write(Said(self.state.now(), line))

        return tell

    def write(self, record: DriverRecord) -> None:
        if self.path is not None:
            self.held.append(record)

    def tick(self) -> None:
        """Writes what is there, now and then."""
        if self.held and time.monotonic() - self.written_s >= EVERY_S:
            self.flush()

    def flush(self) -> None:
        self.written_s = time.monotonic()
        held, self.held = self.held, []
        try:
            left = driver_records.encode(held)
            while left and self.path is not None:
                if self.file is None:
                    self.file = open(self.path, "ab", buffering=0, opener=private_files.opener)  # noqa: SIM115
                left = left[self.file.write(left) :]
        except OSError as error:
            logger.warning(f"{self.path}: it ends here, the training goes on: {error.strerror}")
            self.path = None

    def begin_again(self) -> None:
        """The folder was deleted, and made again: the file is, too."""
        if self.file is not None:
            self.file.close()
            self.file = None

    def close(self) -> None:
        if self.held:
            self.flush()
        if self.file is not None:
            self.file.close()
            self.file = None
