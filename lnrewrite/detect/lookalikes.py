"""Notice what works as a norm and is none that is known, so that nobody takes a model for one without it.

Three shapes of arithmetic tell, whatever their spelling. A value is divided by a size of its own: a deviation, a
length, a mean square, over any axes and through any gates (EvoNorm, arXiv 2004.02967; a region's norm, arXiv
1911.10375; a gain computed from the value, arXiv 2510.22777). It goes through a map that saturates, with a learned
slope before it and a gain for each channel behind it (Derf, arXiv 2512.10938). Or its own mean is taken off it before
such a gain (a LayerNorm whose deviation was fixed, arXiv 2409.13710).

Weights that are divided by their plain sum (softmax, a router's) are shares, not a norm; a gate computed from a pooled
value divides by nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import numpy as np

from ..errors import Refusal
from ..ir import Stream
from .arithmetic import RUN, Floats, Unknown, closure, constants, run
from .edges import parameter_behind
from .graph import CASTS, SHAPE, Op, Operand, OpGraph
from .modulation import ACTIVATIONS

SHAPES = CASTS | SHAPE | {"dropout", "where", "masked_fill"}
EVEN = frozenset({"pow", "square", "abs"})
ALONG = SHAPES - {"slice"} | ACTIVATIONS | EVEN | {"clamp", "clamp_min", "neg", "sub", "rsub", "mul", "div"}
"""What makes each element of the same element: a value has its size from what it is made of."""
SCALAR = SHAPES | EVEN | {"neg", "add", "sub", "rsub", "mul", "clamp", "clamp_min", "maximum", "max_of_many", "sqrt"}
INVERSE = frozenset({"rsqrt", "reciprocal"})
SIZES = frozenset({"var", "std", "vector_norm", "linalg_norm", "sum_square", "reducel1"})
TOTALS = frozenset({"mean", "sum", "amax", "max", "cumsum", "reducemax", "averagepool"})
POOLS = ("avg_pool", "adaptive_avg_pool")
FAR = 1e8
LIKE = {
    "EvoNorm-B0 (arXiv 2004.02967)": {"maximum", "max_of_many"}, "SeeDNorm (arXiv 2510.22777)": {"tanh"},
    "EvoNorm-S0 (arXiv 2004.02967)": {"sigmoid", "silu"},
    "Region Norm (arXiv 1911.10375)": {"gt", "lt", "ge", "le"},
}  # fmt: skip
"""Published norms that have no kind here, by operators of which no norm above them in this list has one."""


def lookalikes(graph: OpGraph, taken: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (node, what it does) for each value that is normalised by none of the norms; these consist of `taken`."""
    seen = set(taken)
    for op in graph:
        if op.kind not in {"mul", "div"} or op.name in seen or op.name in graph.constant:
            continue
        if why := _sized(graph, op, seen) or _squashed(graph, op, seen) or _centered(graph, op, seen):
            seen.add(op.name)
            yield op.name, why


def placed(graph: OpGraph, odd: Refusal, streams: Iterable[Stream]) -> Refusal:
    """Return in which block of the streams such a value is, where it is in one."""
    held = (b for s in streams for b in s.blocks if graph.reaches(b.anchor.state, odd.site))
    block = next((b for b in held if graph.reaches(odd.site, b.anchor.branch)), None)
    return replace(odd, why=f"in block {block.name}, {odd.why}") if block else odd


def _sized(graph: OpGraph, op: Op, seen: Collection[str]) -> str:
    """Return by what size of its own a value is divided in this product or quotient, if it is."""
    value, factor = op.inputs[:2]
    for one, other in ((value, factor), (factor, value))[: 1 if op.kind == "div" else 2]:
        if not (isinstance(one, str) and isinstance(other, str)) or {one, other} & graph.constant:
            continue
        made = _along(graph, one, seen)
        for size in _divisors(graph, other, op.kind == "div", {name for name, _ in made} | set(seen)):
            users = graph.users[op.name]
            if _measures(graph, size, made) and not all(u in graph.ops and graph[u].kind == "round" for u in users):
                return f"{one} is divided by a size of its own, {size.name}{_like(graph, op, made, size)}"
    return ""


def _like(graph: OpGraph, op: Op, made: Collection[tuple[str, bool]], size: Op) -> str:
    """Return which published norm does what this one does beside dividing, by the operators that tell them apart."""
    start = min((name for name, _ in made), key=graph.index.__getitem__)
    between = graph.between(start, op.name)
    kinds = {o.kind for o in between}
    found = next((name for name, wanted in LIKE.items() if wanted & kinds), None)
    if any(o.kind == "mean" and size.name in o.data and size.kind in SIZES for o in between):
        found = "Global Response Norm (arXiv 2301.00808)"
    if size.kind == "sum" and any(_counted(graph, user) for user in graph.users[size.name]):
        found = "Region Norm (arXiv 1911.10375)"
    return f", as {found} does" if found else ""


def _counted(graph: OpGraph, name: str) -> bool:
    """Return whether a sum is divided here by how much of it there was, which data say."""
    by = graph[name].inputs[1] if name in graph.ops and graph[name].kind == "div" else None
    return isinstance(by, str) and by not in graph.constant


def _along(graph: OpGraph, name: str, seen: Collection[str]) -> set[tuple[str, bool]]:
    """Return what a value is made of, element by element, and whether of its size alone; no norm is looked behind."""
    found, todo = {(name, False)}, [(name, False)]
    while todo:
        name, even = todo.pop()
        op = graph[name]
        if op.kind in ALONG and name not in seen:
            new = {(n, even or _even(op)) for n in op.data if n not in graph.constant} - found
            found |= new
            todo += new
    return found


def _even(op: Op) -> bool:
    return op.kind in EVEN or (op.kind == "mul" and op.inputs[0] == op.inputs[1])


def _divisors(graph: OpGraph, name: str, inverse: bool, stop: Collection[str]) -> Iterator[Op]:
    """Yield the reductions that a factor divides by; `inverse`: it is a divisor itself."""
    todo, visited = [(name, inverse)], set[tuple[str, bool]]()
    while todo:
        name, inverse = state = todo.pop()
        op = graph[name]
        if state in visited or name in stop or name in graph.constant:
            continue
        visited.add(state)
        if _reduces(op):
            if inverse:
                yield op
            todo += [(n, inverse) for n in op.data if _reduces(graph[n])]
        elif op.kind == "div":
            todo += [(n, inverse != (i == 1)) for i, n in enumerate(op.inputs) if isinstance(n, str)]
        elif op.kind in INVERSE or (op.kind == "pow" and _negative(op.inputs[1])):
            todo += [(n, not inverse) for n in op.data]
        elif op.kind in SCALAR:
            todo += [(n, inverse) for n in op.data]


def _negative(exponent: Operand) -> bool:
    return isinstance(exponent, (int, float)) and exponent < 0


def _reduces(op: Op) -> bool:
    return op.kind in SIZES | TOTALS or op.kind.startswith(POOLS)


def _measures(graph: OpGraph, size: Op, made: Collection[tuple[str, bool]]) -> bool:
    """Return whether a reduction is a size of what a value is made of; of a value that is a size it is a total."""
    names = {name for name, _ in made}
    todo, visited = [(n, size.kind in SIZES) for n in size.data[:1]], set[tuple[str, bool]]()
    while todo:
        name, even = state = todo.pop()
        op = graph[name]
        if even and (name, False) in made:
            return True
        if name in names or state in visited or op.kind not in ALONG | {"slice"}:
            continue
        visited.add(state)
        todo += [(n, even or _even(op)) for n in op.data if n not in graph.constant]
    return False


def _squashed(graph: OpGraph, op: Op, seen: Collection[str]) -> str:
    """Return what goes through a saturating map with a learned slope before this gain of one number per channel."""
    value = _gained(graph, op)
    before, todo = set[str](), [value] if value else []
    while todo:
        inner = graph[todo.pop()]
        if inner.kind in RUN and inner.name not in seen and len(before) < 16:
            new = {n for n in inner.data if n not in graph.constant} - before
            before |= new
            todo += new
    for source in sorted(before, key=graph.index.__getitem__, reverse=True):
        ops = closure(graph, source, value, 16) if value else None
        if value and ops and _saturates(graph, source, value, ops, sloped=_slope(graph, source)):
            return f"{source} goes through a map that saturates, with a learned slope and a gain"
    return ""


def _slope(graph: OpGraph, name: str) -> bool:
    """Return whether a value is another one times a constant, and a shift at most."""
    op = graph[name]
    while op.kind in CASTS | {"add", "sub"} and len(onward := [n for n in op.data if n not in graph.constant]) == 1:
        op = graph[onward[0]]
    return op.kind in {"mul", "div"} and any(not isinstance(i, str) or i in graph.constant for i in op.inputs[:2])


def _gained(graph: OpGraph, op: Op) -> str | None:
    """Return the operand that a parameter of one number per channel multiplies."""
    axes = (-1, 1 - len(op.shape or ()))
    for value, gain in (op.data, op.data[::-1]) if op.kind == "mul" and len(op.data) == 2 else ():
        vector = any(graph.is_channel_vector(gain, graph.width(value, axis), axis) for axis in axes)
        if vector and value not in graph.constant and parameter_behind(graph, gain):
            return value
    return None


def _centered(graph: OpGraph, op: Op, seen: Collection[str]) -> str:
    """Return what has its own mean taken off and gets a gain: a layer norm whose deviation is a fixed number."""
    value = _gained(graph, op)
    while value and graph[value].kind in CASTS | {"mul", "div"} and value not in seen:
        value = next((n for n in graph[value].data if n not in graph.constant), None)
    inner = graph[value] if value and value not in seen else op
    if inner.kind != "sub" or len(inner.data) != 2:
        return ""
    source, mean = inner.data
    own = graph[mean].kind == "mean" and graph[mean].data[0] == source
    return f"{source} has its own mean subtracted, and a gain per channel follows" if own else ""


def _saturates(graph: OpGraph, source: str, end: str, ops: list[Op], sloped: bool) -> bool:
    """Return whether a piece that acts on each element levels off, and its parameters change how soon and not where.

    sloped: what it acts on is scaled before, so that it needs no such parameter.
    """
    slopes = [n for o in ops if o.kind in {"mul", "div"} for n in o.data if parameter_behind(graph, n)]
    if not (slopes or sloped) or any(_reduces(o) for o in ops):
        return False
    held = {n: np.ones([d if isinstance(d, int) else 1 for d in graph[n].shape or ()]) for n in constants(graph, ops)}
    shape = [d if isinstance(d, int) else 2 for d in graph[source].shape or ()]

    def at(x: float, slope: float) -> Floats:
        known = held | {n: slope * v for n, v in held.items() if n in slopes}
        with np.errstate(all="ignore"):
            return run(ops, known | {source: np.full(shape, x)}, end)

    try:
        ends = [[at(sign * far, slope) for far in (FAR, FAR**1.5) for slope in (1.0, 2.0)] for sign in (-1, 1)]
    except Unknown:
        return False
    level = all(np.allclose(y, rows[0], atol=1e-6, rtol=1e-6) for rows in ends for y in rows)
    return level and not np.allclose(ends[0][0], ends[1][0], atol=1e-3)
