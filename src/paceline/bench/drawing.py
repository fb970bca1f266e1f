"""A picture of the steps of two runs, one above the other on the same clock: who computes, who waits."""

from __future__ import annotations

from typing import NamedTuple

from paceline.report.markup import tag, text

WIDTH, LEFT, ROW, GAP, HEAD, MARGIN = 760, 70, 20, 4, 26, 10
COMPUTING, WAITING, INK = "#2f6db3", "#e4b363", "#333333"


class Step(NamedTuple):
    """When a worker's computation began and ended, in seconds, and how many samples it was on."""

    began: float
    ended: float
    samples: float


def picture(panels: dict[str, list[list[Step]]], first: dict[str, int], shown_s: float) -> str:
    """Draws the steps of every panel for so long, from iteration `first` on, with the samples of each in its bar."""
    parts, top = [], MARGIN
    for name, steps in panels.items():
        parts.append(tag("text", text(name), x=MARGIN, y=top + HEAD - 10, font_size=14, fill=INK))
        top += HEAD
        start = min(mine[first[name]].began for mine in steps)
        for rank, mine in enumerate(steps):
            y = top + rank * (ROW + GAP)
            parts.append(tag("text", f"worker {rank}", x=MARGIN, y=y + 14, font_size=12, fill=INK))
            parts.append(_bar(LEFT, WIDTH - MARGIN, y, WAITING))
            for step in mine:
                low, high = (LEFT + (at - start) / shown_s * (WIDTH - MARGIN - LEFT) for at in (step.began, step.ended))
                if high > LEFT and low < WIDTH - MARGIN:
                    parts.append(_bar(max(low, LEFT), min(high, WIDTH - MARGIN), y, COMPUTING, f"{step.samples:g}"))
        top += len(steps) * (ROW + GAP) + MARGIN
    parts.append(_bar(LEFT, LEFT + ROW, top, COMPUTING))
    parts.append(tag("text", "computing, with its samples", x=LEFT + 26, y=top + 14, font_size=12, fill=INK))
    parts.append(_bar(LEFT + 230, LEFT + 230 + ROW, top, WAITING))
    parts.append(tag("text", "waiting for the others", x=LEFT + 256, y=top + 14, font_size=12, fill=INK))
    height = top + ROW + MARGIN
    ground = tag("rect", x=0, y=0, width=WIDTH, height=height, fill="#ffffff")
    return tag(
        "svg", ground + "".join(parts), xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {height}",
        width=WIDTH, height=height, font_family="sans-serif",
    )  # fmt: skip


def _bar(low: float, high: float, y: float, colour: str, word: str = "") -> str:
    bar = tag("rect", x=f"{low:.1f}", y=y, width=f"{max(high - low - 0.8, 0.5):.1f}", height=ROW, fill=colour)
    if high - low < 26:
        return bar
    middle = f"{(low + high) / 2:.1f}"
    return bar + tag("text", word, x=middle, y=y + 14, font_size=11, fill="#ffffff", text_anchor="middle")
