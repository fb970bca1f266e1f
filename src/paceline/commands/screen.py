"""What a person sees in a terminal: progress while it runs, a table at the end. Plain lines without one."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.core.messages import Members
from paceline.report.view import RunView, baseline_of, divergence, speed_up, target_of
from paceline.run import ON_SERVERS, Point, Run, Target
from paceline.tensors.layout import imbalance

console = Console(highlight=False, markup=False, emoji=False)
"""Without markup: what scripts, files and policies are called may have brackets in it."""


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class Watching:
    """Shows how a run comes along: `with Watching("bsp", target) as watch: simulate(..., watch=watch)`."""

    def __init__(self, label: str, target: Target | None) -> None:
        self.label = label
        self.target = target
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Callable[[Point], None]:
        self.progress.start()
        self.task = self.progress.add_task(self.label, total=1.0 if self.target else None, note="starting")
        return self.watch

    def watch(self, point: Point) -> None:
        parts = [f"{point.time_s:.1f} s", f"{point.updates} updates"]
        if point.loss is not None:
            parts.append(f"loss {point.loss:.3f}")
        if point.accuracy is not None:
            parts.append(f"accuracy {point.accuracy:.3f}")
        done = _share(point, self.target) if self.target is not None else None
        self.progress.update(self.task, completed=done, note="  ".join(parts))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()


def _share(point: Point, target: Target) -> float:
    if target.metric == "accuracy":
        return min(1.0, (point.accuracy or 0.0) / target.value) if target.value else 1.0
    return 1.0 if target.reached(point) else 0.0


def tell_result(run: Run) -> None:
    """One line a run, as soon as it is done."""
    last = run.history[-1] if run.history else None
    if run.target is None:
        what = f"{round(run.metrics.iterations, 1):.10g} iterations in {run.time_s:.2f} s"
    elif run.time_to_target_s is None:
        what = f"missed {run.target} in {run.time_s:.2f} s"
    else:
        what = f"reached {run.target} after {run.time_to_target_s:.2f} s"
    if last is not None and last.accuracy is not None:
        what += f", accuracy {last.accuracy:.3f}"
    elif last is not None and last.loss is not None:
        what += f", loss {last.loss:.4g}"
    if run.diverged:
        what += f", {divergence(in_table(run))}"
    console.print(f"{run.policy}: {what}", soft_wrap=True)


def short(policy: str) -> str:
    """Its name alone, for a heading."""
    return policy.partition(":")[0].rpartition("/")[2]


def in_table(run: Run) -> RunView:
    """The run as the report's rules see it: what may be compared with what."""
    return RunView(run.policy, run.runtime, [], run.summary(), [])


def show_table(runs: list[Run], title: str) -> None:
    """The comparison. Speed-up is over bsp where it is among them, else over the first."""
    views = [in_table(run) for run in runs]
    base = runs[baseline_of(0, views)]
    target = target_of({"target": str(runs[0].target)}) if runs[0].target is not None else None
    # Narrow enough for 80 columns.
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 0))
    headings = ["time\nwaiting", "staleness\nmean / max", dropped_heading(runs), "final\naccuracy"]
    if len(runs) > 1:
        headings.insert(0, f"speed-up\nover {short(base.policy)}")
    headings.insert(0, f"time to\n{runs[0].target}" if target else "time")
    table.add_column("policy", overflow="fold")
    for heading in headings:
        widest = max(map(len, heading.splitlines()))
        table.add_column(heading, justify="right", no_wrap=True, min_width=widest)
    for index, run in enumerate(runs):
        metrics, last = run.metrics, run.history[-1] if run.history else None
        accuracy = last.accuracy if last is not None else None
        time_s = run.time_to_target_s if target else run.time_s
        cells = [
            f"{100 * metrics.wait_share:.0f} %",
            f"{metrics.staleness['mean']:.1f} / {metrics.staleness['max']:.0f}",
            str(metrics.dropped),
            f"{accuracy:.3f}" if accuracy is not None else "-",
        ]
        if len(runs) > 1:
            times = speed_up(index, views, target)
            cells.insert(0, f"{times:.2f}x" if times is not None else "-")
        table.add_row(run.policy, f"{time_s:.2f} s" if time_s is not None else "missed", *cells)
    console.print(table)
    for view in views:
        if said := divergence(view):
            console.print(f"{view.policy} {said}", soft_wrap=True)


def dropped_heading(runs: list[Run]) -> str:
    """Peers drop what others sent too late; only those with servers drop gradients alone."""
    without = [not run.trace.header.members.servers for run in runs]
    return "dropped\nupdates" if all(without) else "dropped" if any(without) else "dropped\ngradients"


def size_of(members: Members) -> str:
    """How many take part."""
    if not members.servers:
        return count(members.workers, "peer")
    return f"{count(members.workers, 'worker')}, {count(members.servers, 'server')}"


def tell_evaluated(runs: list[Run]) -> None:
    """Which parameters accuracy and loss are of, where that is not plain."""
    for run in runs:
        if run.evaluated != ON_SERVERS:
            console.print(f"{run.policy}: loss and accuracy are those of {run.evaluated}", soft_wrap=True)


def tell_slices(runs: list[Run]) -> None:
    """How unequal the servers' shares are, when there are several."""
    for sizes in dict.fromkeys(run.trace.header.slice_bytes for run in runs):
        if len(sizes) > 1:
            most = f"the largest is {imbalance(sizes):.2f} times the mean"
            console.print(f"slices: {min(sizes):,} to {max(sizes):,} bytes, {most}", soft_wrap=True)
