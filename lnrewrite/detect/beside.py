"""Account for what a residual sum holds beside its branches: the factors on its skip, and every further term."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, replace

from ..ir import Barrier, Block, Linear, Scale, Side, Where
from .edges import moved, writers
from .graph import CASTS, SHAPE, OpGraph
from .joins import Join, scaled
from .scales import factor


@dataclass(frozen=True, slots=True)
class Skip:
    """Hold what stands between a trunk value and its sum: a number, stored factors, and what is neither."""

    number: float = 1.0
    scales: tuple[Scale, ...] = ()
    barriers: tuple[Barrier, ...] = ()


def skip_of(graph: OpGraph, join: Join, axis: int) -> Skip:
    """Return what a sum's skip goes through on its way from the root."""
    name, number = join.skip, 1.0
    scales: list[Scale] = []
    barriers: list[Barrier] = []
    while name != join.root:
        op = graph[name]
        if (step := factor(graph, op, axis, "skip")) is not None:
            source, scale = step
            if isinstance(scale.by, float):
                number = number / scale.by if scale.inverse else number * scale.by
            else:
                scales.insert(0, scale)
        else:
            source = scaled(graph, name) or op.data[0]
            before = moved(graph, op, axis, back=True) if op.kind in SHAPE else axis
            if before is None or op.kind not in SHAPE | CASTS | {"dropout"}:
                barriers.append(Barrier(Side.CARRIED, op.kind))
            axis = axis if before is None else before
        name = source
    return Skip(number, tuple(scales), tuple(barriers))


@dataclass(frozen=True, slots=True)
class Added:
    """Hold the further terms of a sum: the linears and tables that write them, the values passed, and barriers."""

    linears: tuple[Linear, ...] = ()
    path: frozenset[str] = frozenset()
    barriers: tuple[Barrier, ...] = ()


def added_to(graph: OpGraph, join: Join, axis: int) -> Added:
    """Return what writes the terms of a sum that are neither its skip nor its branches."""
    width = graph.width(join.total, axis)
    linears: list[Linear] = []
    barriers: list[Barrier] = []
    path: set[str] = set()
    for term in join.extras:
        edge = writers(graph, term, axis) if graph.width(term, axis) == width else None
        if edge is None or edge.others or not edge.linears or graph.reaches(join.root, term):
            op = graph[edge.others[0]] if edge and edge.others and edge.others[0] != "output" else graph[term]
            barriers.append(Barrier(Side.ADDED, op.kind))
        else:
            linears += edge.linears
            path |= edge.path
    return Added(tuple(linears), frozenset(path), tuple(barriers))


def counted_behind(graph: OpGraph, linear: Linear, path: Container[str], together: Container[str] = ()) -> Linear:
    """Count the places that a linear's values reach behind `path`: a table may be added to several sums.

    Those that are made `together` are one place.
    """
    named = {n for n in (linear.param, linear.bias) if n}
    nodes = [n for n in graph.parameters if graph[n].attrs["param"] in named]
    reached = [_reached(graph, n, path) for n in nodes]
    places = [{("", "") if user in together else (name, user) for name, user in found} for found in reached]
    return replace(linear, uses=max(map(len, places)))


def _reached(graph: OpGraph, name: str, path: Container[str]) -> frozenset[tuple[str, str]]:
    """Return who reads what behind `path`, each once however many ways lead there: slices are put together again."""
    users = graph.users[name]
    return frozenset[tuple[str, str]]().union(
        *(_reached(graph, user, path) if user in path else {(name, user)} for user in users)
    )


def told_apart(blocks: list[Block]) -> list[Block]:
    """Count a bare reader once for each block that it begins: an edit for one of them would be one for all."""
    begun = Counter(linear.node for block in blocks for linear in block.readers)

    def known(linear: Linear) -> Linear:
        return replace(linear, uses=max(linear.uses, begun[linear.node]))

    return [b if b.at(Where.IN) else replace(b, readers=tuple(map(known, b.readers))) for b in blocks]
