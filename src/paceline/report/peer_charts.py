"""The section about peers: iteration gaps against what the graph allows, queues, jumps, and how far they disagreed."""

from __future__ import annotations

from msgspec.structs import replace

from paceline.report.charts import line_chart
from paceline.report.markup import DASH, headings, row, run_head, table, tag, text
from paceline.report.report_model import RunView, Target, run_labels

NOTE = (
    "The gap is the largest difference of iterations between any two peers; its bound is the largest that the policy "
    "allows any two on this graph (Luo et al. 2019, Table 1). The distance is that of the peers' parameters from their "
    "average."
)


def peers_section(runs: list[RunView]) -> str:
    """Makes charts and a table; nothing where all runs had servers."""
    if not any(run.peers for run in runs):
        return ""
    gaps = [replace(run, history=run.peers.gaps if run.peers else []) for run in runs]
    measured = [run.peers.consensus if run.peers else [] for run in runs]
    # Of a live run the last is known only: that is in the table.
    distances = [replace(run, history=rows if len(rows) > 1 else []) for run, rows in zip(runs, measured, strict=True)]
    bounds = {run.peers.bound for run in runs if run.peers}
    bound = bounds.pop() if len(bounds) == 1 else None
    aim = Target("bound", "gap", bound) if bound is not None else None
    charts = line_chart("Iteration gap", "gap", gaps, aim, "bound") + line_chart("Longest queue", "queue", gaps, None)
    charts += line_chart("Distance from the average", "distance", distances, None)
    return tag("p", text(NOTE), class_="note") + tag("div", charts, class_="charts") + _table(runs)


def _table(runs: list[RunView]) -> str:
    heads = ("policy", "largest gap", "bound", "longest queue", "room", "jumps", "distance at the end")
    rows = []
    for index, (name, run) in enumerate(zip(run_labels(runs), runs, strict=True)):
        peers = run.peers
        if peers is None:
            continue
        last = peers.consensus[-1]["distance"] if peers.consensus else None
        largest = {key: max(at[key] or 0 for at in peers.gaps) for key in ("gap", "queue")}
        values = (largest["gap"], peers.bound, largest["queue"], peers.room, peers.jumps, last)
        cells = (tag("td", DASH if value is None else text(f"{value:.3g}")) for value in values)
        rows.append(row(run_head(index, name, "row"), cells))
    return table(headings(heads), rows, "peers")
