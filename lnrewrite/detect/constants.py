"""Find what stored numbers alone decide: weights, gains and factors that are computed, and factors that may be idle."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ..ir import Gate
from .edges import PRODUCTS, parameter, parameter_behind, whole_vector
from .graph import Op, Operand, OpGraph
from .match import NormMatch

PLAIN = frozenset({"float64", "float32", "float16", "bfloat16"})
"""How numbers are stored that are no codes of others."""


def computed(graph: OpGraph, norms: Collection[NormMatch]) -> Iterator[str]:
    """Yield what parameters alone decide and something else reads: weights of linear maps, vectors and numbers.

    Whatever computes them; they can be computed once and stored. Tables that an input's size cuts are none of them. Of
    norms, gains and biases alone: by what is stored of a batch norm it is known.
    """
    members = frozenset[str]().union(*(n.members for n in norms))
    gains = {name for n in norms if n.norm.computed for name in (n.norm.gamma, n.norm.beta)}
    for op in graph:
        for place, name in enumerate(op.inputs if op.name not in graph.constant else ()):
            if not isinstance(name, str) or name not in graph.fixed & graph.learned or graph[name].dtype not in PLAIN:
                continue
            if op.name in members and name not in gains:
                continue
            weight = place in (1, 2) and op.kind in PRODUCTS | {"linear", "conv"} and len(graph[name].shape or ()) > 1
            held = parameter(graph, name, -1) if weight else whole_vector(graph, name) or parameter_behind(graph, name)
            if (weight or _flat(graph[name])) and held is None:
                yield name


def gates(graph: OpGraph, norms: Collection[NormMatch]) -> Iterator[Gate]:
    """Yield the products with a constant that may be 1, and the sums with a term times one that may be 0.

    The gains of norms are none but where they shut a term, nor is a number that the model's code spells out and
    multiplies by.
    """
    members = frozenset[str]().union(*(n.members for n in norms))
    shut = {n.output: n.norm.gamma for n in norms if n.norm.gamma and not (n.norm.beta or n.norm.plus_one)}
    for op in graph:
        if op.name in graph.constant or op.name in members or len(op.inputs) != 2:
            continue
        if op.kind in {"mul", "div"}:
            stored = (
                (kept, by) for kept, by in _products(graph, op) if isinstance(by, str) and _alike(graph, kept, op)
            )
            yield from (Gate(op.name, kept, by, 1.0) for kept, by in stored)
        elif op.kind == "add":
            for kept, term in (op.inputs, op.inputs[::-1]):
                if isinstance(kept, str) and isinstance(term, str) and _alike(graph, kept, op):
                    yield from (Gate(op.name, kept, by, 0.0) for by in _factors(graph, term, members, shut))


def _products(graph: OpGraph, op: Op) -> Iterator[tuple[str, str | float]]:
    """Yield (value, constant factor) of a product, or of a quotient by a constant."""
    for kept, by in (op.inputs, op.inputs[::-1])[: 1 if op.kind == "div" else 2]:
        number = isinstance(by, (int, float)) or (isinstance(by, str) and by in graph.fixed and _flat(graph[by]))
        if isinstance(kept, str) and kept not in graph.constant and number:
            yield kept, by if isinstance(by, str) else float(by or 0)


def _factors(graph: OpGraph, term: str, members: Collection[str], gains: Mapping[str, str]) -> Iterator[str | float]:
    """Yield the constants that multiply a term of a sum; `gains` are those of norms, by what these give."""
    op = graph[term]
    while op.kind == "mul" and op.name not in graph.constant and op.name not in members and len(op.inputs) == 2:
        found = list(_products(graph, op))
        yield from (by for _, by in found)
        if len(found) != 1:
            return
        op = graph[found[0][0]]
    if op.name in gains:
        yield gains[op.name]


def _alike(graph: OpGraph, name: Operand, op: Op) -> bool:
    """Return whether a value could stand for what an op gives: of its shape and type."""
    held = graph[name] if isinstance(name, str) else op
    return held.name not in graph.constant and held.dtype == op.dtype and held.shape == op.shape is not None


def _flat(op: Op) -> bool:
    """Return whether a value is one number, or one for each place of one axis."""
    return op.shape is not None and sum(d != 1 for d in op.shape) <= 1
