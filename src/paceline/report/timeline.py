"""Worker lanes: who computed, who waited, for whom. The same time scale for every run on the page.

Only the beginning is drawn, as many iterations as the eye can take in; what is left out is said. Where there
are still too many spans, neighbours too short to be seen are drawn as one, in the colour that has most of
their time.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from paceline.report.barrier_section import mark_keys, marks
from paceline.report.charts import Axis, axis, time_ticks
from paceline.report.labels import noun
from paceline.report.markup import count, picture, seconds, share, swatch, tag, text
from paceline.report.report_model import RunView, run_labels
from paceline.report.worker_spans import Kind, Span

SHOWN_ITERATIONS = 40
SHOWN_WORKERS = 32
MOST_BARS = 4000
WIDTH = 10_000
"""The units across; about ten to a pixel."""

WORDS: dict[Kind, str] = {
    "compute": "computing",
    "aborted": "computing, given up",
    "wait": "waiting for others",
    "push": "gradient on the way",
    "pull": "parameters on the way",
    "exchange": "messages on the way",
    "dead": "gone: done or lost",
}


class Bar(Struct, frozen=True, gc=False):
    """A bar is one span, or several that are too short to be told apart."""

    kind: Kind
    start_s: float
    end_s: float
    title: str


def window_s(runs: list[RunView]) -> float:
    """Returns the time shown: until the first run has done its 40 iterations, or all of it."""
    ends = [max((span.end_s for span in run.spans), default=0.0) for run in runs]
    shown = max(ends, default=0.0)
    for run in runs:
        finished = np.array([span.end_s for span in run.spans if span.kind == "compute"])
        wanted = SHOWN_ITERATIONS * len({span.worker for span in run.spans})
        if finished.size > wanted > 0:
            shown = min(shown, float(np.partition(finished, wanted - 1)[wanted - 1]))
    return shown


def lanes(runs: list[RunView]) -> str:
    """Draws the lanes of all runs, or a note when there is nothing to draw."""
    shown_s = window_s(runs)
    if shown_s <= 0:
        return tag("p", "No timeline was recorded.", class_="note")
    drawn = {span.kind for run in runs for span in run.spans}
    usual = [(kind, word) for kind, word in WORDS.items() if kind != "aborted" or kind in drawn]
    keys = [tag("span", f'<i class="kind {kind}"></i>{text(word)}') for kind, word in usual]
    keys += mark_keys(runs)
    x = axis(0.0, shown_s, 8, tight=True)
    names = run_labels(runs)
    figures = [_lanes(index, names[index], run, x) for index, run in enumerate(runs)]
    return tag("div", "".join(keys), class_="legend kinds") + "".join(figures)


def _lanes(index: int, name: str, run: RunView, x: Axis) -> str:
    by_worker: dict[int, list[Span]] = {}
    for span in run.spans:
        by_worker.setdefault(span.worker, []).append(span)
    workers = sorted(by_worker)[:SHOWN_WORKERS]
    rows = condense([[s for s in by_worker[worker] if s.start_s < x.high] for worker in workers], x.high)
    height, gap, every = (18, 4, 1) if len(rows) <= 16 else (11, 3, 4)
    groups, ranks = [], []
    for row, (worker, bars) in enumerate(zip(workers, rows, strict=True)):
        rects = "".join(_rect(bar, x, height) for bar in bars)
        groups.append(f'<g transform="translate(0 {row * (height + gap)})">{rects}</g>')
        label = text(worker) if row % every == 0 else ""
        ranks.append(tag("span", label, data_rank=worker, style=f"height:{height}px;margin-bottom:{gap}px"))
    total = len(rows) * (height + gap)
    drawn = "".join(groups) + marks(run.barriers, x, WIDTH, total)
    label = f"What each {noun([run])} did when, {name}"
    svg = picture(drawn, WIDTH, total, label, style=f"height:{total}px")
    waiting = run.number("wait_share")
    said = f"waited {share(waiting)} of the time" if waiting is not None else ""
    head = swatch(index) + tag("b", text(name)) + tag("span", text(said), class_="said")
    head += tag("span", text(shown(run, len(by_worker), x.high)), class_="said shown")
    bars_of = tag("div", svg, class_="bars", data_noun=noun([run]))
    frame = tag("div", "".join(ranks), class_="ranks") + bars_of + time_ticks(x)
    return tag("figure", tag("figcaption", head) + tag("div", frame, class_="frame"), class_="lanes")


def shown(run: RunView, workers: int, shown_s: float) -> str:
    """Says how much of the run is drawn."""
    if not run.spans:
        return "no timeline was recorded"
    end_s = max(span.end_s for span in run.spans)
    part, whole = seconds(shown_s), seconds(end_s)
    time = f"first {part} of {whole}" if end_s > shown_s and part != whole else f"all {whole}"
    return f"{time}, {SHOWN_WORKERS} of {count(workers)} {noun([run])}s" if workers > SHOWN_WORKERS else time


def condense(rows: list[list[Span]], shown_s: float) -> list[list[Bar]]:
    """Returns at most `MOST_BARS` bars: short neighbours are joined, ever longer ones until they are few enough."""
    short_s = 0.0
    while True:
        drawn = [join(row, short_s, shown_s) for row in rows]
        if sum(map(len, drawn)) <= MOST_BARS:
            return drawn
        short_s = max(2 * short_s, shown_s / WIDTH)


def join(row: list[Span], short_s: float, shown_s: float) -> list[Bar]:
    """Returns the bars of one lane, with neighbours shorter than `short_s` joined."""
    bars: list[Bar] = []
    few: list[Span] = []
    for span in row:
        if span.seconds >= short_s:
            bars += _joined(few, shown_s)
            few = []
            bars.append(Bar(span.kind, span.start_s, min(span.end_s, shown_s), describe(span)))
            continue
        few.append(span)
        if few[-1].end_s - few[0].start_s >= short_s:
            bars += _joined(few, shown_s)
            few = []
    return bars + _joined(few, shown_s)


def _joined(few: list[Span], shown_s: float) -> list[Bar]:
    if not few:
        return []
    start, end = few[0].start_s, few[-1].end_s
    if len(few) == 1:
        return [Bar(few[0].kind, start, min(end, shown_s), describe(few[0]))]
    spent: dict[Kind, float] = {}
    for span in few:
        spent[span.kind] = spent.get(span.kind, 0.0) + span.seconds
    most = sorted(spent.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{share(time / (end - start))} {WORDS[kind]}" for kind, time in most)
    return [Bar(most[0][0], start, min(end, shown_s), f"{len(few)} spans, {_when(start, end)}: {parts}")]


def describe(span: Span) -> str:
    """Returns what the pointer shows."""
    when = _when(span.start_s, span.end_s)
    if span.kind == "dead":
        return f"gone, {when}"
    if span.kind == "compute":
        return f"iteration {span.iteration}, {when}"
    if span.kind == "aborted":
        uncovered = f"{count(round(span.uncovered, 1))} updates uncovered"
        return f"iteration {span.iteration} given up and begun again, {when}: {uncovered}"
    after = f"after iteration {span.iteration}" if span.iteration >= 0 else "starting"
    if span.kind in ("push", "pull", "exchange"):
        return f"{WORDS[span.kind]} {after}, {when}"
    who, what = ("peer", "message") if span.reason.startswith("waits on peer") else ("worker", "push")
    ended = f"released by {who} {span.cause}" if span.cause >= 0 else f"released by no {what}"
    return f"waiting {after}, {when}: {span.reason}; {ended}"


def _when(start_s: float, end_s: float) -> str:
    return f"{seconds(end_s - start_s)} from {seconds(start_s)}"


def _rect(bar: Bar, x: Axis, height: int) -> str:
    left, right = round(WIDTH * x.place(bar.start_s)), round(WIDTH * x.place(bar.end_s))
    if right <= left:
        return ""
    y, tall = (0, height) if bar.kind != "dead" else (height // 2 - 1, 2)
    place = f'x="{left}" width="{right - left}" y="{y}" height="{tall}"'
    return f'<rect class="{bar.kind}" {place}><title>{text(bar.title)}</title></rect>'
