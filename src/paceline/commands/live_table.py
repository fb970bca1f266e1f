"""A live run in the terminal: a table of the workers, what each does and why it waits. Plain lines without one."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.commands.terminal import console, count, described, errors
from paceline.run import Point, Target
from paceline.watching import driver_records
from paceline.watching.time_left import duration, time_left

if TYPE_CHECKING:
    from paceline.runtime.live.driver.assembly import Parts

PLAIN_EVERY_S = 5.0
MOST_POINTS = 400


class LiveTable:
    """Shows a live run: `with LiveTable(...) as table: table.parts = driver.parts; driver.run()`."""

    def __init__(self, label: str, target: Target | None) -> None:
        self.label = label
        self.target = target
        self.parts: Parts | None = None
        self.updates = 0
        self.values: dict[str, float] = {}
        """The last value of each metric."""
        self.heading: list[tuple[float, float | None]] = []
        """The target's metric over time."""
        self.told = time.monotonic()
        self.seen: dict[int, tuple[float, int]] = {}
        self.live = Live(console=console, get_renderable=self.render, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveTable:
        if console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if console.is_terminal:
            self.live.stop()

    def say(self, line: str) -> None:
        console.print(line, soft_wrap=True)

    def say_error(self, line: str) -> None:
        """Say what a worker has written to stderr. Where the live table is, both are one."""
        (console if console.is_terminal else errors).print(line, soft_wrap=True)

    def watch(self, point: Point) -> None:
        self.updates = point.updates
        self.values.update(point.values)
        if self.target is not None and self.target.metric in point.values:
            self.heading.append((point.time_s, driver_records.finite(point.values)[self.target.metric]))
            if len(self.heading) > MOST_POINTS:  # every other one of the older half
                del self.heading[1 : MOST_POINTS // 2 : 2]
        if not console.is_terminal and time.monotonic() - self.told >= PLAIN_EVERY_S:
            self.told = time.monotonic()
            console.print(self.headline(), soft_wrap=True)

    def headline(self) -> str:
        run = self.parts
        if run is None or not run.state.begun:
            return f"{self.label}: starting"
        parts = [f"{self.label}: {run.state.now():.0f} s"]
        if run.resizing.changes:
            parts.append(count(run.servers.count, "server"))
        if self.values:
            parts += [count(self.updates, "update"), *described(self.values)]
        if self.target is not None:
            parts.append(f"target {self.target}")
            left, _ = time_left(run.state.now(), str(self.target), {self.target.metric: self.heading}, None, [])
            if left is not None:
                parts.append(f"about {duration(left)} left")
        return ", ".join(parts)

    def render(self) -> Table:
        table = Table(title=self.headline(), title_justify="left", box=SIMPLE_HEAD, padding=(0, 0))
        peers = self.parts is not None and self.parts.state.without_servers
        rates = ("steps/s", "iterations stale") if peers else ("pushes/s", "updates stale")
        for heading in ("peer" if peers else "worker", "iteration", *rates):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("doing", overflow="ellipsis", no_wrap=True)
        for rank, status in sorted(self.parts.health.status.items() if self.parts is not None else ()):
            doing = Text(f"waits: {status.waits}", style="yellow") if status.waits else Text("computes")
            table.add_row(str(rank), str(status.pushed), f"{self.rate(rank, status.pushed):.1f}",
                          str(status.staleness), doing)  # fmt: skip
        if not table.row_count:
            table.add_row("", "", "", "", "starting")
        return table

    def rate(self, rank: int, pushed: int) -> float:
        """Returns the pushes a second since the worker was first seen."""
        first, then = self.seen.setdefault(rank, (time.monotonic(), pushed))
        elapsed = time.monotonic() - first
        return (pushed - then) / elapsed if elapsed > 0 else 0.0
