"""Graphs by name and from files: their edges, weights and spectral gaps, and how they are drawn."""

from __future__ import annotations

from pathlib import Path

import networkx
import pytest

from paceline import cli, graphs, simulate
from paceline.core.topology import METROPOLIS, SINKHORN, UNIFORM, is_symmetric, neighbours, sides, topology, unevenness
from paceline.graphs.drawing import as_svg, in_terminal
from paceline.graphs.spectral import gap_of_graph, gap_of_weights


def everybody(size: int) -> frozenset[int]:
    return frozenset(range(size))


@pytest.mark.parametrize(
    ("name", "machines", "gap"),
    [("ring-based", None, 0.6667), ("hierarchical", (4, 2, 2), 0.2682), ("hierarchical-spread", (4, 2, 2), 0.2688)],
)
def test_the_graphs_of_section_7_3_6_have_the_papers_spectral_gaps(
    name: str, machines: tuple[int, ...], gap: float
) -> None:
    assert gap_of_graph(graphs.load(name, 8, machines)) == pytest.approx(gap, abs=5e-5)


@pytest.mark.parametrize("peers", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("name", graphs.NAMED)
def test_every_named_graph_is_connected_and_averages_soundly(name: str, peers: int) -> None:
    if name == "torus" and peers == 2:
        return
    graph = graphs.load(name, peers)
    assert unevenness(neighbours(graph, everybody(peers)).weights) < 1e-9
    assert is_symmetric(graph) == (name != "exponential" or peers == 2)
    assert 0 < gap_of_weights(graph) <= 1


def test_degrees_are_those_of_figure_11() -> None:
    degree = {name: len(neighbours(graphs.load(name, 16), everybody(16)).ins[0]) for name in graphs.NAMED}
    assert degree == {"ring": 2, "ring-based": 3, "double-ring": 4, "complete": 15, "torus": 4, "exponential": 4}


@pytest.mark.parametrize("name", ["ring", "ring-based", "torus", "exponential", "complete"])
def test_edges_are_those_networkx_makes(name: str) -> None:
    made = {
        "ring": networkx.cycle_graph(16),
        "ring-based": networkx.circulant_graph(16, [1, 8]),
        "torus": networkx.convert_node_labels_to_integers(
            networkx.grid_2d_graph(4, 4, periodic=True), ordering="sorted"
        ),
        "exponential": networkx.DiGraph([(a, (a + 2**p) % 16) for a in range(16) for p in range(4)]),
        "complete": networkx.complete_graph(16),
    }[name].to_directed()
    assert set(graphs.load(name, 16).edges) == set(made.edges)


def test_weights_by_the_rule_that_fits() -> None:
    star = topology(4, [(0, 1), (1, 0), (0, 2), (2, 0), (0, 3), (3, 0)])
    oneway = topology(4, [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)])
    for graph, rule in ((graphs.load("ring", 5), UNIFORM), (star, METROPOLIS), (oneway, SINKHORN)):
        found = neighbours(graph, everybody(graph.size))
        assert found.rule == rule
        assert unevenness(found.weights) < 1e-6
    forced = neighbours(topology(4, star.edges, uniform=True), everybody(4))
    assert forced.rule == UNIFORM
    assert forced.weights[1] == {0: 0.5, 1: 0.5}
    assert unevenness(forced.weights) > 0.5


def test_forced_weights_come_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    policy = "hop:graph=hierarchical,machines=3:2,weights=uniform"
    with pytest.warns(UserWarning, match="not doubly stochastic, peers count for"):
        simulate("quadratic", policy, workers=5, iterations=2)
    assert (
        cli.run(["simulate", "--policy", policy, "--workers", "5", "--iterations", "2", "--workload", "quadratic"]) == 0
    )
    assert "warning: hop:graph=hierarchical" in capsys.readouterr().out


def test_two_sides_of_a_graph() -> None:
    assert sides(graphs.load("ring", 6), everybody(6)) == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 1}
    assert sides(graphs.load("ring", 5), everybody(5)) is None
    assert sides(graphs.load("ring", 6), frozenset({0, 1, 2, 3, 4})) is None


def test_graphs_from_files(tmp_path: Path) -> None:
    path = str(tmp_path / "ring.graphml")
    networkx.write_graphml(networkx.cycle_graph(6), path)
    assert graphs.load(path, 6).edges == graphs.load("ring", 6).edges
    named = str(tmp_path / "named.graphml")
    networkx.write_graphml(networkx.DiGraph([("b", "a"), ("a", "c"), ("c", "b")]), named)
    assert graphs.load(named, 3).edges == ((0, 2), (1, 0), (2, 1))
    listed = tmp_path / "x.edges"
    listed.write_text("# a comment\n0 1\n1 2\n2 0\n")
    assert graphs.load(str(listed), 3).edges == ((0, 1), (1, 2), (2, 0))
    (tmp_path / "bad.graphml").write_text("<graphml")
    with pytest.raises(graphs.ConfigError, match="cannot be read"):
        graphs.load(str(tmp_path / "bad.graphml"), 3)


def test_the_command_draws_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg = tmp_path / "g.svg"
    assert cli.run(["graph", "hierarchical", "--workers", "8", "--machines", "4:2:2", "--svg", str(svg)]) == 0
    out = capsys.readouterr().out
    assert "8 peers, 22 edges, in-degree 1 to 5" in out
    assert "Metropolis" in out
    assert "without self-loops: 0.2682" in out
    assert "with self-loops: 0.1010" in out
    assert svg.read_text().count("<line") == 11


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("graph", "name a graph (known: ring"),
        ("graph rong", "unknown graph 'rong', did you mean 'ring'?"),
        ("graph ring --workers 0", "workers=0 is out of range"),
        ("graph hierarchical --machines 4:x", "--machines 4:x is not a list of whole numbers"),
        ("graph ring --svg no/such/x.svg", "--svg no/such/x.svg: the folder"),
    ],
)
def test_bad_input_gets_one_line(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(line.split()) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_drawings_have_every_peer_and_edge() -> None:
    graph = graphs.load("exponential", 12)
    text = "\n".join(in_terminal(graph))
    assert all(str(peer) in text for peer in range(12))
    drawn = as_svg(graph, "t")
    assert drawn.count("<circle") == 12
    assert drawn.count("marker-end") == len([edge for edge in graph.edges if edge[::-1] not in graph.edges])
