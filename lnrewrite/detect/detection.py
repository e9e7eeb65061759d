"""Detect: recognize norms, find residual sums, chain them into streams, and say where each block's norms sit.

Inside a branch, a norm of the trunk value is an `in` norm and a norm that the branch ends in is an `out` norm; a norm
between two sums is a trunk norm (`post`). What was found is computed once and handed on whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ..ir import Network
from .chains import chains
from .constants import computed, gates
from .graph import OpGraph
from .joins import find_joins, outermost
from .lookalikes import placed
from .match import NormMatch
from .misses import nearest_miss
from .mixtures import mixtures
from .naming import name_blocks, norm_names
from .normed import NormedGraph
from .norms import find_norms, stacked
from .recalls import find_recalls
from .sites import Sites
from .streams import stream


@dataclass(frozen=True, eq=False)
class Detection:
    """Hold what was found in one graph: the network, and the match of every norm by the node of its output."""

    network: Network
    norms: Mapping[str, NormMatch]

    @cached_property
    def names(self) -> dict[str, str]:
        """Return the name of every norm's site by the node of its output."""
        return norm_names(self.network)


def detect(graph: OpGraph) -> Detection:
    """Return what is found in a graph: streams, norms on no stream, and what is not understood."""
    norms, unknown = find_norms(graph)
    view = NormedGraph(graph, stacked(graph, norms))
    every, refusals = find_joins(graph, view.norms)
    recalls = find_recalls(graph, every, view.norms)
    joins = outermost(graph, [j for j in every if j.total not in recalls], refusals)
    refusals = refusals or [r for r in mixtures(graph, every, view.norms) if r.site not in recalls]
    sites = Sites(view, [] if refusals else joins)
    streams = name_blocks(tuple(stream(sites, chain, i) for i, chain in enumerate(chains(view, sites.joins, recalls))))
    if not streams and not refusals:
        refusals = [nearest_miss(graph)]
    elsewhere = sites.elsewhere()
    skips = {op.name for join in joins for op in graph.between(join.root, join.skip)}  # barriers tell of these
    odd = (placed(graph, row, streams) for row in unknown if row.site not in skips)
    held = tuple(dict.fromkeys(computed(graph, norms.values()))), tuple(gates(graph, norms.values()))
    return Detection(Network(streams, elsewhere, (*odd, *refusals), *held), norms)
