"""Who sends to whom: a directed graph of peers, the weights of its averages, and what is left of it when peers go.

A peer j is an in-neighbour of i if there is an edge j -> i: j sends its parameters to i. Everybody counts as its own
neighbour in an average, never for tokens, acks or capacities. Edges are plain pairs of ranks.

**Weights.** `weights[i][j]` is what i's average gives to j's update. Each row sums to 1, so that an average is one;
each column should too, or some peers count for more than others in what all agree on in the end (doubly stochastic; Luo
et al. 2019, 3.1). 1/(in-neighbours + 1), the paper's eq. 1, does that where all degrees are equal. Elsewhere:
Metropolis weights if all edges go both ways, Sinkhorn's alternate scaling of rows and columns if not, which converges
because everybody has a weight for itself.

**When peers go**, those who sent to one that is gone send to whom it had sent to: i's neighbours are the live peers
with a path to i through the dead alone. So a strongly connected graph stays so, whoever is left, and each peer works
it out by itself from the graph and the view. When the dead come back, so do the old edges.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from paceline.errors import ConfigError

Edge = tuple[int, int]
Weights = dict[int, dict[int, float]]

UNIFORM, METROPOLIS, SINKHORN = "uniform", "Metropolis", "Sinkhorn"
EXACT = 1e-9
SWEEPS = 5_000
"""Sinkhorn's scaling makes at most so many sweeps. It needs some dozens on ordinary graphs."""


@dataclass(frozen=True)
class Topology:
    """A graph of `size` peers. With `uniform`, weights are those of eq. 1 whether they are doubly stochastic or not."""

    size: int
    edges: tuple[Edge, ...]
    uniform: bool = False


@dataclass(frozen=True)
class Neighbours:
    """The neighbours of every live peer, and the weights of the averages."""

    ins: dict[int, tuple[int, ...]]
    outs: dict[int, tuple[int, ...]]
    weights: Weights
    rule: str
    """The rule by which the weights were found."""


def topology(size: int, edges: Iterable[Edge], uniform: bool = False) -> Topology:
    """Makes a checked graph: no edge to oneself, none twice, and everybody can be reached from everybody."""
    kept = tuple(sorted({(a, b) for a, b in edges if a != b}))
    for a, b in kept:
        if not (0 <= a < size and 0 <= b < size):
            raise ConfigError(f"the graph has an edge {a} -> {b}: peers are 0 to {size - 1}")
    onward, backward = _onward(kept), _onward((b, a) for a, b in kept)
    from_0, to_0 = _distances(onward, 0), _distances(backward, 0)
    for peer in range(size):
        for reached, a, b in ((from_0, 0, peer), (to_0, peer, 0)):
            if peer not in reached:
                raise ConfigError(f"the graph is not strongly connected: peer {b} cannot be reached from peer {a}")
    return Topology(size, kept, uniform)


@lru_cache(maxsize=256)
def neighbours(graph: Topology, alive: frozenset[int]) -> Neighbours:
    """Returns the graph of those alive: peers that were joined through the dead are joined directly."""
    backward = _onward((b, a) for a, b in graph.edges)
    ins: dict[int, tuple[int, ...]] = {}
    outs: dict[int, list[int]] = {peer: [] for peer in alive}
    for peer in sorted(alive):
        found, passed, ahead = set(), {peer}, list(backward.get(peer, ()))
        while ahead:
            other = ahead.pop()
            if other in passed:
                continue
            passed.add(other)
            if other in alive:
                found.add(other)
            else:
                ahead.extend(backward.get(other, ()))
        ins[peer] = tuple(sorted(found))
        for other in ins[peer]:
            outs[other].append(peer)
    weights, rule = weigh(ins, graph.uniform)
    return Neighbours(ins, {peer: tuple(sorted(found)) for peer, found in outs.items()}, weights, rule)


def weigh(ins: dict[int, tuple[int, ...]], uniform: bool = False) -> tuple[Weights, str]:
    """Returns the weights of these neighbourhoods, and the rule they were found by."""
    weights = {peer: dict.fromkeys((*others, peer), 1.0 / (len(others) + 1)) for peer, others in ins.items()}
    if uniform or unevenness(weights) < EXACT:
        return weights, UNIFORM
    if all(peer in ins[other] for peer, others in ins.items() for other in others):
        for peer, others in ins.items():
            row = {other: 1.0 / (1 + max(len(others), len(ins[other]))) for other in others}
            weights[peer] = {**row, peer: 1.0 - sum(row.values())}
        return weights, METROPOLIS
    for _ in range(SWEEPS):
        columns = _columns(weights)
        for peer, row in weights.items():
            scaled = {other: weight / columns[other] for other, weight in row.items()}
            total = sum(scaled.values())
            weights[peer] = {other: weight / total for other, weight in scaled.items()}
        if unevenness(weights) < EXACT:
            break
    return weights, SINKHORN


def unevenness(weights: Weights) -> float:
    """Returns how far the column sums are from 1 at most: 0 if doubly stochastic, as rows always sum to 1."""
    return max((abs(total - 1.0) for total in _columns(weights).values()), default=0.0)


def _columns(weights: Weights) -> dict[int, float]:
    columns = dict.fromkeys(weights, 0.0)
    for row in weights.values():
        for other, weight in row.items():
            columns[other] += weight
    return columns


def distances(graph: Topology) -> dict[int, dict[int, int]]:
    """Returns d[a][b], the length of the shortest path a -> b."""
    onward = _onward(graph.edges)
    return {peer: _distances(onward, peer) for peer in range(graph.size)}


@lru_cache(maxsize=64)
def sides(graph: Topology, alive: frozenset[int]) -> dict[int, int] | None:
    """Returns the side of each peer if the graph is bipartite, the smallest rank on side 0; else None."""
    ins = neighbours(graph, alive).ins
    side = {min(alive, default=0): 0}
    ahead = list(side)
    while ahead:
        peer = ahead.pop()
        for other in ins[peer]:
            if other not in side:
                side[other] = 1 - side[peer]
                ahead.append(other)
            elif side[other] == side[peer]:
                return None
    return side


def is_symmetric(graph: Topology) -> bool:
    """Whether all edges go both ways."""
    edges = set(graph.edges)
    return all((b, a) in edges for a, b in edges)


def _onward(edges: Iterable[Edge]) -> dict[int, list[int]]:
    onward: dict[int, list[int]] = {}
    for a, b in edges:
        onward.setdefault(a, []).append(b)
    return onward


def _distances(onward: dict[int, list[int]], start: int) -> dict[int, int]:
    found, ring = {start: 0}, [start]
    while ring:
        ring = [b for a in ring for b in onward.get(a, ()) if b not in found and found.setdefault(b, found[a] + 1)]
    return found
