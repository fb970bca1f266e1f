"""How fast what one peer knows spreads to all: spectral gaps. There are two in use, so both are named.

The paper's figures (Luo et al. 2019, 7.3.6: 0.6667, 0.2682, 0.2688) are 1 - lambda_2, signed, of 1/in-degree *without*
self-loops, though its footnote defines the gap by norms, |lambda_1| - |lambda_2|. The one by norms, of the weights that
are really used, is what governs convergence: each average shrinks what peers disagree on by |lambda_2|.
"""

from __future__ import annotations

import numpy as np

from paceline.core.topology import Topology, neighbours


def gap_of_graph(graph: Topology) -> float:
    """Returns 1 - lambda_2 (signed) of 1/in-degree without self-loops, as in the paper's figures."""
    if graph.size == 1:
        return 1.0
    ins = neighbours(graph, frozenset(range(graph.size))).ins
    matrix = np.zeros((graph.size, graph.size))
    for peer, others in ins.items():
        matrix[peer, list(others)] = 1.0 / len(others)
    values = np.sort(np.linalg.eigvals(matrix).real)
    return float(1.0 - values[-2])


def gap_of_weights(graph: Topology) -> float:
    """Returns |lambda_1| - |lambda_2| of the weights used, self-loops included, as the paper defines the gap."""
    if graph.size == 1:
        return 1.0
    matrix = np.zeros((graph.size, graph.size))
    for peer, row in neighbours(graph, frozenset(range(graph.size))).weights.items():
        for other, weight in row.items():
            matrix[peer, other] = weight
    sizes = np.sort(np.abs(np.linalg.eigvals(matrix)))
    return float(sizes[-1] - sizes[-2])
