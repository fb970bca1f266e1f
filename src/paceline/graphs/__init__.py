"""Communication graphs of peers: by name, or from a file.

    ring          everybody and its two neighbours in a circle
    ring-based    the ring, and the most distant node (Figure 11)
    double-ring   two ring-based graphs, joined node to node (Figure 11)
    complete      everybody and everybody
    torus         a grid whose rows and columns are rings
    exponential   i sends to i + 1, i + 2, i + 4, ... (directed)
    hierarchical  complete within a machine, one node of each machine in a ring with the others' (Figure 21b)
    hierarchical-spread   the same, with another node of the machine for each of its two bridges (Figure 21c)
    FILE          .graphml, or a list of edges (anything else): "a b" a line, a sends to b

Figures are those of Luo et al. 2019.

The hierarchical graphs need `machines`: how many peers are on the first machine, on the second, and so on. Live runs
know it: there machines are the hosts.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import lru_cache

from paceline import user_code
from paceline.core.topology import Edge, Topology, topology
from paceline.errors import ConfigError
from paceline.graphs.files import read_edges, stamp, whole_path

ELSEWHERE = "elsewhere:"
"""Prefix of a graph's file name that another host has sent. Such a file is never opened here."""
HIERARCHICAL = ("hierarchical", "hierarchical-spread")


def both_ways(edges: list[Edge]) -> list[Edge]:
    return edges + [(b, a) for a, b in edges]


def ring(peers: int) -> list[Edge]:
    return both_ways([(peer, (peer + 1) % peers) for peer in range(peers)])


def ring_based(peers: int) -> list[Edge]:
    return ring(peers) + both_ways([(peer, (peer + peers // 2) % peers) for peer in range(peers)])


def double_ring(peers: int) -> list[Edge]:
    if peers % 2:
        raise ConfigError(f"a double-ring is two rings of equal size: {peers} peers cannot be halved")
    half = peers // 2
    second = [(a + half, b + half) for a, b in ring_based(half)]
    return ring_based(half) + second + both_ways([(peer, peer + half) for peer in range(half)])


def complete(peers: int) -> list[Edge]:
    return [(a, b) for a in range(peers) for b in range(peers) if a != b]


def torus(peers: int) -> list[Edge]:
    rows = max((r for r in range(1, int(peers**0.5) + 1) if peers % r == 0), default=1)
    if rows == 1:
        raise ConfigError(f"a torus is a grid of at least two rows: {peers} peers fill no grid")
    columns = peers // rows
    right = [(r * columns + c, r * columns + (c + 1) % columns) for r in range(rows) for c in range(columns)]
    down = [(r * columns + c, (r + 1) % rows * columns + c) for r in range(rows) for c in range(columns)]
    return both_ways(right + down)


def exponential(peers: int) -> list[Edge]:
    steps = [2**power for power in range(peers.bit_length()) if 2**power < peers]
    return [(peer, (peer + step) % peers) for peer in range(peers) for step in steps]


def hierarchical(machines: tuple[int, ...], spread: bool) -> list[Edge]:
    starts = [sum(machines[:index]) for index in range(len(machines))]
    within = [(a + start, b + start) for start, size in zip(starts, machines, strict=True) for a, b in complete(size)]
    bridges = []
    for index, start in enumerate(starts):
        # The way out may be the second node, the way in the first; the ring closes on the second node of the first.
        after = (index + 1) % len(machines)
        leaves = start + (1 if spread and index and machines[index] > 1 else 0)
        enters = starts[after] + (1 if spread and not after and machines[0] > 1 else 0)
        bridges.append((leaves, enters))
    return within + both_ways(bridges)


NAMED: dict[str, Callable[[int], list[Edge]]] = {
    "ring": ring,
    "ring-based": ring_based,
    "double-ring": double_ring,
    "complete": complete,
    "torus": torus,
    "exponential": exponential,
}


def is_file(graph: str) -> bool:
    return "." in graph or "/" in graph


def lacks_placement(graph: str, machines: tuple[int, ...] | None) -> bool:
    """Whether the graph needs to know which peers are on which machine, and does not. Live runs take it from the
    hosts."""
    return graph in HIERARCHICAL and machines is None


def check_name(graph: str, machines: tuple[int, ...] | None) -> str:
    """Returns the name, a file's with its whole path. Refuses unknown names, and a placement where none is used."""
    if machines is not None and graph not in HIERARCHICAL:
        raise ConfigError(f"machines= is for the graphs {' and '.join(HIERARCHICAL)}, not for {graph}")
    known = [*NAMED, *HIERARCHICAL]
    if graph not in known and not is_file(graph):
        near = get_close_matches(graph, known, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown graph {graph!r}{hint} (known: {', '.join(known)}, or a file: x.graphml, x.edges)")
    if graph in known or graph.startswith(ELSEWHERE):
        return graph
    return ELSEWHERE + graph if user_code.is_remote() else whole_path(graph)


def load(graph: str, peers: int, machines: tuple[int, ...] | None = None, uniform: bool = False) -> Topology:
    """Makes the graph of this name or file for so many peers, and checks it."""
    name = check_name(graph, machines)
    if name.startswith(ELSEWHERE):
        raise ConfigError(
            f"the graph {name.removeprefix(ELSEWHERE)!r} is a file that another host has named: "
            "name it on the command line of the host that serves the run (--policy)"
        )
    if lacks_placement(graph, machines):
        raise ConfigError(f"graph={graph} needs machines=: how many peers each has, as machines=4:2:2")
    return _load(name, peers, machines, uniform, stamp(name) if is_file(name) else 0)


@lru_cache(maxsize=64)
def _load(graph: str, peers: int, machines: tuple[int, ...] | None, uniform: bool, written: int) -> Topology:
    """Makes the graph, once for each time `written` at which its file was changed."""
    if graph in HIERARCHICAL and machines is not None:
        if sum(machines) != peers:
            raise ConfigError(
                f"machines={':'.join(map(str, machines))} places {sum(machines)} peers, there are {peers}"
            )
        edges = hierarchical(machines, spread=graph == "hierarchical-spread")
    elif graph in NAMED:
        edges = NAMED[graph](peers)
    else:
        edges = read_edges(graph, peers)
    return topology(peers, edges, uniform)


__all__ = ["HIERARCHICAL", "NAMED", "check_name", "lacks_placement", "load"]
