"""Graphs in files. The one place that knows networkx: it reads the formats, all others see pairs of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.core.topology import Edge
from paceline.errors import ConfigError


def read_edges(name: str, peers: int) -> list[Edge]:
    """The edges in a file: GraphML, or one edge a line. Nodes are ranks, or names that are ranked in their order."""
    # Not on top: it takes a quarter of a second, which only those who read files should pay.
    import networkx

    path = Path(name)
    try:
        if path.suffix == ".graphml":
            graph = networkx.read_graphml(path)
        else:
            graph = networkx.read_edgelist(path, create_using=networkx.DiGraph, data=False)
    except OSError as error:
        raise ConfigError(f"cannot read the graph {name!r}: {error.strerror}") from None
    except Exception as error:
        raise ConfigError(f"the graph {name!r} cannot be read: {' '.join(str(error).split())}") from None
    nodes: list[Any] = list(graph.nodes)
    if len(nodes) != peers:
        raise ConfigError(f"the graph {name!r} has {len(nodes)} nodes, there are {peers} peers")
    if all(str(node).isdigit() for node in nodes):
        rank = {node: int(str(node)) for node in nodes}
    else:
        rank = {node: at for at, node in enumerate(sorted(nodes, key=str))}
    edges = [(rank[a], rank[b]) for a, b in graph.edges()]
    return edges if graph.is_directed() else edges + [(b, a) for a, b in edges]
