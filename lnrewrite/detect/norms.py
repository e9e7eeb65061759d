"""Recognise norms by algebra, and prove each on random data before it counts.

A decomposed norm is a product (or quotient) of a value with an inverse root of one of its own reductions. Whatever
the spelling, the piece of graph between the value and the product is run in float64 on random data and compared
with every norm in `unit`; only what agrees to 1e-9 is a norm. Names of modules and parameters play no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import Code, Refusal
from ..ir import Kind, Norm
from .arithmetic import Array, Unknown, closure, constants, run
from .edges import parameter_behind
from .graph import CASTS, Op, Operand, OpGraph
from .lookalikes import lookalikes
from .match import NormMatch
from .stored import dynamic_tanh, standardised, stored

FUSED = {
    "layer_norm": Kind.LAYER, "rms_norm": Kind.RMS, "batch_norm": Kind.BATCH, "group_norm": Kind.GROUP,
    "instance_norm": Kind.INSTANCE,
}  # fmt: skip
REDUCTIONS = {"mean", "sum", "sum_square", "var", "std", "vector_norm"}
STATISTIC = {
    "cast",
    "reshape",
    "expand",
    "reciprocal",
    "sqrt",
    "rsqrt",
    "pow",
    "add",
    "sub",
    "clamp_min",
    "maximum",
    "mul",
    "div",
    "clamp",
}
TOLERANCE = 1e-9
CLAMPED = 1e-30
"""The eps of a norm whose statistic is clamped from below: a row of zeros stays one, and others are not changed."""
UNKNOWN = "it is left as it is; report this spelling if it is a norm that should be known"


def find_norms(graph: OpGraph) -> tuple[Mapping[str, NormMatch], tuple[Refusal, ...]]:
    """Return the norms by output node, and what works as a norm and is none of them."""
    found: dict[str, NormMatch] = {}
    misses: dict[str, str] = {}
    taken: set[str] = set()
    for op in graph:
        if op.name in taken:
            continue
        core = _fused(graph, op)
        if core is None and op.kind in {"mul", "div"}:
            core = stored(graph, op) or _decomposed(graph, op, misses)
        if core is None and op.kind == "tanh":
            core = dynamic_tanh(graph, op)
        if core is not None:
            whole = _with_affine(graph, core)
            found[whole.output] = whole
            taken |= whole.members
    found |= {f.output: f for f in standardised(graph)}
    members = frozenset[str]().union(*(f.members for f in found.values()))
    odd = ((name, "; ".join(filter(None, (why, misses.get(name))))) for name, why in lookalikes(graph, members))
    return found, tuple(Refusal(Code.LN205, name, why, UNKNOWN) for name, why in odd)


def stacked(graph: OpGraph, norms: Mapping[str, NormMatch]) -> dict[str, NormMatch]:
    """Return the norms by output, those that read a norm which nothing else reads taken together with it."""
    found: dict[str, NormMatch] = {}
    for norm in norms.values():
        value, inside = norm.source, set(norm.members)
        while value not in found and graph[value].kind in CASTS and set(graph.users[value]) <= inside:
            inside.add(value)
            value = graph[value].data[0]
        below = found.get(value)
        written = below and below.norm.kind in {Kind.LAYER, Kind.RMS}  # an edit of the two writes both anew
        if below and written and below.axis == norm.axis and set(graph.users[value]) <= inside:
            del found[value]
            whole = replace(norm.norm, over=below.norm)
            norm = replace(norm, norm=whole, source=below.source, members=below.members | inside)
        found[norm.output] = norm
    return found


def unit(kind: Kind, x: Array, eps: float, variant: int = 0) -> Array:
    """Return the unit-gain norm of rows x [rows, width] in float64.

    variant: std 0 biased, 1 unbiased standard deviation; l2 0 max(|x|, eps), 1 |x| + eps, 2 sqrt(|x|^2 + eps).
    """
    centred = x - x.mean(-1, keepdims=True)
    if kind in {Kind.LAYER, Kind.RMS}:
        x = centred if kind is Kind.LAYER else x
        return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + eps))
    if kind is Kind.STD:
        return np.asarray(centred / (x.std(-1, keepdims=True, ddof=variant) + eps))
    length = np.sqrt((x**2).sum(-1, keepdims=True))
    return np.asarray(x / (np.maximum(length, eps), length + eps, np.sqrt(length**2 + eps))[variant])


def _fused(graph: OpGraph, op: Op) -> NormMatch | None:
    kind = FUSED.get(op.kind)
    if kind is None or not isinstance(op.inputs[0], str) or (kind is Kind.BATCH and op.name in graph.constant):
        return None
    source, gamma, beta = op.inputs[0], op.inputs[1], op.inputs[2]
    axis = -1 if kind in {Kind.LAYER, Kind.RMS} else 1 - len(graph[source].shape or ())
    if op.attrs.get("axes", 1) != 1:
        kind = Kind.GROUP
    if kind is Kind.GROUP and op.attrs.get("groups") == graph.width(source, axis):
        kind = Kind.INSTANCE
    eps: float = op.attrs["eps"]  # type: ignore[assignment]
    held = [parameter_behind(graph, name) for name in op.inputs[3:5]] if kind is Kind.BATCH else []
    mean, variance = held if len(held) == 2 else (None, None)
    affine: dict[str, Any] = {**_gain(graph, gamma), "beta": parameter_behind(graph, beta)}
    if isinstance(beta, str) and affine["beta"] is None:  # computed like a gain that no parameter is
        affine |= {"beta": beta, "computed": True}
    norm = Norm(kind, eps, **affine, mean=mean, variance=variance, axis=axis)
    return NormMatch(norm, source, op.name, frozenset({op.name}))


def _gain(graph: OpGraph, name: Operand) -> dict[str, Any]:
    """Describe a gain: a parameter w, 1 + w, or something computed from parameters."""
    if not isinstance(name, str):
        return {}
    if direct := parameter_behind(graph, name):
        return {"gamma": direct}
    op = graph[name]
    while op.kind in {"cast", "reshape", "expand"} and isinstance(op.inputs[0], str):
        op = graph[op.inputs[0]]
    if op.kind == "add" and 1 in [i for i in op.inputs if not isinstance(i, str)]:
        inner = parameter_behind(graph, next((i for i in op.inputs if isinstance(i, str)), None))
        if inner:
            return {"gamma": inner, "plus_one": True}
    return {"gamma": name, "computed": True}


def _statistic(graph: OpGraph, name: Operand, depth: int = 12) -> bool:
    """Return whether a value is a scalar function of a reduction, with a root or a norm in it."""
    rooted = False
    while isinstance(name, str) and depth:
        op = graph[name]
        if op.kind in REDUCTIONS:
            return rooted or op.kind in {"std", "vector_norm"}
        if op.kind not in STATISTIC:
            return False
        rooted = rooted or op.kind in {"sqrt", "rsqrt"} or (op.kind == "pow" and op.inputs[1] in (0.5, -0.5))
        name = next((i for i in op.inputs if isinstance(i, str) and i not in graph.constant), None)
        depth -= 1
    return False


def _sources(graph: OpGraph, name: str) -> Iterator[str]:
    """Yield what a normalised value may be computed from: itself, before a cast, a gain or the centring."""
    yield name
    op = graph[name]
    gains = [i for i in op.data if graph.is_channel_vector(i, graph.width(name)) or graph.is_scalar(i)]
    gain = op.kind == "mul" and bool(gains)
    if op.kind in CASTS or op.kind == "sub" or gain:
        for inner in op.data:
            if inner not in graph.constant:
                yield from _sources(graph, inner)


def _decomposed(graph: OpGraph, op: Op, misses: dict[str, str]) -> NormMatch | None:
    if len(op.data) != 2:
        return None
    pairs = [(op.inputs[0], op.inputs[1])] + ([(op.inputs[1], op.inputs[0])] if op.kind == "mul" else [])
    for value, statistic in pairs:
        if not (isinstance(value, str) and isinstance(statistic, str) and _statistic(graph, statistic)):
            continue
        best, leaking = "", None
        for source in list(_sources(graph, value))[::-1]:
            ops = closure(graph, source, op.name)
            if ops is None or not graph.reaches(source, statistic):
                continue
            found, why = _prove(graph, source, op, ops)
            if found and set(_users(graph, ops)) <= {o.name for o in ops} | set(graph.users[op.name]):
                return found
            leaking, best = leaking or found, best or why
        if leaking:  # something else sees a value inside; where the norm starts behind that value, it is no part of it
            return leaking
        misses[op.name] = best
        return None
    return None


def _users(graph: OpGraph, ops: Iterable[Op]) -> Iterator[str]:
    for op in ops:
        yield from graph.users[op.name]


def _reduced_axis(ops: list[Op], rank: int) -> int | None:
    """Return the one axis that every reduction of a piece runs over, counted from the end, or None."""
    reduced: list[Any] = [op.attrs["axes"] for op in ops if op.kind in REDUCTIONS and op.attrs["axes"]]
    axes = {tuple(a - rank if a >= 0 else a for a in each) for each in reduced}
    if len(axes) != 1 or len(only := axes.pop()) != 1:
        return None
    return int(only[0])


def _prove(graph: OpGraph, source: str, op: Op, ops: list[Op]) -> tuple[NormMatch | None, str]:
    """Run the piece on random data and match it with a norm; the second value says what did not fit."""
    shape = graph[source].shape or ()
    axis = _reduced_axis(ops, len(shape))
    if axis is None or not (width := graph.width(source, axis)):
        return None, "the reductions run over several axes, or over one of unknown size"
    rng = np.random.default_rng(0)
    parameters = {n: rng.normal(size=_numbers(graph[n].shape)) for n in constants(graph, ops)}
    sizes = [d if isinstance(d, int) and i - len(shape) == axis else 2 + i for i, d in enumerate(shape)]
    literal = [float(i) for o in ops for i in o.inputs if isinstance(i, (int, float)) and i]
    x = rng.normal(size=sizes) * 0.7 + 0.3
    tests = [x * 0.02, x, x * 3]
    try:
        outputs = [run(ops, {**parameters, source: t}, op.name) for t in tests]
    except (Unknown, ValueError, TypeError, IndexError) as why:
        return None, f"the piece cannot be run on its own ({why})"
    if any(y.shape != t.shape for y, t in zip(outputs, tests, strict=True)):
        return None, "the result has another shape than what is normalised"
    rows = np.concatenate([np.moveaxis(t, axis, -1).reshape(-1, width) for t in tests])
    wanted = np.concatenate([np.moveaxis(y, axis, -1).reshape(-1, width) for y in outputs])
    for kind, eps, variant, factor in _candidates(literal, width):
        gain = _fit(factor * unit(kind, rows, eps, variant), wanted)
        if gain is None:
            continue
        if not eps:
            with np.errstate(all="ignore"):
                empty = run(ops, {**parameters, source: np.zeros_like(x)}, op.name)
            eps = CLAMPED if np.isfinite(empty).all() else 0.0
        norm = _describe(graph, Norm(kind, eps, factor=factor, axis=axis), gain, parameters)
        if norm is None:
            continue
        return NormMatch(norm, source, op.name, frozenset(o.name for o in ops)), ""
    small = sorted({i for i in literal if abs(i) < 0.5})
    return None, f"not layer, rms, std or l2 with any eps of {small or 'none'}"


def _numbers(shape: tuple[int | str, ...] | None) -> tuple[int, ...]:
    return tuple(d if isinstance(d, int) else 1 for d in shape or ())


def _candidates(literal: list[float], width: int) -> Iterator[tuple[Kind, float, int, float]]:
    """Yield (kind, eps, variant, factor); a length over sqrt(width) with eps outside the root is an l2 norm too."""
    eps = [*sorted({e for e in literal if 0 < e < 0.5}), 0.0]
    root = next((r for i in literal for r in (i, 1 / i) if np.isclose(r, width**0.5, rtol=1e-6)), width**0.5)
    yield from ((kind, e, 0, 1.0) for kind in (Kind.LAYER, Kind.RMS) for e in eps)
    yield from ((Kind.STD, e, v, 1.0) for v in (0, 1) for e in eps)
    yield from ((Kind.L2, e, v, 1.0) for v in (0, 1, 2) for e in eps)
    yield from ((Kind.L2, e * root, v, root) for v in (0, 1) for e in eps)


def _fit(core: Array, wanted: Array) -> Array | None:
    """Return the gain [width] with wanted = gain * core, or None where there is none."""
    gain = (core * wanted).sum(0) / np.maximum((core * core).sum(0), 1e-300)
    wrong = np.abs(core * gain - wanted).max()
    return gain if wrong <= TOLERANCE * max(1.0, float(np.abs(wanted).max())) else None


def _describe(graph: OpGraph, norm: Norm, gain: Array, parameters: dict[str, Array]) -> Norm | None:
    """Name the parameter that a fitted gain comes from; a constant gain of 1 needs none."""
    for name, value in parameters.items():
        flat = np.broadcast_to(value.reshape(-1), gain.shape) if value.size in (1, gain.size) else None
        for plus in (0, 1):
            if flat is not None and np.allclose(gain, flat + plus, rtol=1e-9):
                parameter = parameter_behind(graph, name)
                if value.size == gain.size and parameter:
                    return replace(norm, gamma=parameter, plus_one=bool(plus))
                return replace(norm, gamma=name, computed=True)
    return norm if np.allclose(gain, 1, rtol=1e-9) else None


def _with_affine(graph: OpGraph, core: NormMatch) -> NormMatch:
    """Make a norm take in the gain, bias and casts that follow it."""
    norm, output, members = core.norm, core.output, set(core.members)
    while True:
        users = graph.users[output]
        if len(users) != 1 or users[0] == "output":
            break
        op = graph[users[0]]
        other = next((i for i in op.inputs if i != output), None)
        width = graph.width(op.name, core.axis)
        if op.kind in CASTS:
            pass
        elif op.kind == "mul" and norm.kind is Kind.L2 and norm == core.norm and isinstance(other, (int, float)):
            norm = replace(norm, factor=float(other))
        elif op.kind == "mul" and not norm.gamma and not norm.beta and graph.is_channel_vector(other, width, core.axis):
            norm = replace(norm, **_gain(graph, other))
        elif op.kind == "add" and not norm.beta and graph.is_channel_vector(other, width, core.axis):
            beta = parameter_behind(graph, other)
            if beta is None:
                break
            norm = replace(norm, beta=beta)
        elif norm.kind is Kind.BATCH and op.kind == "add" and (beside := _beside(graph, other, core)) is not None:
            norm = Norm(Kind.BATCH, norm.eps, gamma=op.name, computed=True, axis=core.axis)
            members |= beside
        else:
            break
        output = op.name
        members.add(output)
    return replace(core, norm=norm, output=output, members=frozenset(members))


def _beside(graph: OpGraph, name: Operand, core: NormMatch) -> set[str] | None:
    """Return the ops of what is added to a batch norm where it is its own input times a number (RepBN); else None."""
    if name == core.source:
        return set()
    op = graph[name] if isinstance(name, str) else None
    if op is None or op.kind != "mul" or core.source not in op.inputs:
        return None
    factor = next(i for i in op.inputs if i != core.source)
    return {op.name} if graph.is_scalar(factor) else None
