"""A picture of what would change: a bar before and a bar after for each policy."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

WIDTH, LEFT, RIGHT, BAR, GAP, TOP = 720, 190, 90, 14, 14, 34
BEFORE, AFTER = "#9aa5b1", "#2f6f9f"


def picture(title: str, times: Mapping[str, tuple[float, float]]) -> str:
    """Returns an SVG: for each name its times before and after, in seconds."""
    most = max(max(pair) for pair in times.values())
    scale = (WIDTH - LEFT - RIGHT) / most if most else 0.0
    height = TOP + len(times) * (2 * BAR + GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="18" font-size="13">{escape(title)}</text>',
    ]
    for row, (name, pair) in enumerate(times.items()):
        y = TOP + row * (2 * BAR + GAP)
        lines.append(f'<text x="{LEFT - 8}" y="{y + BAR + 4}" text-anchor="end">{escape(name)}</text>')
        for place, (seconds, colour) in enumerate(zip(pair, (BEFORE, AFTER), strict=True)):
            top, length = y + place * BAR, seconds * scale
            lines.append(f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{BAR - 2}" fill="{colour}"/>')
            lines.append(f'<text x="{LEFT + length + 6:.1f}" y="{top + BAR - 3}">{1e3 * seconds:.3g} ms</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"
