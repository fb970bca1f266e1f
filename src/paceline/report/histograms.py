"""How stale the gradients were: a histogram for each run, side by side on one axis of staleness.

With a thousand workers staleness goes into the thousands, so values share a bar when there are many; the few that lie
far out are counted in the last bar, or they would press all others together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from paceline.report import labels
from paceline.report.charts import BOX, axis
from paceline.report.markup import count, picture, share, swatch, tag, text, x_ticks, y_ticks
from paceline.report.report_model import RunView, run_labels

MOST_BARS = 40
FAR_OUT = 0.002
"""The share of a run's gradients that may lie beyond the axis."""


def staleness_section(runs: list[RunView]) -> str:
    """Makes a figure for each run that has gradients; nothing where none has."""
    known = [run.staleness for run in runs if run.staleness]
    if not known:
        return ""
    largest = max(map(_last_shown, known))
    width = bar_width(largest)
    bars = largest // width + 1
    names = run_labels(runs)
    figures = [_figure(index, names[index], run, width, bars) for index, run in enumerate(runs) if run.staleness]
    return tag("p", text(labels.stale_note(runs)), class_="note") + tag("div", "".join(figures), class_="histograms")


def _last_shown(counts: Mapping[int, int]) -> int:
    """Returns the smallest staleness beyond which there are only a few gradients."""
    beyond = FAR_OUT * sum(counts.values())
    last = max(counts)
    for value in sorted(counts, reverse=True):
        last = value
        beyond -= counts[value]
        if beyond < 0:
            break
    return last


def bar_width(largest: int) -> int:
    """Returns how many values share a bar: 1, 2 or 5 times a power of ten."""
    wanted = (largest + 1) / MOST_BARS
    if wanted <= 1:
        return 1
    power = 10 ** math.floor(math.log10(wanted))
    return next(int(times * power) for times in (1, 2, 5, 10) if times * power >= wanted)


def gathered(counts: Mapping[int, int], width: int, bars: int) -> list[int]:
    """Returns how many gradients each bar stands for; the last has all beyond it too."""
    heights = [0] * bars
    for value, number in counts.items():
        heights[min(value // width, bars - 1)] += number
    return heights


def _figure(index: int, name: str, run: RunView, width: int, bars: int) -> str:
    counts = run.staleness
    total = sum(counts.values())
    heights = [number / total for number in gathered(counts, width, bars)]
    y = axis(0.0, max(heights), 3)
    shapes = [f'<path class="grid" d="{"".join(f"M0 {BOX * (1 - y.place(tick)):.1f}H{BOX}" for tick in y.ticks)}"/>']
    for bar, height in enumerate(heights):
        if height:
            first, last = bar * width, bar * width + width - 1
            beyond = bar == bars - 1 and max(counts) > last
            values = f"{count(first)} or more" if beyond else count(first) if width == 1 else f"{first} to {last}"
            tall = max(6.0, BOX * y.place(height))
            place = f'x="{BOX * bar / bars:.1f}" width="{BOX / bars:.1f}" y="{BOX - tall:.1f}" height="{tall:.1f}"'
            shapes.append(f"<rect {place}><title>staleness {text(values)}: {text(share(height))}</title></rect>")
    svg = picture("".join(shapes), BOX, BOX, f"Staleness of the gradients, {name}")
    mean = sum(value * number for value, number in counts.items()) / total
    said = tag("span", text(f"mean {mean:.1f}, at most {count(max(counts))}"), class_="said")
    frame = y_ticks((y.place(tick), share(tick)) for tick in y.ticks)
    frame += tag("div", svg, class_=f"bins r{index % 8}") + _x_ticks(width, bars)
    caption = tag("figcaption", swatch(index) + tag("b", text(name)) + said)
    return tag("figure", caption + tag("div", frame, class_="frame"), class_="histogram")


def _x_ticks(width: int, bars: int) -> str:
    """Labels the middle of a bar that stands for one value, and the beginning of one that stands for several."""
    step = max(1, round(axis(0.0, float(max(1, width * bars)), 4).ticks[1]))
    middle = 0.5 if width == 1 else 0.0
    places = (((tick + middle) / (width * bars), count(tick)) for tick in range(0, width * bars, step))
    return x_ticks(places)
