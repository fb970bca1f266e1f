"""What a person sees in a terminal: progress while it runs, a table at the end. Plain lines without one."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from paceline.core.messages import Members
from paceline.report.labels import figure
from paceline.report.notes import notes, stale_in
from paceline.report.report_model import USUAL, RunView, baseline_of, divergence, logged_metrics, speed_up, target_of
from paceline.run import ON_SERVERS, Point, Run, Target
from paceline.tensors.layout import imbalance

MOST_TOLD = 12
"""So many metrics of a run are printed below the table; the report has all."""

console = Console(highlight=False, markup=False, emoji=False)
errors = Console(highlight=False, markup=False, emoji=False, stderr=True)
"""Neither console has markup, since the names of scripts, files and policies may have brackets in them."""


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class ProgressDisplay:
    """Shows how far a run is: `with ProgressDisplay("bsp", target) as watch: simulate(..., watch=watch)`."""

    def __init__(self, label: str, target: Target | None) -> None:
        self.label = label
        self.target = target
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Callable[[Point], None]:
        self.progress.start()
        self.task = self.progress.add_task(self.label, total=1.0 if self.target else None, note="starting")
        return self.watch

    def watch(self, point: Point) -> None:
        parts = [f"{point.time_s:.1f} s", f"{point.updates} updates", *described(point.values)]
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


def print_result(run: Run) -> None:
    """Prints one line about a run, as soon as it is done."""
    console.print(f"{run.policy}: {run.outcome()}", soft_wrap=True)
    if run.target is not None and run.target.metric not in run.final:
        there = f"logged was: {', '.join(run.final)}" if run.final else "nothing was logged at all"
        console.print(f"no worker has logged {run.target.metric}: {there}", soft_wrap=True)


def short_name(policy: str) -> str:
    """Returns the policy's name alone, for a heading."""
    return policy.partition(":")[0].rpartition("/")[2]


def view_of(run: Run) -> RunView:
    """Returns the run as the report's rules see it, which say what may be compared with what."""
    return RunView(run.policy, run.runtime, [], run.summary(), [], peers=run.peers())


def show_table(runs: list[Run], title: str) -> None:
    """Prints the comparison. Speed-up is over bsp if it is there, else over the first policy."""
    views = [view_of(run) for run in runs]
    base = runs[baseline_of(0, views)]
    target = target_of({"target": str(runs[0].target)}) if runs[0].target is not None else None
    # Narrow enough for 80 columns.
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 0))
    metric = shown_metric(views, target.metric if target else None)
    headings = ["time\nwaiting", f"{stale_in(views).replace(' ', chr(10))}\nmean / max", dropped_heading(runs)]
    if metric is not None:
        headings.append(f"final\n{metric}")
    if len(runs) > 1:
        headings.insert(0, f"speed-up\nover {short_name(base.policy)}")
    headings.insert(0, f"time to\n{runs[0].target}" if target else "time")
    table.add_column("policy", overflow="fold")
    for heading in headings:
        widest = max(map(len, heading.splitlines()))
        table.add_column(heading, justify="right", no_wrap=True, min_width=widest)
    for index, run in enumerate(runs):
        metrics = run.metrics
        time_s = run.time_to_target_s if target else run.time_s
        cells = [
            f"{100 * metrics.wait_share:.0f} %",
            f"{metrics.staleness['mean']:.1f} / {metrics.staleness['max']:.0f}",
            str(metrics.dropped),
        ]
        if metric is not None:
            value = views[index].number("final", metric)
            cells.append(figure(metric, value) if value is not None else "-")
        if len(runs) > 1:
            times = speed_up(index, views, target)
            cells.insert(0, f"{times:.2f}x" if times is not None else "-")
        table.add_row(run.policy, f"{time_s:.2f} s" if time_s is not None else "missed", *cells)
    console.print(table)
    for view in views:
        if said := divergence(view):
            console.print(f"{view.policy} {said}", soft_wrap=True)
    for note in notes(views, target):
        console.print(note)
    for run in runs:
        others = {name: value for name, value in run.final.items() if name not in (*USUAL, metric)}
        if others:
            console.print(f"{run.policy}, last logged: {', '.join(described(others, MOST_TOLD))}", soft_wrap=True)


def shown_metric(views: list[RunView], wanted: str | None) -> str | None:
    """Returns the metric whose final values the table shows: the target's, else accuracy, else another."""
    there = logged_metrics(views)
    return wanted if wanted in there else next(iter(there), None)


def described(values: dict[str, float], most: int = 4) -> list[str]:
    """Returns the first few values, each with its name."""
    told = [f"{name} {figure(name, value)}" for name, value in values.items()]
    return told[:most] + ([f"{len(told) - most} more"] if len(told) > most else [])


def dropped_heading(runs: list[Run]) -> str:
    """Returns the heading of what was dropped: peers drop late updates, servers drop gradients."""
    without = [not run.trace.header.members.servers for run in runs]
    return "dropped\nupdates" if all(without) else "dropped" if any(without) else "dropped\ngradients"


def print_plain(line: str) -> None:
    """Prints one line as it is, however long."""
    console.print(line, soft_wrap=True)


def size_of(members: Members) -> str:
    """Says how many take part."""
    if not members.servers:
        return count(members.workers, "peer")
    return f"{count(members.workers, 'worker')}, {count(members.servers, 'server')}"


def print_evaluated(runs: list[Run]) -> None:
    """Says which parameters accuracy and loss are of, where that is not plain."""
    for run in runs:
        if run.evaluated != ON_SERVERS:
            console.print(f"{run.policy}: loss and accuracy are those of {run.evaluated}", soft_wrap=True)


def print_wall(runs: list[Run]) -> None:
    """Says what the whole of a live run took, part by part."""
    for run in runs:
        if run.wall:
            parts = ", ".join(f"{_PARTS.get(name, name)} {seconds:.2f}" for name, seconds in run.wall.items())
            print_plain(f"{run.policy}: {sum(run.wall.values()):.2f} s in all: {parts}")


_PARTS = {
    "startup_s": "start-up",
    "training_s": "training",
    "ending_s": "ending",
    "evaluation_s": "evaluation",
    "reporting_s": "reporting",
}


def print_slices(runs: list[Run]) -> None:
    """Says how unequal the servers' shares are, when there are several."""
    for sizes in dict.fromkeys(run.trace.header.slice_bytes for run in runs):
        if len(sizes) > 1:
            most = f"the largest is {imbalance(sizes):.2f} times the mean"
            console.print(f"slices: {min(sizes):,} to {max(sizes):,} bytes, {most}", soft_wrap=True)
