"""`paceline graph`: a communication graph drawn, with what matters of it in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated

import tyro

from paceline import graphs
from paceline.api import check_count
from paceline.commands.options import File, Maybe, check_file
from paceline.commands.terminal import console, count
from paceline.core.topology import UNIFORM, distances, neighbours, sides, unevenness
from paceline.errors import ConfigError
from paceline.graphs.drawing import as_svg, in_terminal
from paceline.graphs.spectral import gap_of_graph, gap_of_weights
from paceline.run import write_whole

MOST_DRAWN = 64


@dataclass(kw_only=True)
class Graph:
    """Draw a communication graph, and say how it averages.

    paceline graph ring-based --workers 16
    """

    name: Annotated[
        str,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="NAME", help=f"{', '.join([*graphs.NAMED, *graphs.HIERARCHICAL])}, or a file."),
    ] = ""
    workers: int = 16
    """How many peers."""
    machines: Maybe[str] = None
    """How many peers each machine has, as 4:2:2, for hierarchical graphs. In a live run these are the hosts."""
    svg: File = None
    """Write the drawing as SVG to this file."""

    def main(self) -> int:
        if not self.name:
            raise ConfigError(f"name a graph (known: {', '.join([*graphs.NAMED, *graphs.HIERARCHICAL])}, or a file)")
        check_count("workers", self.workers)
        check_file("--svg", self.svg)
        graph = graphs.load(self.name, self.workers, placement(self.machines))
        everybody = frozenset(range(graph.size))
        found = neighbours(graph, everybody)
        if graph.size <= MOST_DRAWN:
            for line in in_terminal(graph):
                console.print(line, soft_wrap=True)
        degrees = sorted({len(others) for others in found.ins.values()})
        furthest = max(far for away in distances(graph).values() for far in away.values())
        lines = [
            f"{self.name}: {count(graph.size, 'peer')}, {count(len(graph.edges), 'edge')}, in-degree "
            f"{' to '.join(map(str, dict.fromkeys((degrees[0], degrees[-1]))))}, longest shortest path {furthest}",
            f"weights: {'1/(in-degree + 1)' if found.rule == UNIFORM else found.rule}, doubly stochastic to "
            f"{unevenness(found.weights):.0e}",
            "spectral gap of the graph, 1 - lambda_2 (signed) of 1/in-degree without self-loops: "
            f"{gap_of_graph(graph):.4f}",
            f"spectral gap of the weights, |lambda_1| - |lambda_2| with self-loops: {gap_of_weights(graph):.4f}",
            "bipartite: " + ("yes" if sides(graph, everybody) is not None else "no"),
        ]
        for line in lines:
            console.print(line, soft_wrap=True)
        if self.svg is not None:
            title = escape(f"{self.name}, {count(graph.size, 'peer')}")
            console.print(f"wrote {write_whole(Path(self.svg), as_svg(graph, title).encode())}", soft_wrap=True)
        return 0


def placement(text: str | None) -> tuple[int, ...] | None:
    """Reads '4:2:2' as (4, 2, 2)."""
    if text is None:
        return None
    sizes = text.split(":")
    if not all(size.isdigit() and int(size) for size in sizes):
        raise ConfigError(f"--machines {text} is not a list of whole numbers, 1 or more, as 4:2:2")
    return tuple(map(int, sizes))
