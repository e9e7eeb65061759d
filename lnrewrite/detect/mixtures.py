"""Refuse mixtures over depth: sums that take up earlier states or branches again, each by a weight of its own.

ELC-BERT (arXiv 2311.02265) and DenseFormer (2402.02622) weigh them by stored numbers, MUDDFormer (2502.12170) by
numbers that are computed for each token. No stream of blocks is like that: what is carried on is every state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ..errors import Code, Refusal
from .graph import CASTS, SHAPE, OpGraph
from .joins import Join, flattens, same_shape, scaled, summands

CONTRACT = frozenset({"mul", "einsum", "tensordot", "matmul", "mm", "bmm"})


def mixtures(graph: OpGraph, joins: Sequence[Join], whole: Collection[str] = ()) -> Iterator[Refusal]:
    """Yield a refusal for each mixture that a stream is carried on by; `joins` are all sums, inner ones too."""
    states = {name for j in joins for name in (j.root, j.total)}
    carried = {name for j in joins for name in _behind(graph, j.root)}
    before: list[tuple[str, set[str]]] = []
    for op in graph:
        if op.name not in carried:
            continue
        if op.kind == "add" and len(op.data) == 2 and op.name not in whole and not flattens(graph, op.name, whole):
            held = [t for t, _ in summands(graph, op.name, whole) if same_shape(graph, t, op.name)]
            stored = {base for t in held if (base := _stored(graph, t)) != t}
            again = next((total for total, taken in before if len(taken & stored) > 1), "")
            before += [(op.name, stored)] * (len(stored) > 1)
            computed = {base for t in held if (base := _computed(graph, t)) in states}
        elif op.kind in CONTRACT:
            again, computed = "", _stacked(graph, op.name, states)
            if any(n in graph.constant for n in op.data):
                again, computed = (op.name if computed else ""), set()
        else:
            continue
        if again:
            why = f"{op.name} takes up earlier states again, by stored weights (as ELC-BERT and DenseFormer do)"
            yield Refusal(Code.LN202, op.name, why)
        elif len(computed) > 1:
            why = "mixes earlier states by weights computed from the data (as MUDDFormer does, arXiv 2502.12170)"
            yield Refusal(Code.LN203, op.name, f"{op.name} {why}")


def _behind(graph: OpGraph, root: str) -> Iterator[str]:
    """Yield a state, and what a contraction gives that it is a view of."""
    yield root
    while graph[root].kind in SHAPE | CASTS | {"sum"} and graph[root].data:
        root = graph[root].data[0]
        yield root


def _stored(graph: OpGraph, term: str) -> str:
    """Return what stored factors of a term are applied to."""
    while graph[term].kind in {"mul", "div"} and (inner := scaled(graph, term)) is not None:
        term = inner
    return term


def _computed(graph: OpGraph, term: str) -> str:
    """Return what a number for each token, computed from data, multiplies; empty for other terms."""
    op = graph[term]
    if op.kind != "mul" or len(op.data) != 2:
        return ""
    for value, weight in (op.data, op.data[::-1]):
        narrow = weight not in graph.constant and graph.width(weight) == 1 and len(graph[weight].shape or ()) > 1
        if narrow and same_shape(graph, value, term):
            return value
    return ""


def _stacked(graph: OpGraph, name: str, states: Collection[str]) -> set[str]:
    """Return the states that an operand puts side by side along an axis of their own, where it is two or more."""
    for operand in graph[name].data:
        while graph[operand].kind in SHAPE | CASTS and graph[operand].data:
            operand = graph[operand].data[0]
        op, found = graph[operand], set[str]()
        for part in op.data if op.kind in {"cat", "stack"} else ():
            while part not in states and graph[part].kind in SHAPE | CASTS and graph[part].data:
                part = graph[part].data[0]
            found |= {part} if part in states and len(graph[part].shape or ()) < len(op.shape or ()) else set()
        if len(found) > 1:
            return found
    return set()
