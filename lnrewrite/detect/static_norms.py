"""Recognize what stands where norms stand but takes no statistics of its input, and norms of weights.

A power norm (and a batch norm written out) divides by stored numbers; dynamic tanh and erf squash; weight
standardization norms the weight of a linear map on its way there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ..ir import Kind, Norm
from .edges import PRODUCTS, parameter, parameter_behind
from .graph import CASTS, Op, OpGraph
from .match import NormMatch

ROOTS = {"sqrt": False, "rsqrt": True}
SPREADS = frozenset({"var", "std", "_native_batch_norm_legit", "batch_norm"})
SAME = CASTS | {"reshape", "expand"}
SQUASHES = {"tanh": Kind.TANH, "erf": Kind.ERF}


def stored(graph: OpGraph, op: Op) -> NormMatch | None:
    """Return a norm by stored numbers: x / sqrt(v + eps) for a parameter v of one number per channel.

    Centered by stored numbers too it is a batch norm written out, else a power norm.
    """
    for value, other in ((op.inputs[0], op.inputs[1]), (op.inputs[1], op.inputs[0])):
        if not isinstance(value, str) or value in graph.constant or not isinstance(other, str):
            continue
        axes = (-1, 1 - len(graph[value].shape or ()))
        axis = next((a for a in axes if graph.is_channel_vector(other, graph.width(value, a), a)), None)
        spread = _spread(graph, other, inverse=op.kind == "mul") if axis is not None else None
        if axis is None or spread is None:
            continue
        variance, eps = spread
        before = graph[value]
        held, source = _vector(graph, before, axis) if graph.users[value] == (op.name,) else (None, "")
        if held and before.kind == "sub" and before.inputs[0] == source:
            norm = Norm(Kind.BATCH, eps, mean=held, variance=variance, axis=axis)
        else:
            held = held if before.kind == "mul" else None
            norm = Norm(Kind.POWER, eps, held, variance=variance, axis=axis)
        start, members = (source, {value, op.name}) if held else (value, {op.name})
        return NormMatch(norm, start, op.name, frozenset(members))
    return None


def _vector(graph: OpGraph, op: Op, axis: int) -> tuple[str | None, str]:
    """Return the parameter of one number per channel among an op's two operands, and the other operand."""
    for one, two in (op.inputs[:2], op.inputs[1::-1]) if len(op.data) == 2 else ():
        if isinstance(two, str) and graph.is_channel_vector(one, graph.width(op.name, axis), axis):
            return parameter_behind(graph, one), two
    return None, ""


def _spread(graph: OpGraph, name: str, inverse: bool) -> tuple[str, float] | None:
    """Return (v, eps) for a constant that is computed as sqrt(v + eps), or as its inverse."""
    op = graph[name]
    while op.kind in SAME or (op.kind == "reciprocal" and inverse):
        inverse = inverse != (op.kind == "reciprocal")
        op = graph[op.data[0]]
    if ROOTS.get(op.kind) is not inverse:
        return None
    total = graph[op.data[0]]
    while total.kind in SAME:
        total = graph[total.data[0]]
    eps = next((float(i) for i in total.inputs if isinstance(i, (int, float))), None)
    held = parameter_behind(graph, total.data[0]) if total.kind == "add" and len(total.data) == 1 else None
    return (held, eps) if held and eps is not None and 0 <= eps < 0.1 else None


def squashed(graph: OpGraph, op: Op) -> NormMatch | None:
    """Return gamma * tanh(a x) or gamma * erf(a x + s) for stored numbers; without a gain it is an activation."""
    inner, members = graph[op.data[0]] if op.data else op, {op.name}
    while inner.kind in {"add", "mul"} and len(inner.inputs) == 2:
        value = next((n for n in inner.data if n not in graph.constant), None)
        if value is None or not any(graph.is_scalar(n) for n in inner.inputs):
            return None
        members.add(inner.name)
        if inner.kind == "mul":
            return _gained(graph, op, value, members)
        inner = graph[value] if op.kind == "erf" else op
    return None


def _gained(graph: OpGraph, op: Op, value: str, members: set[str]) -> NormMatch | None:
    """Return the norm that ends in this op where a gain of one number per channel follows."""
    gain = graph.reader(op.name)
    while gain is not None and gain.kind in CASTS:
        gain = graph.reader(gain.name)
    for axis in (-1, 1 - len(op.shape or ())) if gain and gain.kind == "mul" else ():
        if gain and _vector(graph, gain, axis)[0]:
            return NormMatch(Norm(SQUASHES[op.kind], 0.0, axis=axis), value, op.name, frozenset(members))
    return None


def centered(graph: OpGraph, taken: Collection[str]) -> Iterator[NormMatch]:
    """Yield what has its own mean taken off, outside of the norms, whose members are `taken`."""
    for op in graph:
        source, mean = op.inputs if op.kind == "sub" and len(op.data) == 2 and op.name not in taken else ("", "")
        if not (isinstance(source, str) and isinstance(mean, str) and mean) or source in graph.constant:
            continue
        inner, rank = graph[mean], len(graph[source].shape or ())
        own = inner.kind == "mean" and inner.data == (source,) and inner.axes and len(inner.axes) == 1
        if own and inner.axes and inner.attrs["keepdim"] and graph.users[mean] == (op.name,):
            axis = inner.axes[0] - rank if inner.axes[0] >= 0 else inner.axes[0]
            if axis in (-1, 1 - rank) and graph.width(source, axis):
                yield NormMatch(Norm(Kind.CENTERED, 0.0, axis=axis), source, op.name, frozenset({mean, op.name}))


def standardized(graph: OpGraph) -> Iterator[NormMatch]:
    """Yield the weights of linear maps that are scaled by their own spread before they are used."""
    for op in graph:
        weight = op.inputs[1] if op.kind in PRODUCTS | {"linear", "conv"} and len(op.inputs) > 1 else None
        if isinstance(weight, str) and weight in graph.constant and parameter(graph, weight, -1) is None:
            ops = _behind(graph, weight)
            held = [o.name for o in ops if o.kind == "param" and len(o.shape or ()) > 1]
            if held and SPREADS & {o.kind for o in ops}:
                eps = [float(i) for o in ops for i in o.inputs if isinstance(i, float) and 0 < i < 0.1]
                members = frozenset(o.name for o in ops if o.kind != "param")
                yield NormMatch(Norm(Kind.WEIGHT, min(eps, default=0.0)), held[0], weight, members)


def _behind(graph: OpGraph, name: str) -> list[Op]:
    """Return the ops that a constant is computed by, parameters included."""
    found, todo = dict[str, Op](), [name]
    while todo:
        op = found.setdefault(name := todo.pop(), graph[name])
        todo += [n for n in op.data if n not in found]
    return list(found.values())
