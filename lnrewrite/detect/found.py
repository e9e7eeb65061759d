"""What recognition hands to detection: one norm of an operator graph."""

from __future__ import annotations

from dataclasses import dataclass

from ..stream import Norm


@dataclass(frozen=True, slots=True)
class Found:
    """Hold one norm of a graph: `source` is what it normalises along `axis`, `output` its value, `members` its ops."""

    norm: Norm
    source: str
    output: str
    members: frozenset[str]
    axis: int = -1
