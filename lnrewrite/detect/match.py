"""A norm that was recognized: what it is, and which nodes of the graph compute it."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import Norm


@dataclass(frozen=True, slots=True)
class NormMatch:
    """Hold one norm of a graph: `source` is what it normalizes, `output` its value, `members` its ops."""

    norm: Norm
    source: str
    output: str
    members: frozenset[str]

    @property
    def axis(self) -> int:
        """Return the channels' place in the source, counted from the end."""
        return self.norm.axis
