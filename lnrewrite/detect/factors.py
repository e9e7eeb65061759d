"""Compare factors by numbers: equal for numbers that are drawn, they are equal.

They are analytic in what they are made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from .arithmetic import Floats, Unknown, computed
from .graph import RANDOM, Op, OpGraph

ANALYTIC = frozenset({
    "add", "sub", "rsub", "mul", "div", "neg", "square", "reciprocal", "exp", "sigmoid", "tanh", "erf", "reshape",
    "expand",
})  # fmt: skip
"""Operators that are run to compare factors; what another one gives is drawn."""
DEPTH, EQUAL = 8, 1e-12

Expression = str | float | tuple["str | Expression", ...]
"""A value, a number, or an operator and its operands: add, sub, mul, div, and mask, which is 1 where a mask holds."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Run factors on numbers drawn for what they are made of; the same expression twice is one number."""

    graph: OpGraph
    rng: np.random.Generator
    drawn: dict[object, Floats] = field(default_factory=dict)
    keys: dict[str, object] = field(default_factory=dict)

    def run(self, factor: Expression) -> Floats:
        """Return what a factor is. Masks are any number: what is 1 and 0 is linear in them."""
        if isinstance(factor, str):
            return self.value(factor, DEPTH)
        if isinstance(factor, float):
            return np.asarray(factor)
        kind, *operands = factor
        values = [self.run(operand) for operand in operands]
        return values[0] if kind == "mask" else computed(Op("", str(kind)), values)

    def equal(self, factor: Expression, guess: str | float) -> bool:
        """Return whether a factor is a guess, within the rounding of what it adds up."""
        try:
            return bool(np.all(abs(self.run(factor) - self.run(guess)) <= EQUAL * self.size(factor)))
        except (Unknown, ValueError):  # of shapes that do not go together
            return False

    def size(self, factor: Expression) -> Floats:
        """Return what the parts of a factor add up to without their signs."""
        if not isinstance(factor, tuple) or factor[0] == "mask":
            return np.asarray(abs(self.run(factor)))
        one, two = (self.size(operand) for operand in factor[1:])
        return np.asarray(one * two if factor[0] == "mul" else one / two if factor[0] == "div" else one + two)

    def value(self, name: str, depth: int) -> Floats:
        """Return what a node gives."""
        key = self.key(name, depth)
        if key not in self.drawn:
            self.drawn[key] = self.made(self.graph[name], depth)
        return self.drawn[key]

    def made(self, op: Op, depth: int) -> Floats:
        if op.kind in ANALYTIC and depth:
            try:
                values = [self.value(i, depth - 1) if isinstance(i, str) else i for i in op.inputs]
                return np.asarray(computed(op, values))
            except Unknown:
                pass
        return self.rng.normal(size=[d if isinstance(d, int) else 2 + len(d) % 3 for d in op.shape or ()])

    def key(self, name: str, depth: int) -> object:
        """Return what tells a node from those that give something else."""
        if name not in self.keys:
            op, plain = self.graph[name], name
            known = depth and op.data and op.kind not in RANDOM
            read = tuple(self.key(i, depth - 1) if isinstance(i, str) else i for i in op.inputs) if known else ()
            self.keys[name] = (op.kind, read, str(op.attrs), op.shape) if known else plain
        return self.keys[name]


def leaves(factor: Expression) -> Iterator[str | float]:
    """Yield the values and the numbers that a factor is made of."""
    if isinstance(factor, tuple):
        for operand in factor[1:]:
            yield from leaves(operand)
    else:
        yield factor
