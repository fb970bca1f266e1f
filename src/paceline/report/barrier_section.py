"""Planned barriers on the page: a table of where they were to be and where they were, and marks on the lanes."""

from __future__ import annotations

from paceline.report.barriers import Barrier, totals
from paceline.report.charts import Axis
from paceline.report.markup import DASH, headings, named_row, plural, run_head, seconds, share, table, tag, text
from paceline.report.report_model import RunView, run_labels

SHOWN_BARRIERS = 12
WAIT = "The wait of a barrier is that of the first worker to arrive. BSP's is worked out from the same iterations: as "
WAIT += "many rounds as the slowest made since the barrier before, each as long as its slowest."
MARKS = {"barrier": "barrier", "due": "where it was planned"}


def barrier_section(runs: list[RunView]) -> str:
    """Makes a table for each run that has barriers; nothing if none has."""
    names = run_labels(runs)
    tables = [_table(index, names[index], run.barriers) for index, run in enumerate(runs) if run.barriers]
    return tag("p", text(WAIT), class_="note") + "".join(tables) if tables else ""


def _table(index: int, name: str, found: list[Barrier]) -> str:
    heads = ["made at", "planned for", "was at", "wait planned", "wait", "wait under BSP", "saved"]
    head = run_head(index, name, "col") + headings(heads)
    rows = [
        _row(
            f"barrier {barrier.number}",
            [seconds(barrier.planned_s), seconds(barrier.due_s), seconds(barrier.reached_s)],
            [barrier.planned_wait_s, barrier.wait_s, barrier.bsp_wait_s],
        )
        for barrier in found[:SHOWN_BARRIERS]
    ]
    if len(found) > SHOWN_BARRIERS:
        name = f"{plural(len(found) - SHOWN_BARRIERS, 'barrier')} more"
        rows.append(named_row(name, [tag("td", text(DASH))] * len(heads)))
    whole = totals(found)
    waits = [whole["planned_wait_s"], whole["wait_s"], whole["bsp_wait_s"]]
    rows.append(_row(f"all {plural(len(found), 'barrier')}", [DASH, DASH, DASH], waits))
    return table(head, rows, "barriers")


def _row(name: str, times: list[str], waits: list[float]) -> str:
    _, wait, bsp = waits
    less_s = round(bsp - wait, 9)
    saved = f"{seconds(less_s)} ({share(less_s / bsp)})" if less_s > 0 else seconds(less_s)
    cells = [*times, *(seconds(round(value, 9)) for value in waits), saved]
    return named_row(name, (tag("td", text(cell)) for cell in cells))


def marks(found: list[Barrier], x: Axis, width: int, height: int) -> str:
    """Draws a line through all lanes for each barrier in sight, and another where it was planned."""
    lines = []
    for barrier in found:
        for kind, at in (("due", barrier.due_s), ("barrier", barrier.reached_s)):
            if at <= x.high:
                place = round(width * x.place(at))
                said = f"{MARKS[kind]} {barrier.number}, {seconds(at)}"
                line = f'x1="{place}" x2="{place}" y1="0" y2="{height}"'
                lines.append(f'<line class="{kind}" {line}><title>{text(said)}</title></line>')
    return "".join(lines)


def mark_keys(runs: list[RunView]) -> list[str]:
    """Explains what the lines mean, if there are any."""
    if not any(run.barriers for run in runs):
        return []
    return [tag("span", f'<i class="kind {kind}"></i>{text(word)}') for kind, word in MARKS.items()]
