"""Detect: what is seen in a graph, computed once and handed on whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ..ir import Network
from .blocks import Detector
from .graph import OpGraph
from .match import NormMatch
from .naming import norm_names
from .norms import find_norms


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
    return Detection(Detector(graph, norms, unknown).network(), norms)
