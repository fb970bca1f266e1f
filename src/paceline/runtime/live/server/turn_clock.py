"""How long a server is busy: one row for each turn of its loop in which gradients came or answers left.

Steps that are put off are of the turn in which they are taken.
"""

from __future__ import annotations

import time

from paceline.core.messages import Node
from paceline.core.step_times import TurnRow
from paceline.runtime.live.server.connection import ServerConnection
from paceline.runtime.live.storage.trace_files import TimesFile
from paceline.runtime.live.trainer.step_clock import process_row


class TurnClock:
    """Counts what a server does in a turn, and measures how long that takes."""

    def __init__(self, run: ServerConnection) -> None:
        self.run = run
        self.file: TimesFile = run.times
        self.pushes = self.steps = self.gradients = self.answers = 0
        self.begun_s = self.cpu_s = 0.0
        node = Node("server", run.shard)
        self.file.write(process_row(node, run.incarnation))

    def begin(self) -> None:
        """Something has come."""
        self.begun_s, self.cpu_s = time.monotonic(), time.process_time()

    def stepped(self, gradients: int) -> None:
        """A step was taken on so many gradients."""
        self.steps += 1
        self.gradients += gradients

    def end(self) -> None:
        """All is done; writes what it was, if it was about gradients."""
        if self.pushes or self.steps or self.answers:
            busy_s, cpu_s = time.monotonic() - self.begun_s, time.process_time() - self.cpu_s
            self.file.write(
                TurnRow(
                    self.run.shard, self.run.incarnation, self.run.now(), busy_s, cpu_s,
                    self.pushes, self.steps, self.gradients, self.answers,
                )
            )  # fmt: skip
            self.pushes = self.steps = self.gradients = self.answers = 0
