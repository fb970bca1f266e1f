"""The table of computations that were given up: how many, what they cost, what was gained for it."""

from __future__ import annotations

from paceline.report.markup import DASH, count, headings, megabytes, row, run_head, seconds, share, table, tag, text
from paceline.report.report_model import RunView, run_labels

HEADS = ("policy", "aborted", "of all begun", "time lost", "of computing", "updates uncovered each", "MB pulled again")


def abort_table(runs: list[RunView]) -> str:
    """Makes a row for each run in which computations may be given up."""
    names = run_labels(runs)
    rows = [_row(index, names[index], run) for index, run in enumerate(runs) if run.summary.get("aborts")]
    return table(headings(HEADS), rows, "aborts")


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
    return row(run_head(index, name, "row"), (tag("td", text(cell)) for cell in cells))
