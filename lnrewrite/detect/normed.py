"""A graph in which every recognized norm is one step: the walks between sums that detection is made of."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Mapping
from operator import itemgetter

from .edges import moved
from .graph import CASTS, SHAPE, OpGraph
from .joins import scaled
from .match import NormMatch

PASSING = SHAPE | CASTS | {"dropout", "gather"}
"""Operators behind which a value is still the one it was."""


class NormedGraph:
    """Hold a graph with its norms: `norms` by the node of their output, `inside` the output by each member."""

    def __init__(self, graph: OpGraph, norms: Mapping[str, NormMatch]) -> None:
        self.graph, self.norms = graph, norms
        self.inside = {member: match.output for match in norms.values() for member in match.members}
        self._ordered = sorted(((graph.index[o], match) for o, match in norms.items()), key=itemgetter(0))

    def within(self, start: str, end: str) -> list[NormMatch]:
        """Return the norms whose outputs come after one node and no later than another."""
        first, last = (bisect_right(self._ordered, self.graph.index[n], key=itemgetter(0)) for n in (start, end))
        return [match for _, match in self._ordered[first:last]]

    def after(self, state: str) -> NormMatch | None:
        """Return the first norm that reads a value, straight or through casts, slices, reshapes and tokens' sizes."""
        todo = [state]
        while todo:
            name = todo.pop(0)
            for user in self.graph.users[name]:
                if user == "output":
                    continue
                if user in self.inside:
                    return self.norms[self.inside[user]]
                if self.graph[user].kind in PASSING or self.divided(user) == name:
                    todo.append(user)
        return None

    def spans(self, norm: NormMatch, state: str, axis: int) -> bool:
        """Return whether a norm reads as many channels together as a state has along an axis."""
        return self.graph.width(norm.source, norm.axis) == self.graph.width(state, axis)

    def before(self, name: str) -> str | None:
        """Return what a value is made of by a shape, a cast, a constant factor or tokens' sizes; None for other ops."""
        op = self.graph[name]
        if op.kind in PASSING and op.data:
            return op.data[0]
        return scaled(self.graph, name) or self.divided(name)

    def divided(self, name: str) -> str | None:
        """Return what is divided by one number per token that the graph computes; None for other ops, and in norms."""
        op = self.graph[name]
        if op.kind != "div" or len(op.data) != 2 or name in self.inside or op.data[1] in self.graph.constant:
            return None
        value, by = (self.graph[n].shape or () for n in op.data)
        pairs = list(zip(value[::-1], by[::-1], strict=False))
        apart = [-1 - i for i, (one, other) in enumerate(pairs) if one != other]
        channels = len(apart) == 1 and apart[0] in (-1, 1 - len(value)) and by[apart[0]] == 1
        return op.data[0] if channels and len(value) == len(by) else None

    def followed(self, name: str, axis: int, start: str) -> int | None:
        """Return where an axis of a value is in what it was made from by shapes, casts and factors; None where lost."""
        while name != start:
            if name in self.norms:
                name = self.norms[name].source
                continue
            op = self.graph[name]
            source = self.before(name)
            if source is None:
                return None
            if op.kind in SHAPE | {"gather"}:
                before = moved(self.graph, op, axis, back=True)
                if before is None:
                    return None
                axis = before
            name = source
        return axis

    def readers(self, name: str, region: Container[str]) -> list[str]:
        """Return what reads a value in a region, straight or through shapes and casts."""
        found, todo = list[str](), [name]
        while todo:
            for user in self.graph.users[todo.pop()]:
                if user in region:
                    passes = user not in self.inside and self.graph[user].kind in SHAPE | CASTS
                    (todo if passes else found).append(user)
        return found

    def kind(self, name: str) -> str:
        """Return what an operator is, in the words of a barrier."""
        return "an output" if name == "output" else "a norm" if name in self.inside else self.graph[name].kind
