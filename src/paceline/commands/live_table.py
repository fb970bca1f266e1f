"""A live run in the terminal: a table of the workers, what each does and why it waits. Plain lines without one."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.commands.screen import console, count
from paceline.run import Point, Target

if TYPE_CHECKING:
    from paceline.runtime.live.driver.launch import Driver

PLAIN_EVERY_S = 5.0


class LiveTable:
    """`with LiveTable(...) as table: table.driver = driver; driver.run()`."""

    def __init__(self, label: str, target: Target | None) -> None:
        self.label = label
        self.target = target
        self.driver: Driver | None = None
        self.last: Point | None = None
        self.began = self.told = time.monotonic()
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

    def watch(self, point: Point) -> None:
        self.last = point
        if not console.is_terminal and time.monotonic() - self.told >= PLAIN_EVERY_S:
            self.told = time.monotonic()
            console.print(self.headline(), soft_wrap=True)

    def headline(self) -> str:
        parts = [f"{self.label}: {time.monotonic() - self.began:.0f} s"]
        if self.driver is not None and self.driver.changes:
            parts.append(count(self.driver.servers.count, "server"))
        if self.last is not None:
            parts.append(f"{self.last.updates} updates")
            if self.last.loss is not None:
                parts.append(f"loss {self.last.loss:.4f}")
            if self.last.accuracy is not None:
                parts.append(f"accuracy {self.last.accuracy:.3f}")
        if self.target is not None:
            parts.append(f"target {self.target}")
        return ", ".join(parts)

    def render(self) -> Table:
        table = Table(title=self.headline(), title_justify="left", box=SIMPLE_HEAD, padding=(0, 0))
        peers = self.driver is not None and self.driver.peers.active
        for heading in ("peer" if peers else "worker", "iteration", "steps/s" if peers else "pushes/s", "staleness"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("doing", overflow="ellipsis", no_wrap=True)
        for rank, status in sorted(self.driver.watchman.status.items() if self.driver is not None else ()):
            doing = Text(f"waits: {status.waits}", style="yellow") if status.waits else Text("computes")
            table.add_row(str(rank), str(status.pushed), f"{self.rate(rank, status.pushed):.1f}",
                          str(status.staleness), doing)  # fmt: skip
        if not table.row_count:
            table.add_row("", "", "", "", "starting")
        return table

    def rate(self, rank: int, pushed: int) -> float:
        """Pushes a second since the worker was first seen."""
        first, then = self.seen.setdefault(rank, (time.monotonic(), pushed))
        elapsed = time.monotonic() - first
        return (pushed - then) / elapsed if elapsed > 0 else 0.0
