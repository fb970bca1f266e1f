"""Line charts: a metric against time, all runs overlaid.

The lines are SVG in a box of 1000 by 1000 stretched to the space there is, with strokes that do not stretch;
the ticks are HTML placed in per cent. So one drawing serves a wide window and a phone, with the same letters.
"""

from __future__ import annotations

import math
from itertools import pairwise

from msgspec import Struct

from paceline.report.markup import picture, run_class, swatch, tag, text, x_ticks, y_ticks
from paceline.report.report_model import RunView, Target, finite, run_labels

BOX = 1000
MOST_POINTS = 400
"""A longer history is thinned to so many points: more could not be told apart."""
DIVERGED = 1.5
"""A loss above this many times the largest first loss is cut, or a diverged run would flatten all others."""

Point = tuple[float, float]


class Axis(Struct, frozen=True):
    """A range and its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """Returns the place of a value: 0 at the low end, 1 at the high end."""
        return (value - self.low) / (self.high - self.low)

    def label(self, tick: float) -> str:
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else self.high
        decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
        return f"{tick:.{decimals}f}" if decimals < 7 and abs(tick) < 1e7 else f"{tick:.2g}"


def axis(low: float, high: float, wanted: int = 5, *, tight: bool = False) -> Axis:
    """Makes an axis with ticks at 1, 2 or 5 times a power of ten. If `tight`, it ends with the data, not with a
    tick."""
    if not high > low:
        low, high = (low - 0.5, low + 0.5) if low else (0.0, 1.0)
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(times for times in (1, 2, 5, 10) if times * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9) if tight else math.floor(low / step + 1e-9)
    last = math.floor(high / step + 1e-9) if tight else math.ceil(high / step - 1e-9)
    ticks = tuple(index * step for index in range(first, last + 1))
    return Axis(low, high, ticks) if tight else Axis(ticks[0], ticks[-1], ticks)


def points_of(run: RunView, metric: str) -> list[Point]:
    """Returns time and value where both are numbers, thinned to what can be told apart."""
    points = [
        (time, value)
        for row in run.history
        if (time := finite(row.get("time_s"))) is not None and (value := finite(row.get(metric))) is not None
    ]
    if len(points) <= MOST_POINTS:
        return points
    stride = math.ceil(len(points) / MOST_POINTS)
    return points[:-1:stride] + points[-1:]


def line_chart(title: str, metric: str, runs: list[RunView], target: Target | None, word: str = "target") -> str:
    """Draws the chart of one metric, or nothing when no run has it."""
    series = [points_of(run, metric) for run in runs]
    if not any(series):
        return ""
    aim = target.value if target is not None and target.metric == metric else None
    x = axis(0.0, max(points[-1][0] for points in series if points), tight=True)
    y, cut = _y_axis(metric, series, aim)
    shapes = [_grid(x, y)]
    if aim is not None:
        shapes.append(f'<path class="target" d="M0 {_down(y, aim)}H{BOX}"/>')
    shapes += [_line(index, points, x, y) for index, points in enumerate(series) if points]
    label = f"{title} against time for {', '.join(run_labels(runs))}"
    svg = picture("".join(shapes), BOX, BOX, label)
    dots = [
        _dot(index, x.place(when), y.place(_value_at(points, when)))
        for index, (run, points) in enumerate(zip(runs, series, strict=True))
        if points and (when := _marked(run, points, aim)) is not None
    ]
    over = svg + _aim(y, aim, word) + "".join(dots) + tag("div", class_="hair")
    plot = tag("div", over, class_="plot", data_x0=x.low, data_x1=x.high, data_y0=y.low, data_y1=y.high)
    frame = tag(
        "div", y_ticks((y.place(tick), y.label(tick)) for tick in y.ticks) + plot + time_ticks(x), class_="frame"
    )
    note = tag("p", f"Losses above {text(y.label(y.high))} are cut.", class_="note") if cut else ""
    return tag("figure", tag("figcaption", text(title)) + frame + note, class_="chart")


def _y_axis(metric: str, series: list[list[Point]], aim: float | None) -> tuple[Axis, bool]:
    """Returns the range of the values and the target, and whether something above it is cut."""
    aims = [] if aim is None else [aim]
    values = [value for points in series for _, value in points] + aims
    low, high = min(values), max(values)
    if metric != "loss":
        return axis(low, high), False
    ceiling = max([DIVERGED * points[0][1] for points in series if points] + aims)
    y = axis(min(low, 0.0), min(high, ceiling) if ceiling > 0 else high)
    return y, y.high < high


def legend(runs: list[RunView]) -> str:
    """Makes one key per run; the script makes them switches."""
    keys = []
    for index, name in enumerate(run_labels(runs)):
        words = swatch(index) + text(name)
        keys.append(tag("button", words, type="button", class_="key", data_run=index, aria_pressed="true"))
    return tag("div", "".join(keys), class_="legend")


def _marked(run: RunView, points: list[Point], aim: float | None) -> float | None:
    """Returns where to put a dot: where the target was reached, or at the only point of a history, which has no
    line."""
    reached = run.number("time_to_target_s") if aim is not None else None
    if reached is not None and points[0][0] <= reached <= points[-1][0]:
        return reached
    return points[0][0] if len(points) == 1 else None


def _value_at(points: list[Point], when: float) -> float:
    for (before, value), (after, then) in pairwise(points):
        if before <= when <= after:
            return value + (then - value) * (when - before) / (after - before) if after > before else then
    return points[-1][1]


def _down(y: Axis, value: float) -> str:
    return f"{BOX * (1 - min(1.0, y.place(value))):.1f}".removesuffix(".0")


def _across(x: Axis, value: float) -> str:
    return f"{BOX * x.place(value):.1f}".removesuffix(".0")


def _line(index: int, points: list[Point], x: Axis, y: Axis) -> str:
    path = " ".join(f"{_across(x, time)},{_down(y, value)}" for time, value in points)
    return f'<polyline class="line {run_class(index)}" data-run="{index}" points="{path}"/>'


def _grid(x: Axis, y: Axis) -> str:
    lines = [f"M0 {_down(y, tick)}H{BOX}" for tick in y.ticks]
    lines += [f"M{_across(x, tick)} 0V{BOX}" for tick in x.ticks]
    return f'<path class="grid" d="{"".join(lines)}"/>'


def _aim(y: Axis, aim: float | None, word: str) -> str:
    if aim is None:
        return ""
    place = y.place(aim)
    side = f"bottom:{100 * place:.2f}%" if place < 0.9 else f"top:{100 * (1 - place):.2f}%"
    return tag("b", f"{word} {text(f'{aim:g}')}", class_="aim", style=side)


def _dot(index: int, across: float, up: float) -> str:
    style = f"left:{100 * across:.2f}%;bottom:{100 * min(1.0, up):.2f}%"
    return tag("i", class_=f"dot {run_class(index)}", data_run=index, style=style)


def time_ticks(x: Axis) -> str:
    """Labels a time axis in seconds."""
    return x_ticks((x.place(tick), f"{x.label(tick)} s") for tick in x.ticks)
