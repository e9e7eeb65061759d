"""Gather the like terms of a sum: the factor on a state, and the factor on what weights compute from it.

A gate has many spellings, and both backends write what they come to:

x + m f             lerp(x, x + f, m), (1 - m) x + m (x + f), where(m, x + f, x)
(1 - m) x + m f     x + m (f - x), x - m (x - f)
x + (-1) f          x - f

Factors are compared by numbers (`factors`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import isfinite

import numpy as np

from .arithmetic import Unknown
from .factors import DEPTH, Expression, Trial, leaves
from .graph import Op, Operand, OpGraph
from .joins import WEIGHTED, same_shape

ROOTS = frozenset({"add", "sub", "rsub", "where", "neg"})
SIGNED = frozenset({"sub", "rsub", "neg"})
REGION = ROOTS | {"mul", "div"}
TRIALS, MOST = 4, 32

Term = tuple[str, ...]
"""Values that are multiplied, in the order of their names; none are the number 1."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """Hold what a sum comes to; `region` are the values between it and its terms."""

    total: str
    comes_to: Expression
    region: frozenset[str]

    @property
    def names(self) -> frozenset[str]:
        """Return the values that it is made of."""
        return frozenset(name for name in leaves(self.comes_to) if isinstance(name, str))


def gathered(graph: OpGraph) -> Iterator[Gathered]:
    """Yield the sums in which like terms meet, or that subtract, and what they come to."""
    taken: set[str] = set()
    for op in reversed(graph.ops.values()):
        if op.kind in ROOTS and op.name not in taken | graph.constant and len(op.shape or ()) > 1:
            region = _region(graph, op)
            taken |= region
            if len(region) <= MOST and (len(region) > 1 or op.kind in SIGNED):
                yield from _Sum(graph, op.name, frozenset(region)).gathered()


def _region(graph: OpGraph, total: Op) -> set[str]:
    """Return the sums, products and quotients that a sum is made of and nothing else reads, but for 1 - m."""
    region, todo = {total.name}, list(total.data)
    while todo:
        op = graph[todo.pop()]
        inner = op.kind in REGION and op.name not in region | graph.constant
        rest = op.kind in {"sub", "rsub"} and not isinstance(op.inputs[op.kind == "rsub"], str)
        if inner and (rest or region.issuperset(graph.users[op.name])):
            region.add(op.name)
            todo += op.data
    return region


@dataclass(frozen=True, slots=True)
class _Sum:
    """Hold one sum while its terms are gathered."""

    graph: OpGraph
    total: str
    region: frozenset[str]

    def gathered(self) -> Iterator[Gathered]:
        """Yield what the sum comes to around the first of its terms that it is a residual sum of."""
        try:
            every = self.terms(self.total)
        except Unknown:
            return
        terms: dict[Term, Expression] = {}
        for term, factor in every:
            terms[term] = _plus(terms.get(term, 0.0), factor)
        terms = {term: found for term, factor in terms.items() if (found := self.simple(factor)) != 0.0}
        for x in sorted((term[0] for term in terms if len(term) == 1), key=self.graph.index.__getitem__):
            opened = len(terms) < len(every) or self.subtracted(x)
            if opened and self.carries(x, terms):
                yield Gathered(self.total, _written(x, terms), self.region)
                return

    def subtracted(self, x: str) -> bool:
        """Return whether the sum is a difference with a state that is not read again: a step away from a target is."""
        graph = self.graph
        last = max((graph.index.get(user, len(graph.ops)) for user in graph.users[x]), default=0)
        return graph[self.total].kind in SIGNED and last <= graph.index[self.total]

    def carries(self, x: str, terms: Mapping[Term, Expression]) -> bool:
        """Return whether a sum carries x on, alone or beside what weights compute from it; masks have to be stored."""
        graph, rest = self.graph, {name for term in terms if term != (x,) for name in term}
        state, total = graph[x], graph[self.total]
        if "float" not in state.dtype:  # a count, which factors would make a number of another type
            return False
        if x in graph.constant or x in rest or state.dtype != total.dtype or not same_shape(graph, x, self.total):
            return False
        if any(
            isinstance(a, int) != isinstance(b, int) for a, b in zip(state.shape or (), total.shape or (), strict=True)
        ):
            return False
        if any(graph[name].dtype == "bool" for name in rest):
            return False
        if not rest:  # all of it is x times stored factors
            return True
        weighed = (name for name in rest if graph.reaches(x, name) and same_shape(graph, name, self.total))
        return any(op.kind in WEIGHTED for name in weighed for op in graph.between(x, name))

    def terms(self, name: Operand) -> list[tuple[Term, Expression]]:
        """Return (values, stored factor) for each product that a value of the sum adds up to. Raises Unknown."""
        if not isinstance(name, str):
            return [((), _number(name))]
        op = self.graph[name]
        if name not in self.region:
            return [((name,), 1.0)]
        one, two, *rest = (*op.inputs, None)
        if op.kind in {"add", "sub", "rsub"}:
            signs = -1.0 if op.kind == "rsub" else 1.0, -1.0 if op.kind == "sub" else 1.0
            return _few(self.product(one, [((), signs[0])]) + self.product(two, [((), signs[1])]))
        if op.kind == "neg":
            return self.product(one, [((), -1.0)])
        if op.kind == "where":
            held = self.factor(one, "mask")
            unless = [((), 1.0), *((t, _times(f, -1.0)) for t, f in held)]
            return _few(self.product(two, held) + self.product(rest[0], unless))
        if op.kind == "div" and isinstance(two, str) and two not in self.graph.constant:
            return [((name,), 1.0)]
        if op.kind == "div":
            ((_, by),) = self.factor(two)
            return self.product(one, [((), 1 / by if isinstance(by, float) else ("div", 1.0, by))])
        return self.product(one, self.factor(two)) if self.stored(two) else self.product(two, self.factor(one))

    def product(self, name: Operand, by: Sequence[tuple[Term, Expression]]) -> list[tuple[Term, Expression]]:
        """Return the terms of a value times a factor."""
        mine = self.terms(name) if name != 0 else []
        return _few([(tuple(sorted(a + b)), _times(f, g)) for a, f in mine for b, g in by])

    def factor(self, by: Operand, kind: str = "") -> list[tuple[Term, Expression]]:
        """Return an operand as a factor, less what repeats it."""
        if not self.stored(by):
            return self.terms(by)
        found = self.unspread(by)
        return [((), (kind, found) if kind else found)]

    def unspread(self, by: Operand, depth: int = DEPTH) -> Expression:
        """Return a stored value without what repeats it, or what it is made of."""
        if not isinstance(by, str):
            return _number(by)
        op = self.graph[by]
        if op.kind == "expand" and op.data:
            return self.unspread(op.data[0], depth)
        if depth and op.kind in SIGNED | {"add", "mul", "div"}:
            one, *rest = found = [self.unspread(i, depth - 1) for i in op.inputs[:2]]
            if found != list(op.inputs[:2]):
                return (
                    ("mul", one, -1.0)
                    if op.kind == "neg"
                    else ("sub", *rest, one)
                    if op.kind == "rsub"
                    else (op.kind, *found)
                )
        return by

    def stored(self, name: Operand) -> bool:
        return not isinstance(name, str) or name in self.graph.constant

    def simple(self, factor: Expression) -> Expression:
        """Return the number or the value that a factor is, where it is one of those that it is made of, 0, 1 or -1."""
        if isinstance(factor, str):
            return factor
        rng = np.random.default_rng(0)
        trials = [Trial(self.graph, rng) for _ in range(TRIALS)]
        with np.errstate(all="ignore"):
            for guess in dict.fromkeys((0.0, 1.0, -1.0, *leaves(factor))):
                if all(trial.equal(factor, guess) for trial in trials):
                    return guess
        return factor


def _few(terms: list[tuple[Term, Expression]]) -> list[tuple[Term, Expression]]:
    """Return terms. Raises Unknown where they are too many."""
    if len(terms) > MOST:
        raise Unknown("a sum of too many terms")
    return terms


def _number(value: Operand) -> float:
    """Return an operand that is a number. Raises Unknown for one that is not known, or not finite."""
    if value is None or not isfinite(float(value)):
        raise Unknown("an operand that is not a finite number")
    return float(value)


def _product(term: Term) -> Expression:
    found: Expression = 1.0
    for name in term:
        found = _times(found, name)
    return found


def _written(x: str, terms: Mapping[Term, Expression]) -> Expression:
    """Write a sum: x, then the terms of each factor together."""
    alike: dict[Expression, list[Expression]] = {}
    for term, factor in terms.items():
        alike.setdefault(factor, []).extend([_product(term)] * (term != (x,)))
    result = _scaled(x, terms[x,])
    for factor, values in alike.items():
        if values:
            result = ("add", result, _scaled(reduce(_plus, values), factor))
    return result


def _times(one: Expression, two: Expression) -> Expression:
    if isinstance(one, float) and isinstance(two, float):
        return one * two
    if isinstance(one, float):
        one, two = two, one
    return one if two == 1.0 else ("mul", one, two)


def _plus(one: Expression, two: Expression) -> Expression:
    if isinstance(one, float) and isinstance(two, float):
        return one + two
    if one == 0.0:
        return two
    return ("sub", one, two[1]) if isinstance(two, tuple) and two[0] == "mul" and two[2] == -1.0 else ("add", one, two)


def _scaled(value: Expression, factor: Expression) -> Expression:
    """Return a value times a factor, one operator for each factor of it."""
    if factor == 1.0:
        return value
    if isinstance(value, float) and isinstance(factor, float):
        return value * factor
    if isinstance(factor, tuple) and factor[0] == "mul":
        return _scaled(_scaled(value, factor[1]), factor[2])
    if isinstance(factor, tuple) and factor[:2] == ("div", 1.0):
        return ("div", value, factor[2])
    return ("mul", value, factor)
