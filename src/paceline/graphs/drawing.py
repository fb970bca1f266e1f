"""A graph on a circle: in a terminal, of Braille dots, and as SVG, where edges that go one way have an arrow."""

from __future__ import annotations

import math

from paceline.core.topology import Edge, Topology

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each of the 4 x 2 dots of a Braille character."""
BLANK = 0x2800
SIZE = 480


def places(graph: Topology, radius_x: float, radius_y: float) -> list[tuple[float, float]]:
    """Places peers clockwise from the top, around (0, 0)."""
    turns = [2 * math.pi * peer / graph.size for peer in range(graph.size)]
    return [(radius_x * math.sin(turn), -radius_y * math.cos(turn)) for turn in turns]


def undirected(graph: Topology) -> list[tuple[Edge, bool]]:
    """Returns each pair of joined peers once, and whether it is joined both ways."""
    edges = set(graph.edges)
    return [((a, b), (b, a) in edges) for a, b in graph.edges if a < b or (b, a) not in edges]


def in_terminal(graph: Topology, columns: int = 56) -> list[str]:
    """Draws the graph as lines of text: edges are dots, peers are their ranks."""
    rows = max(9, columns * 3 // 7)
    wide, high = columns * 2, rows * 4
    cells = [[0] * columns for _ in range(rows)]
    at = [(wide / 2 + x, high / 2 + y) for x, y in places(graph, wide / 2 - 7, high / 2 - 5)]
    for (a, b), _ in undirected(graph):
        (x0, y0), (x1, y1) = at[a], at[b]
        steps = int(max(abs(x1 - x0), abs(y1 - y0))) + 1
        for step in range(steps + 1):
            right, down = int(x0 + (x1 - x0) * step / steps), int(y0 + (y1 - y0) * step / steps)
            cells[down // 4][right // 2] |= DOTS[down % 4][right % 2]
    lines = [[chr(BLANK + cell) if cell else " " for cell in row] for row in cells]
    for peer, (x, y) in enumerate(at):
        label = str(peer)
        left = int(x) // 2 - len(label) // 2
        lines[int(y) // 4][left : left + len(label)] = label
    return ["".join(line).rstrip() for line in lines]


def as_svg(graph: Topology, title: str) -> str:
    at = [(SIZE / 2 + x, SIZE / 2 + y) for x, y in places(graph, SIZE / 2 - 30, SIZE / 2 - 30)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE}" font-family="sans-serif" font-size="13">',
        f"<title>{title}</title>",
        '<defs><marker id="to" viewBox="0 0 8 8" refX="22" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#678"/></marker></defs>',
    ]
    for (a, b), both in undirected(graph):
        (x0, y0), (x1, y1) = at[a], at[b]
        arrow = "" if both else ' marker-end="url(#to)"'
        parts.append(f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="#678"{arrow}/>')
    for peer, (x, y) in enumerate(at):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="13" fill="#fff" stroke="#234"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 4.5:.1f}" text-anchor="middle" fill="#234">{peer}</text>')
    return "\n".join([*parts, "</svg>", ""])
