"""Graphs in files. The one place that knows networkx: it reads the formats, all others see pairs of ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from paceline.core.topology import Edge
from paceline.errors import ConfigError

NOT_IN_TEXT = re.compile(r"[,()]|\+(?=\s*[A-Za-z_./~])|@\s*\d|^\s|\s$")
"""What a path must not contain: it would end a parameter in a policy's text, or the policy."""


def whole_path(name: str) -> str:
    """Returns the file's whole path, which means the same in every process of a run, whatever folder it works in."""
    path = str(Path(name).expanduser().absolute())
    if found := NOT_IN_TEXT.search(path):
        raise ConfigError(
            f"the graph {path!r} has {found[0]!r} in its path, which has another meaning in a policy's text: "
            "rename or copy the file"
        )
    return path


def stamp(name: str) -> int:
    """Returns the time at which the file was written; 0 if it is not there."""
    try:
        return Path(name).stat().st_mtime_ns
    except OSError:
        return 0


def read_edges(name: str, peers: int) -> list[Edge]:
    """Reads edges from GraphML, or from lines of two nodes. Nodes are ranks, or names that are ranked in their
    order."""
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
