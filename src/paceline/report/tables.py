"""The tables of the page: the summary, whose pushes were waited for and why, the configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from paceline.report import labels
from paceline.report.markup import (
    DASH,
    LONG_NAME,
    count,
    headings,
    megabytes,
    named_row,
    plural,
    row,
    run_class,
    run_head,
    seconds,
    share,
    table,
    tag,
    text,
)
from paceline.report.metrics import waiting_by_reason, waiting_caused_by
from paceline.report.notes import stale_in
from paceline.report.report_model import (
    RunView,
    Target,
    baseline_of,
    divergence,
    logged_metrics,
    run_labels,
    speed_up,
)
from paceline.report.worker_spans import RESTS

MOST_METRICS = 8
"""Metrics in the table and drawn; all are in the run's metrics.json."""
SHOWN_CAUSES = 12
SHOWN_REASONS = 8
ONE_LINE = 100
NOBODY = -1
RESTED = "nobody: its own rest before a pull"
UNPUSHED = "no push: a deadline, a loss, or the end of the run"


def summary_table(runs: list[RunView], target: Target | None) -> str:
    """Makes a row per run."""
    names = run_labels(runs)
    bases = {names[baseline_of(index, runs)] for index in range(len(runs))}
    base = bases.pop() if len(bases) == 1 else ""
    versus = f"vs {base}" if 0 < len(base) <= LONG_NAME else "vs the first" if base else "speed-up"
    heads = ["policy"]
    heads.append(f"time to {target.text}" if target else "time")
    if len(runs) > 1:
        heads.append(versus)
    parked = [] if labels.all_peers(runs) else ["DPRs per 100"]
    heads += ["waiting", *parked, f"{stale_in(runs)} mean / max", "dropped", "updates"]
    metrics = logged_metrics(runs)[:MOST_METRICS]
    heads += [*(f"final {metric}" for metric in metrics), labels.moved(runs)]
    rows = [_row(index, names[index], runs, target, metrics) for index in range(len(runs))]
    return table(headings(heads), rows, "summary")


def _row(index: int, name: str, runs: list[RunView], target: Target | None, metrics: list[str]) -> str:
    run = runs[index]
    cells = []
    diverged = divergence(run)
    if target:
        reached = run.number("time_to_target_s")
        missed = tag("td", text(diverged or "missed"), class_="missed")
        cells.append(missed if reached is None else tag("td", text(seconds(reached))))
    elif diverged:
        cells.append(tag("td", text(diverged), class_="missed"))
    else:
        cells.append(_cell(run.number("time_s"), seconds))
    if len(runs) > 1:
        is_base = baseline_of(index, runs) == index
        times = speed_up(index, runs, target)
        cells.append(tag("td", "baseline") if is_base else _cell(times, lambda value: f"{value:.2f}×"))
    waiting = run.number("wait_share")
    cells.append(tag("td", DASH if waiting is None else _meter(waiting, 1.0, "wait", share(waiting))))
    if not labels.all_peers(runs):
        parked = run.number("dpr_per_100") if run.peers is None else None
        cells.append(_cell(parked, lambda value: count(round(value, 1 if value < 100 else 0))))
    mean, worst = run.number("staleness", "mean"), run.number("staleness", "max")
    cells.append(tag("td", text(DASH if mean is None or worst is None else f"{mean:.1f} / {count(worst)}")))
    cells.append(_cell(run.number("dropped"), count))
    cells.append(_cell(run.number("updates"), count))
    cells += [_cell(run.number("final", metric), partial(labels.figure, metric)) for metric in metrics]
    cells.append(tag("td", text(_moved(run))))
    return row(run_head(index, name, "row"), cells)


def _moved(run: RunView) -> str:
    """Writes how much was pushed and pulled, or sent from peer to peer."""
    if run.peers is not None:
        return megabytes(run.number("bytes", "update") or 0)
    push, pull = run.number("bytes", "push"), run.number("bytes", "pull")
    return DASH if push is None or pull is None else f"{megabytes(push)} / {megabytes(pull)}"


def _cell(value: float | None, write: Callable[[float], str]) -> str:
    return tag("td", text(write(value)) if value is not None else DASH)


def _meter(value: float, most: float, colour: str, words: str) -> str:
    width = 100 * min(1.0, value / most) if most > 0 else 0.0
    bar = tag("span", tag("i", class_=colour, style=f"width:{width:.1f}%"), class_="meter")
    return bar + tag("span", text(words), class_="metered")


def cause_table(runs: list[RunView]) -> str:
    """Makes a row per worker whose push ended a wait, and a column per run, with bars on one scale."""
    columns: list[dict[Any, float]] = [dict(waiting_caused_by(run.spans)) for run in runs]
    if not any(columns):
        return tag("p", "Nobody waited.", class_="note")
    totals = _totals(columns)
    named = [cause for cause in totals if cause != NOBODY][:SHOWN_CAUSES]
    rest = [cause for cause in totals if cause != NOBODY and cause not in named]
    noun = labels.noun(runs)
    rows = [(f"{noun} {cause}", [column.get(cause, 0.0) for column in columns]) for cause in sorted(named)]
    if rest:
        together = [sum(column.get(cause, 0.0) for cause in rest) for column in columns]
        rows.append((f"{plural(len(rest), f'other {noun}')}", together))
    if NOBODY in totals:
        rows += _unpushed(runs)
    return _bars("waited for", runs, rows)


def _unpushed(runs: list[RunView]) -> list[tuple[str, list[float]]]:
    """Returns the waits that no push ended: workers rest by themselves, or something else released them."""
    rows: dict[str, list[float]] = {RESTED: [0.0] * len(runs), UNPUSHED: [0.0] * len(runs)}
    for column, run in enumerate(runs):
        for span in run.spans:
            if span.kind == "wait" and span.cause == NOBODY:
                rows[RESTED if span.reason == RESTS else UNPUSHED][column] += span.seconds
    return [(words, values) for words, values in rows.items() if any(values)]


def reason_table(runs: list[RunView]) -> str:
    """Makes a row per reason for parking a pull, numbers taken out."""
    columns: list[dict[Any, float]] = [dict(waiting_by_reason(run.spans)) for run in runs]
    if not any(columns):
        return ""
    totals = list(_totals(columns))
    rows = [(cause, [column.get(cause, 0.0) for column in columns]) for cause in totals[:SHOWN_REASONS]]
    if totals[SHOWN_REASONS:]:
        rest = [sum(column.get(cause, 0.0) for cause in totals[SHOWN_REASONS:]) for column in columns]
        rows.append((plural(len(totals) - SHOWN_REASONS, "other reason"), rest))
    return _bars("because", runs, rows)


def _totals(columns: list[dict[Any, float]]) -> dict[Any, float]:
    """Adds up over all runs, most first."""
    totals: dict[Any, float] = {}
    for column in columns:
        for key, value in column.items():
            totals[key] = totals.get(key, 0.0) + value
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _bars(head: str, runs: list[RunView], rows: list[tuple[str, list[float]]]) -> str:
    most = max(max(values) for _, values in rows)
    names = [run_head(index, name, "col") for index, name in enumerate(run_labels(runs))]
    body = []
    for name, values in rows:
        cells = [tag("td", _meter(value, most, run_class(index), seconds(value))) for index, value in enumerate(values)]
        body.append(named_row(name, cells))
    return table(headings([head]) + "".join(names), body, "bars")


def config_table(config: Mapping[str, Any]) -> str:
    """Makes a table of the run's options, as they were given."""
    if not config:
        return tag("p", "No configuration was recorded.", class_="note")
    return table("", (named_row(key, [tag("td", _value(value))]) for key, value in config.items()), "config")


def _value(value: Any) -> str:
    if isinstance(value, str | int | float) or value is None:
        return text("not set" if value is None else value)
    written = json.dumps(value, default=str, ensure_ascii=False)
    if len(written) > ONE_LINE:
        written = json.dumps(value, indent=2, default=str, ensure_ascii=False)
    return tag("pre", text(written))
