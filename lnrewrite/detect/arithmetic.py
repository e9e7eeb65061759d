"""Run small pieces of an operator graph in float64: the judge of whether a piece computes what it seems to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import erf

import numpy as np
from numpy.typing import NDArray

from .graph import Op, OpGraph

Floats = NDArray[np.float64]


class Unknown(Exception):
    """Signal that an operator cannot be run here."""


def _mean(op: Op, x: Floats) -> Floats:
    return np.asarray(np.mean(x, axis=op.axes, keepdims=bool(op.attrs["keepdim"])))


def _sum(op: Op, x: Floats) -> Floats:
    return np.asarray(np.sum(x, axis=op.axes, keepdims=bool(op.attrs["keepdim"])))


def _var(op: Op, x: Floats) -> Floats:
    found = np.var(x, axis=op.axes, keepdims=bool(op.attrs["keepdim"]), ddof=op.number("correction"))
    return np.asarray(found)


def _vector_norm(op: Op, x: Floats) -> Floats:
    if op.attrs["ord"] not in (2, 2.0):
        raise Unknown(f"norm of order {op.attrs['ord']}")
    return np.sqrt(_sum_square(op, x))


def _permute(op: Op, x: Floats) -> Floats:
    if "swap" in op.attrs:
        one, other = op.numbers("swap")
        return np.swapaxes(x, one, other)
    return np.transpose(x, op.numbers("order"))


def _reshape(op: Op, x: Floats) -> Floats:
    """Reshape to the recorded shape; symbolic axes keep the size they have in front."""
    if op.shape is None:
        raise Unknown("a reshape to an unknown shape")
    shape = [d if isinstance(d, int) else -1 for d in op.shape]
    if shape.count(-1) > 1:
        if any(isinstance(d, str) and d.startswith("?") for d in op.shape):
            raise Unknown("a reshape to several sizes that nothing is known of")
        shape = [x.shape[i] if d == -1 and i < x.ndim else d for i, d in enumerate(shape)]
    kept = [d for d in x.shape if d != 1]
    if -1 not in shape and np.prod(shape) != x.size and len(kept) == sum(d != 1 for d in shape):
        rest = iter(kept)  # fewer rows are tried than the graph was made for; axes of one come and go
        shape = [1 if d == 1 else next(rest) for d in shape]
    return np.reshape(x, shape)


def _expand(op: Op, x: Floats) -> Floats:
    """Repeat as recorded where all sizes are; others broadcast by themselves, and fewer rows may be tried."""
    shape = [d for d in op.shape or () if isinstance(d, int)]
    fits = len(shape) == len(op.shape or ()) >= np.ndim(x)
    fits = fits and all(a in (1, b) for a, b in zip(np.shape(x)[::-1], shape[::-1], strict=False))
    return np.broadcast_to(x, shape) if fits else x


def _batch_norm(op: Op, x: Floats, gain: Floats | None, bias: Floats | None, mean: Floats, variance: Floats) -> Floats:
    """Normalize axis 1 by stored statistics."""
    shape = [1, -1] + [1] * (x.ndim - 2)
    y = (x - mean.reshape(shape)) / np.sqrt(variance.reshape(shape) + op.number("eps"))
    y = y if gain is None else y * gain.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def _slice(op: Op, x: Floats) -> Floats:
    place, axis = op.attrs.get("at"), int(op.number("axis"))
    if op.attrs.get("cut") is not None:
        return np.moveaxis(np.moveaxis(x, axis, 0)[slice(*op.numbers("cut"))], 0, axis)
    if not isinstance(place, int):
        raise Unknown("a slice of unknown place")
    return np.asarray(np.take(x, place, axis))


def _clamp(op: Op, x: Floats, low: Floats | float | None, high: Floats | float | None) -> Floats:
    x = x if low is None else np.maximum(x, low)
    return x if high is None else np.minimum(x, high)


def _vecdot(op: Op, a: Floats, b: Floats) -> Floats:
    return np.asarray((a * b).sum(int(op.number("axis"))))


def _sum_square(op: Op, x: Floats) -> Floats:
    return _sum(op, x * x)


RUN: dict[str, Callable[..., Floats]] = {
    "add": lambda op, a, b: a + b, "sub": lambda op, a, b: a - b, "mul": lambda op, a, b: a * b,
    "rsub": lambda op, a, b: b - a, "div": lambda op, a, b: a / b, "neg": lambda op, a: -a,
    "pow": lambda op, a, b: np.power(a, b), "square": lambda op, a: a * a, "sqrt": lambda op, a: np.sqrt(a),
    "rsqrt": lambda op, a: 1 / np.sqrt(a), "reciprocal": lambda op, a: 1 / a, "abs": lambda op, a: np.abs(a),
    "exp": lambda op, a: np.exp(a), "sigmoid": lambda op, a: 1 / (1 + np.exp(-a)), "tanh": lambda op, a: np.tanh(a),
    "erf": lambda op, a: np.vectorize(erf, otypes=[np.float64])(a), "atan": lambda op, a: np.arctan(a),
    "softsign": lambda op, a: a / (1 + np.abs(a)), "clamp": _clamp,
    "clamp_min": lambda op, a, b: np.maximum(a, b), "maximum": lambda op, a, b: np.maximum(a, b),
    "cast": lambda op, a: a, "expand": _expand, "mean": _mean, "sum": _sum, "var": _var,
    "std": lambda op, a: np.sqrt(_var(op, a)), "vector_norm": _vector_norm, "permute": _permute,
    "sum_square": _sum_square, "reshape": _reshape, "slice": _slice, "batch_norm": _batch_norm,
    "matmul": lambda op, a, b, c=None: a @ b if c is None else a @ b + c, "mm": lambda op, a, b: a @ b,
    "mv": lambda op, a, b: a @ b, "dot": lambda op, a, b: a @ b, "vdot": lambda op, a, b: a @ b, "vecdot": _vecdot,
    "einsum": lambda op, *each: np.asarray(np.einsum(str(op.attrs["equation"]), *each)),
    "log": lambda op, a: np.log(a), "hypot": lambda op, a, b: np.hypot(a, b),
}  # fmt: skip


def closure(graph: OpGraph, start: str, end: str, limit: int = 40) -> list[Op] | None:
    """Return the ops that compute `end` from `start` and constants alone, in order; None where more is needed."""
    seen: set[str] = set()
    todo = [end]
    while todo:
        name = todo.pop()
        if name == start or name in seen or name in graph.constant:
            continue
        op = graph[name]
        if op.kind == "input" or len(seen) >= limit or graph.index[name] < graph.index[start]:
            return None
        seen.add(name)
        todo += op.data
    return [graph[n] for n in sorted(seen, key=graph.index.__getitem__)]


def constants(graph: OpGraph, ops: Iterable[Op]) -> list[str]:
    """Return the constant nodes that `ops` read directly."""
    return list(dict.fromkeys(n for op in ops for n in op.data if n in graph.constant))


def affine(graph: OpGraph, start: str, end: str, axis: int, read: Callable[[str], Floats]) -> tuple[Floats, Floats]:
    """Return (a, s), one number per channel each, of a piece that computes a x + s along an axis; Unknown where not."""
    ops = closure(graph, start, end)
    if ops is None:
        raise Unknown(end)
    values = {n: read(str(graph[n].attrs.get("param", n))) for n in constants(graph, ops)}
    shape = [1] * len(graph[start].shape or ())
    shape[axis] = graph.width(start, axis)
    at = [run(ops, {**values, start: np.full(shape, x)}, end).reshape(-1) for x in (0.0, 1.0)]
    return at[1] - at[0], at[0]


def computed(op: Op, inputs: Iterable[object]) -> Floats:
    """Return what an operator gives for its inputs. Raise Unknown where it has no rule, or too little is known."""
    if op.kind not in RUN:
        raise Unknown(op.kind)
    try:
        return RUN[op.kind](op, *inputs)
    except (KeyError, ValueError, TypeError, IndexError) as lacks:  # an attribute, or sizes that nobody tells
        raise Unknown(f"{op.kind}: {lacks}") from lacks


def run(ops: Iterable[Op], values: Mapping[str, Floats], end: str) -> Floats:
    """Run `ops` on float64 `values` and return the value of `end`. Raise Unknown where too little is known."""
    known = dict(values)
    with np.errstate(all="ignore"):  # what is no number agrees with nothing
        for op in ops:
            known[op.name] = computed(op, [known[i] if isinstance(i, str) else i for i in op.inputs])
    return np.asarray(known[end], dtype=np.float64)
