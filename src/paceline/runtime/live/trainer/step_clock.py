"""What each iteration of a process that trains is spent on, measured where it happens and written beside the trace.

Reading a clock ten times and writing a row takes some microseconds of an iteration (`benchmarks/step_clock.py`).
"""

from __future__ import annotations

import gc
import os
import socket
import time
from pathlib import Path

import torch

from paceline.core.messages import Node
from paceline.core.step_times import ProcessRow, StepRow
from paceline.runtime.live.storage.trace_files import TimesFile
from paceline.runtime.live.trainer.run_connection import RunConnection

MOST_NAME = 64
"""Letters of a host's name that are kept."""


def process_row(node: Node, incarnation: int, links: tuple[str, ...] = ()) -> ProcessRow:
    """Says where this process runs."""
    cores = len(os.sched_getaffinity(0))
    return ProcessRow(node, incarnation, socket.gethostname()[:MOST_NAME], cores, torch.get_num_threads(), links)


class StepClock:
    """Measures the parts of an iteration. Whoever does one part says so when it is over."""

    def __init__(self, run: RunConnection, node: Node) -> None:
        self.run = run
        self.node = node
        self.file = TimesFile(Path(run.config.output), node, run.incarnation)
        self.collecting_s = 0.0
        self.collected_s = 0.0
        gc.callbacks.append(self._note_collection)
        self.begun_s = self.prepared_s = self.computed_s = self.injected_s = self.copied_s = 0.0
        self.cpu_s = self.pushed_cpu_s = 0.0
        self.pushed_s = 0.0

    def introduce(self, links: tuple[str, ...]) -> None:
        """Writes where this process runs and how it reaches the servers, and begins to measure."""
        self.file.write(process_row(self.node, self.run.incarnation, links))
        self.begun_s, self.cpu_s = time.monotonic(), time.process_time()

    def prepared(self) -> None:
        """The script has its data, if it had not said so in this iteration before."""
        if not self.prepared_s:
            self.prepared_s = time.monotonic()

    def computed(self) -> None:
        """Forward and backward are over."""
        self.computed_s = self.injected_s = time.monotonic()

    def injected(self) -> None:
        """What the scenario adds is over."""
        self.injected_s = time.monotonic()

    def copied(self) -> None:
        """The gradient is where servers read it."""
        self.copied_s, self.pushed_cpu_s = time.monotonic(), time.process_time()

    def pushed(self) -> None:
        """The servers have been told."""
        self.pushed_s = time.monotonic()

    def answered(self, iteration: int) -> None:
        """The model has the parameters of the next iteration: this one is over."""
        now, cpu_s = time.monotonic(), time.process_time()
        begun, computed, injected, copied, pushed = (
            self.begun_s, self.computed_s, self.injected_s, self.copied_s, self.pushed_s
        )  # fmt: skip
        if begun <= computed <= injected <= copied <= pushed:  # else it was no ordinary iteration
            prepared = min(max(self.prepared_s, begun), computed)
            self.file.write(
                StepRow(
                    self.run.rank, self.run.incarnation, now - self.run.epoch_s, iteration,
                    prepared - begun, computed - prepared, injected - computed, copied - injected, pushed - copied,
                    now - pushed, self.pushed_cpu_s - self.cpu_s, cpu_s - self.pushed_cpu_s, self.collected_s,
                )
            )  # fmt: skip
        self.begun_s, self.cpu_s = now, cpu_s
        self.prepared_s = self.collected_s = 0.0

    def close(self) -> None:
        """Writes what is left."""
        gc.callbacks.remove(self._note_collection)
        self.file.close()

    def _note_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.collecting_s = time.monotonic()
        elif self.collecting_s:
            self.collected_s += time.monotonic() - self.collecting_s
