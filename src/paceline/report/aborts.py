"""The table of computations that were given up: how many, what they cost, what was gained for it."""

from __future__ import annotations

from paceline.report.markup import DASH, count, megabytes, run_head, seconds, share, tag, text
from paceline.report.tables import scrolled
from paceline.report.view import RunView, labels

HEADS = ("policy", "aborted", "of all begun", "time lost", "of computing", "updates uncovered each", "MB pulled again")


def abort_table(runs: list[RunView]) -> str:
    """A row for each run in which computations may be given up."""
    names = labels(runs)
    rows = [_row(index, names[index], run) for index, run in enumerate(runs) if run.summary.get("aborts")]
    head = tag("tr", "".join(tag("th", text(head), scope="col") for head in HEADS))
    return scrolled(tag("table", tag("thead", head) + tag("tbody", "".join(rows)), class_="aborts"))


def _row(index: int, name: str, run: RunView) -> str:
    aborted, lost_s = run.number("aborts", "count") or 0, run.number("aborts", "seconds") or 0.0
    finished = [span.seconds for span in run.spans if span.kind == "compute"]
    uncovered, again = run.number("aborts", "uncovered") or 0.0, run.number("bytes", "resync_pull")
    cells = [
        count(aborted),
        share(aborted / (aborted + len(finished))),
        seconds(lost_s),
        share(lost_s / (lost_s + sum(finished))) if lost_s else share(0.0),
        f"{uncovered:.1f}",
        DASH if again is None else megabytes(again),
    ]
    return tag("tr", run_head(index, name, "row") + "".join(tag("td", text(cell)) for cell in cells))
