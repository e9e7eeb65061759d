"""Find the constant factors that stand alone on a straight piece of graph: residual multipliers, LayerScale, gates."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from ..ir import Scale
from .edges import moved
from .graph import CASTS, SHAPE, Op, Operand, OpGraph


@dataclass(frozen=True, slots=True)
class Straight:
    """Hold a straight piece of graph: its factors in dataflow order, and the value (with its axis) that begins it."""

    scales: tuple[Scale, ...]
    value: str
    axis: int


def back(graph: OpGraph, value: str, axis: int, at: str, stop: Container[str]) -> Straight:
    """Walk back from a value that one thing reads to the first op that is more than a factor, a cast or a shape."""
    found: list[Scale] = []
    while value not in stop:
        op = graph[value]
        if op.kind in CASTS | {"dropout"} and op.data:
            source, place = op.data[0], axis
        elif op.kind in SHAPE and (before := moved(graph, op, axis, back=True)) is not None:
            source, place = op.data[0], before
        elif (step := factor(graph, op, axis, at)) is not None:
            source, place = step[0], axis
            found.insert(0, step[1])
        else:
            return Straight(tuple(found), value, axis)
        if len(graph.users[source]) != 1 or source in graph.constant:
            if op.kind in {"mul", "div"}:
                found.pop(0)
            return Straight(tuple(found), value, axis)
        value, axis = source, place
    return Straight(tuple(found), value, axis)


def onward(graph: OpGraph, value: str, axis: int, at: str) -> Iterator[Scale]:
    """Yield the factors between a value and its first other use, while it has one reader."""
    while (op := graph.reader(value)) is not None:
        step = factor(graph, op, axis, at)
        if step is not None:
            yield step[1]
        elif op.kind not in CASTS | {"dropout"}:
            return
        value = op.name


def factor(graph: OpGraph, op: Op, axis: int, at: str) -> tuple[str, Scale] | None:
    """Return (what is scaled, the factor) for a product with, or a quotient by, something constant; else None."""
    if op.kind not in {"mul", "div"} or len(op.inputs) < 2:
        return None
    for value, other in ((op.inputs[0], op.inputs[1]), (op.inputs[1], op.inputs[0])):
        if not isinstance(value, str) or value in graph.constant or (op.kind == "div" and value != op.inputs[0]):
            continue
        while isinstance(other, str) and graph[other].kind == "expand" and graph[other].data:
            other = graph[other].data[0]
        vector = graph.is_channel_vector(other, graph.width(op.name, axis), axis)
        if vector or graph.is_scalar(other):
            return value, _scale(graph, other, op, at, vector)
    return None


def _scale(graph: OpGraph, by: Operand, op: Op, at: str, vector: bool) -> Scale:
    inverse = op.kind == "div"
    if not isinstance(by, str):
        return Scale(at, float(by or 0), inverse=inverse, node=op.name)
    source = graph[by]
    while source.kind in CASTS | {"reshape", "expand"} and source.data:
        source = graph[source.data[0]]
    if source.kind == "param":
        return Scale(at, str(source.attrs["param"]), vector, inverse, node=op.name)
    return Scale(at, by, vector, inverse, computed=True, node=op.name)
