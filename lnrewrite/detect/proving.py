"""Prove that a piece of graph is a norm: run it in float64 on random data and compare it with every kind of norm.

A model spells its norms in one or two ways and holds hundreds of them: a spelling is run once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..ir import Kind, Norm
from .arithmetic import Floats, Unknown, constants, run
from .edges import parameter_behind
from .graph import Op, Operand, OpGraph
from .match import NormMatch

TOLERANCE = 1e-9
FAR = 1e30
"""Numbers that are further from 1 play no part in float32."""
CLAMPED = 1e-30
"""The eps of a norm whose statistic is clamped from below: a row of zeros stays one, and others are not changed."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Describe the gain that a piece was found to have: which of its constants, as it is or plus one."""

    constant: int
    plus_one: bool
    per_channel: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """Hold what running a piece gave: a norm, with its gain where it has one; or why it is none."""

    norm: Norm | None
    gain: Gain | None = None
    why: str = ""


class Prover:
    """Prove pieces of one graph; the verdict on a spelling holds wherever it stands."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self._verdicts: dict[Hashable, Verdict] = {}

    def prove(self, source: str, end: str, ops: Sequence[Op], axis: int) -> tuple[NormMatch | None, str]:
        """Return the norm of `source` along an axis that the ops compute, or None and what does not fit."""
        held = constants(self.graph, ops)
        spelling = _spelling(self.graph, source, ops, held)
        if spelling not in self._verdicts:
            self._verdicts[spelling] = _verdict(self.graph, source, end, ops, held, axis)
        verdict = self._verdicts[spelling]
        norm, gain = verdict.norm, verdict.gain
        if norm is None:
            return None, verdict.why
        if gain:
            name = held[gain.constant]
            parameter = parameter_behind(self.graph, name) if gain.per_channel else None
            stored, computed = replace(norm, gamma=parameter, plus_one=False), replace(norm, gamma=name, computed=True)
            norm = replace(stored, plus_one=gain.plus_one) if parameter else computed
        return NormMatch(norm, source, end, frozenset(op.name for op in ops)), ""


def _spelling(graph: OpGraph, source: str, ops: Sequence[Op], held: Sequence[str]) -> Hashable:
    """Return what a piece computes without its names: equal spellings compute the same."""
    places: dict[str, Hashable] = {name: ("constant", i, graph[name].shape) for i, name in enumerate(held)}
    places |= {op.name: ("op", i) for i, op in enumerate(ops)}
    places[source] = ("source", graph[source].shape)

    def place(operand: Operand) -> Hashable:
        return places[operand] if isinstance(operand, str) else ("number", operand)

    return tuple((op.kind, tuple(map(place, op.inputs)), _plain(op.attrs), op.shape) for op in ops)


def _plain(value: object) -> Hashable:
    """Return an attribute's value as one that can be compared and hashed; what is not plain data is only itself."""
    if isinstance(value, Mapping):
        return tuple((key, _plain(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return value if isinstance(value, (str, int, float, type(None))) else ("object", id(value))


def unit(kind: Kind, x: Floats, eps: float, variant: int = 0) -> Floats:
    """Return the unit-gain norm of rows x [rows, width] in float64.

    variant: std 0 biased, 1 unbiased standard deviation, 2 sqrt(unbiased variance + eps); l2 0 max(|x|, eps),
    1 |x| + eps, 2 sqrt(|x|^2 + eps).
    """
    centered = x - x.mean(-1, keepdims=True)
    if kind is Kind.CRMS:
        total = (x**2).sum(-1, keepdims=True) + x.sum(-1, keepdims=True) ** 2
        return np.asarray(x / np.sqrt(total / (x.shape[-1] + 1) + eps))
    if kind in {Kind.LAYER, Kind.RMS}:
        x = centered if kind is Kind.LAYER else x
        return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + eps))
    if kind is Kind.STD:
        if variant == 2:
            return np.asarray(centered / np.sqrt(x.var(-1, keepdims=True, ddof=1) + eps))
        return np.asarray(centered / (x.std(-1, keepdims=True, ddof=variant) + eps))
    length = np.sqrt((x**2).sum(-1, keepdims=True))
    return np.asarray(x / (np.maximum(length, eps), length + eps, np.sqrt(length**2 + eps))[variant])


def statistic_axis(graph: OpGraph, value: str, statistic: str) -> int | None:
    """Return the axis, from the end, along which a value has many elements and what divides it has one; None without.

    However it was computed: what a norm divides by is one number for each row.
    """
    while graph[statistic].kind in {"expand", "cast"} and statistic not in graph.constant:
        statistic = graph[statistic].data[0]
    many, one = graph[value].shape or (), graph[statistic].shape or ()
    if statistic in graph.constant or len(many) != len(one):
        return None
    axes = [i - len(many) for i, (d, each) in enumerate(zip(many, one, strict=True)) if each == 1 != d]
    return axes[0] if len(axes) == 1 else None


def _verdict(graph: OpGraph, source: str, end: str, ops: Sequence[Op], held: Sequence[str], axis: int) -> Verdict:
    """Run a piece on random data and match it with a norm.

    Its constants are tried with both signs and as they come, and its rows at sizes below and above every number in it:
    a clamp, or a floor, that is reached makes another norm.
    """
    shape = graph[source].shape or ()
    if not (width := graph.width(source, axis)):
        return Verdict(None, why="its sizes are taken along an axis of unknown size")
    rng = np.random.default_rng(0)
    sizes = [d if isinstance(d, int) and i - len(shape) == axis else 2 + i for i, d in enumerate(shape)]
    literal = [float(i) for o in ops for i in o.inputs if isinstance(i, (int, float)) and i]
    x = rng.normal(size=sizes) * 0.7 + 0.3
    tests = [x * size for size in (0.02, 1, 3, *_around(literal))]
    drawn = {n: rng.normal(size=_sizes(graph[n].shape)) for n in held}
    constants = [drawn] if not drawn else [drawn, *({n: s * abs(v) for n, v in drawn.items()} for s in (1, -1))]
    try:
        runs = [[run(ops, {**each, source: t}, end) for t in tests] for each in constants]
        empty = run(ops, {**drawn, source: np.zeros_like(x)}, end)
    except Unknown as why:
        return Verdict(None, why=f"the piece cannot be run on its own ({why})")
    if any(y.shape != x.shape for outputs in runs for y in outputs):
        return Verdict(None, why="the result has another shape than the value that is normalized")
    rows, *wanted = (
        np.concatenate([np.moveaxis(t, axis, -1).reshape(-1, width) for t in each]) for each in (tests, *runs)
    )
    for kind, eps, variant, factor in _candidates(literal, width):
        core = factor * unit(kind, rows, eps, variant)
        gains = [
            _explained(core, each, [values[n] for n in held]) for each, values in zip(wanted, constants, strict=True)
        ]
        if gains[0] is None or any(gain != gains[0] for gain in gains):
            continue
        eps = eps or (CLAMPED if np.isfinite(empty).all() else 0.0)
        return Verdict(Norm(kind, eps, factor=factor, variant=variant, axis=axis), gains[0] or None)
    small = sorted({i for i in literal if abs(i) < 0.5})
    return Verdict(None, why=f"not layer, rms, crms, std or l2 with any eps of {small or 'none'}")


def _around(literal: Iterable[float]) -> Iterator[float]:
    """Yield sizes of rows at which a number in a piece may matter: as a size, its square, or the inverse of either."""
    numbers = {abs(n) ** power for n in literal for power in (1, 0.5, -0.5, -1)}
    yield from sorted({n * by for n in numbers if 1 / FAR < n < FAR for by in (0.25, 4)})


def _sizes(shape: tuple[int | str, ...] | None) -> tuple[int, ...]:
    return tuple(d if isinstance(d, int) else 1 for d in shape or ())


def _candidates(literal: list[float], width: int) -> Iterator[tuple[Kind, float, int, float]]:
    """Yield (kind, eps, variant, factor); a length over sqrt(width) with eps outside the root is an l2 norm too.

    So is one whose mean square is clamped.
    """
    eps = [*sorted({e for i in literal for e in (i, 1 / i) if 0 < e < 0.5}), 0.0]
    root = next((r for i in literal for r in (i, 1 / i) if np.isclose(r, width**0.5, rtol=1e-6)), width**0.5)
    yield from ((kind, e, 0, 1.0) for kind in (Kind.LAYER, Kind.RMS, Kind.CRMS) for e in eps)
    yield from ((Kind.STD, e, v, 1.0) for v in (0, 1, 2) for e in eps)
    yield from ((Kind.L2, e, v, 1.0) for v in (0, 1, 2) for e in eps)
    yield from ((Kind.L2, e * by, v, root) for v in (0, 1) for by in (root, 1) for e in eps)
    yield from ((Kind.L2, e**0.5 * root, 0, root) for e in eps)


def _explained(core: Floats, wanted: Floats, values: Sequence[Floats]) -> Gain | Literal[False] | None:
    """Return which constant the gain of wanted = gain * core is, False where that is 1, None where there is none."""
    fitted = _fit(core, wanted)
    if fitted is None:
        return None
    return _gain(fitted, values) or (False if np.allclose(fitted, 1, rtol=1e-9) else None)


def _fit(core: Floats, wanted: Floats) -> Floats | None:
    """Return the gain [width] with wanted = gain * core in every row, or None where there is none."""
    largest = np.maximum(np.abs(core).max(-1, keepdims=True), 1e-300)  # rows far below eps count as much as others
    core, wanted = core / largest, wanted / largest
    gain = (core * wanted).sum(0) / np.maximum((core * core).sum(0), 1e-300)
    wrong = np.abs(core * gain - wanted).max()
    return gain if wrong <= TOLERANCE * max(1.0, float(np.abs(wanted).max())) else None


def _gain(fitted: Floats, values: Sequence[Floats]) -> Gain | None:
    """Return which constant a fitted gain comes from; None where it is that of none of them."""
    for index, value in enumerate(values):
        flat = np.broadcast_to(value.reshape(-1), fitted.shape) if value.size in (1, fitted.size) else None
        for plus in (0, 1):
            if flat is not None and np.allclose(fitted, flat + plus, rtol=1e-9):
                return Gain(index, bool(plus), value.size == fitted.size)
    return None
