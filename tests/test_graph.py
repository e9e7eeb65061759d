"""The neutral graph's reachability, and what detection asks of it, against networkx.

`OpGraph.reaches` answers from bitsets of chains, some thousand times faster than a search; one detection asks it
70,000 times of a model with 126 layers. The library's searches are the judge of what it answers; dominators, which
are asked of one branch at a time, are the library's own, and removing a node is their judge.
"""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lnrewrite.detect import sites
from lnrewrite.detect.detection import detect
from lnrewrite.detect.graph import Op, OpGraph
from lnrewrite.detect.joins import WEIGHTED
from lnrewrite.detect.match import NormMatch
from zoo import CASES, FAMILIES, graphs

FROZEN = [name for name in (*CASES, *FAMILIES) if graphs.path(name).exists()]


def drawn(graph: OpGraph) -> nx.DiGraph:
    """Return the graph as the library's: an edge from each node to each that reads it."""
    edges = nx.DiGraph([(name, op.name) for op in graph for name in op.data])
    edges.add_nodes_from(graph.ops)
    return edges


@st.composite
def acyclic(draw: st.DrawFn) -> OpGraph:
    """Make up a graph of up to 14 nodes: chains, joins, leaves and nodes that nothing reads."""
    ops: dict[str, Op] = {}
    for i in range(draw(st.integers(1, 14))):
        read = draw(st.lists(st.sampled_from(list(ops)), max_size=3)) if ops else []
        ops[f"n{i}"] = Op(f"n{i}", "add", tuple(read))
    return OpGraph(ops, {}, tuple(draw(st.lists(st.sampled_from(list(ops)), max_size=2))))


@given(acyclic())
def test_reaches_and_between_are_what_a_search_finds(graph: OpGraph) -> None:
    edges = drawn(graph)
    for start in graph.ops:
        after = nx.descendants(edges, start) | {start}
        assert {end for end in graph.ops if graph.reaches(start, end)} == after
        for end in graph.ops:
            paths = after & (nx.ancestors(edges, end) | {end}) - {start}
            between = [op.name for op in graph.between(start, end)]
            assert set(between) == (paths if end in after else set())
            assert between == sorted(between, key=graph.index.__getitem__)


def test_ops_stand_in_topological_order() -> None:
    for name in FROZEN:
        graph = graphs.read(name)
        assert nx.is_directed_acyclic_graph(drawn(graph)), name
        assert all(graph.index[read] < graph.index[op.name] for op in graph for read in op.data), name


def test_an_inner_norm_is_on_the_main_path_where_it_dominates_the_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that the branch's end sees past a norm makes the norm's gain one of several: no fold may take it."""
    asked = dict[bool, int]()

    def both(self: sites.Sites, match: NormMatch, branch: str) -> bool:
        found = own(self, match, branch)
        assert found is dominates(self, match, branch), (match.output, branch)
        asked[found] = asked.get(found, 0) + 1
        return found

    own = sites.Sites.dominates
    monkeypatch.setattr(sites.Sites, "dominates", both)
    for name in FROZEN:
        detect(graphs.read(name))
    assert min(asked[True], asked[False]) > 100


def dominates(asker: sites.Sites, match: NormMatch, branch: str) -> bool:
    """Return whether a branch's end is out of reach, without the norm, of its source and of what went past weights."""
    graph = asker.graph
    if not graph.reaches(match.output, branch):
        return False
    states = {join.root for join in asker.joins}
    edges = drawn(graph)
    edges.remove_nodes_from(graph.constant)
    edges.remove_edges_from([edge for state in states & set(edges) for edge in edges.in_edges(state)])
    heavy = [n for n in edges if graph[n].kind in WEIGHTED and not graph.reaches(match.output, n)]
    edges.remove_node(match.output)
    return not any(nx.has_path(edges, start, branch) for start in (*heavy, match.source) if start in edges)
