"""Describe norms at their sites: what reads each, what makes its input, and whether its branch has to pass it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import networkx as nx

from ..ir import Kind, Linear, Site, Where
from .edges import counted, readers, writers
from .joins import WEIGHTED, Join
from .match import NormMatch
from .modulation import modulation
from .normed import NormedGraph

START = "start"
"""The node before all others, where dominators are asked for."""


class Sites:
    """Describe the norms of a graph one by one; `used` are the outputs of those that have a site."""

    def __init__(self, view: NormedGraph, joins: Sequence[Join]) -> None:
        self.view, self.graph, self.joins = view, view.graph, joins
        self.used: set[str] = set()

    def site(self, where: Where, match: NormMatch, branch: str | None = None) -> Site:
        """Describe a norm; an inner norm that its branch does not have to pass (q and k norms) gets a tap."""
        self.used.add(match.output)
        graph, inner = self.graph, where is Where.INNER
        edge = readers(graph, match.output, match.axis)
        taps = tuple(dict.fromkeys("output" if o == "output" else graph[o].kind for o in edge.others))
        if branch and not self.dominates(match, branch):
            taps = (*taps, "off the branch's main path")
        width = graph.width(match.source, match.axis) if inner else 0
        writes = self.producers(match, width) if inner and match.norm.kind is not Kind.WEIGHT else ()
        origin = (match.source, *sorted(match.members - {match.output}, key=graph.index.__getitem__), match.output)
        reads = tuple(dict.fromkeys(counted(graph, linear) for linear in edge.linears))
        return Site(where, match.norm, reads, taps, writes, width, modulation(graph, match), origin)

    def elsewhere(self) -> tuple[Site, ...]:
        """Describe the norms that have no site yet."""
        left = [match for output, match in self.view.norms.items() if output not in self.used]
        return tuple(self.site(Where.INNER, match) for match in left)

    def producers(self, match: NormMatch, width: int) -> tuple[Linear, ...]:
        """Return the linears that make up all of a norm's input, where they serve nothing else."""
        made = writers(self.graph, match.source, match.axis, None, width, match.norm.kind is not Kind.BATCH)
        whole = not made.others and set(self.graph.users[match.source]) <= match.members
        return tuple(counted(self.graph, linear) for linear in made.linears) if whole else ()

    def dominates(self, match: NormMatch, branch: str) -> bool:
        """Return whether a norm dominates the branch's end: every path from its source, or past weights, takes it."""
        graph = self.graph
        if not graph.reaches(match.output, branch):
            return False
        flow: nx.DiGraph[str] = nx.DiGraph(self._flow(branch))
        past = [n for n in flow if graph[n].kind in WEIGHTED and not graph.reaches(match.output, n)]
        flow.add_edges_from((START, n) for n in (*past, match.source))
        above, node = nx.immediate_dominators(flow, START), branch
        while node not in (START, match.output):
            node = above.get(node, START)
        return node == match.output

    def _flow(self, end: str) -> Iterator[tuple[str, str]]:
        """Yield (read, reader) of all that a value is computed by, back to the states of streams and to constants."""
        states, seen, todo = {join.root for join in self.joins}, {end}, [end]
        while todo:
            reader = todo.pop()
            for read in self.graph[reader].data if reader not in states else ():
                if read not in self.graph.constant:
                    yield read, reader
                    todo += [] if read in seen else [read]
                    seen.add(read)
