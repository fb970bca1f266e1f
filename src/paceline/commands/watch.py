"""`paceline top` and `paceline explain`: a run seen from another terminal, and who slows it down, without torch."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.counts import check_count
from paceline.errors import ConfigError, printable
from paceline.watching import snapshot as shown
from paceline.watching.run_reader import RunReader
from paceline.watching.snapshot import Snapshot, WorkerRow
from paceline.watching.time_left import duration

EVERY_S = 0.5
SETTLE_S = 1.2
"""So long a run that goes on is read before it is explained."""
MOST_ROWS = 40
COLORS = {shown.WAITS: "yellow", shown.GONE: "red", shown.DONE: "green", shown.PUSHES: "magenta", shown.READS: "cyan"}

console = Console(highlight=False, markup=False, emoji=False)


@dataclass(kw_only=True)
class Top:
    """Watch a run from another terminal: paceline top DIR

    It reads what the run writes down, and asks nothing of it: who does what and why, how fast, who slows it down, what
    was logged and what happened. Ctrl-C ends the watching, not the run.
    """

    dir: Annotated[str, tyro.conf.Positional]
    """The folder of the run."""
    iterations: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
    """How many iterations each worker is to do: then it says how long that takes."""
    once: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """Print it once."""

    def main(self) -> int:
        if self.iterations is not None:
            check_count("iterations", self.iterations)
        reader = RunReader(Path(self.dir), self.iterations)
        if self.once or not console.is_terminal:
            settle(reader)
            console.print(render(reader.snapshot(), MOST_ROWS))
            return 0
        with Live(console=console, screen=True, auto_refresh=False, transient=False) as live:
            try:
                while True:
                    reader.poll()
                    view = reader.snapshot()
                    live.update(render(view, max(4, console.height - 16), console.width), refresh=True)
                    if reader.is_read:
                        break
                    time.sleep(EVERY_S)
            except KeyboardInterrupt:
                view = reader.snapshot()
        console.print(render(view, MOST_ROWS, console.width))
        return 0


@dataclass(kw_only=True)
class Explain:
    """Say who slows a run down, since when and why, from what its trace has measured: paceline explain DIR

    The run may go on or have ended: then it is told how it was in its last minute. Where the trace does not tell a
    cause, it says so (docs/watching.md).
    """

    dir: Annotated[str, tyro.conf.Positional]
    """The folder of the run."""
    json: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """Print it as JSON."""

    def main(self) -> int:
        reader = RunReader(Path(self.dir))
        settle(reader)
        view = reader.snapshot()
        if self.json:
            plain = {"state": view.state, "time_s": view.time_s, "findings": msgspec.to_builtins(view.findings),
                     "healthy": view.healthy}  # fmt: skip
            console.print(json.dumps(plain, indent=2), soft_wrap=True)
            return 0
        for line in explained(view):
            console.print(printable(line), soft_wrap=True)
        return 0


def settle(reader: RunReader) -> None:
    """Reads a run until what it shows is whole."""
    reader.poll()
    if not reader.is_read:
        time.sleep(SETTLE_S)
        reader.poll()
    if reader.state == shown.LOST and not reader.watch.builder.lanes:
        raise ConfigError(f"the run in {str(reader.folder)!r} has left nothing to look at: it has no trace")


def explained(view: Snapshot) -> list[str]:
    """Returns the findings in lines."""
    if not view.findings:
        return [view.healthy or "nothing has been trained yet"]
    lines: list[str] = []
    for found in view.findings:
        lines += [found.saying, f"  why: {found.why}"]
        lines += [f"  measured: {line}" for line in found.evidence]
        lines += [f"  what would help: {line}" for line in found.helps]
    if view.skipped:
        lines.append("(the beginning of a long trace was passed over)")
    return lines


def headline(view: Snapshot) -> str:
    """Says in one line how the run is."""
    how = f" ({view.how})" if view.how else ""
    said = {
        shown.STARTING: "starting",
        shown.RUNS: "runs",
        shown.ENDED: f"has ended{how}",
        shown.LOST: "its driver ended without a word",
    }[view.state]
    noun = "peer" if view.peers else "worker"
    present = sum(row.state not in (shown.DONE, shown.GONE) for row in view.workers) or len(view.workers)
    parts = [f"{view.name}: {said}", f"{view.time_s:.0f} s"]
    if view.policy:
        parts.append(view.policy)
    parts.append(f"{present} {noun}{'s' * (present != 1)}")
    if view.servers:
        parts.append(f"{view.servers} server{'s' * (view.servers != 1)}")
    return ", ".join(parts)


def facts(view: Snapshot) -> list[str]:
    """Returns what is said below the headline."""
    parts = [f"{view.gradients_per_s:.1f} gradients/s", f"waiting {view.wait_share:.0%}"]
    if view.staleness_mean is not None:
        parts.append(f"staleness {view.staleness_mean:.1f}, at most {view.staleness_max}")
    if view.dropped:
        parts.append(f"{view.dropped} dropped")
    parts += [f"{what} {per_s / 1e6:.2f} MB/s" for what, per_s in view.bytes_per_s.items() if per_s]
    lines = [", ".join(parts)]
    values = [f"{name} {points[-1][1]:.4g}" for name, points in view.metrics.items()
              if points and points[-1][1] is not None][:6]  # fmt: skip
    if values or view.target:
        lines.append(", ".join(values + ([f"target {view.target}"] if view.target else [])))
    if view.left_s is not None:
        lines.append(f"about {duration(view.left_s)} left, {view.left_how}")
    return lines


def render(view: Snapshot, most: int, width: int = 100) -> RenderableType:
    """Returns what a terminal shows of a run."""
    parts: list[RenderableType] = [Text(printable(headline(view)), style="bold")]
    parts += [Text(printable(line)) for line in facts(view)]
    parts.append(table_of(view, most, width >= 76))
    for found in view.findings:
        parts.append(Text(printable(found.saying), style="bold yellow"))
        parts.append(Text(printable(f"  {found.why}")))
        parts.append(Text(printable(f"  what would help: {found.helps[0]}")))
    if not view.findings and view.healthy:
        parts.append(Text(printable(view.healthy), style="dim"))
    for each in view.happenings[-4:]:
        parts.append(Text(printable(f"{each.at:7.1f} s  {each.text}"), style="dim", overflow="ellipsis", no_wrap=True))
    return Group(*parts)


def table_of(view: Snapshot, most: int, wide: bool) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, expand=True)
    wide_ones = ("own ms", "waits", "waited for") if wide else ("waits",)
    for heading in ("peer" if view.peers else "worker", "iteration", "it/s", *wide_ones):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("does", overflow="ellipsis", no_wrap=True, ratio=1)
    rows = view.workers
    if len(rows) > most:  # those that matter
        chosen = sorted(rows, key=lambda row: (-row.caused_s, -(row.own_s or 0.0)))[: most - 1]
        rows = sorted(chosen, key=lambda row: row.rank)
    for row in rows:
        own = f"{1000 * row.own_s:.0f}" if row.own_s is not None else "-"
        wide_cells = (own, f"{row.wait_share:.0%}", f"{row.caused_s:.1f} s") if wide else (f"{row.wait_share:.0%}",)
        does = Text(printable(doing(row, view.time_s)), style=COLORS.get(row.state, ""))
        table.add_row(str(row.rank), str(row.iteration), f"{row.rate:.1f}", *wide_cells, does)
    if len(rows) < len(view.workers):
        table.add_row("...", *[""] * (2 + len(wide_ones)), f"{len(view.workers) - len(rows)} more")
    return table


def doing(row: WorkerRow, now: float) -> str:
    """Says what a worker does, and since when if that is long."""
    said = f"waits: {row.reason}" if row.state == shown.WAITS else row.state
    lasted = now - row.since_s
    return f"{said}, for {duration(lasted)}" if lasted >= 2 else said
