"""Make up inputs that an ONNX model accepts, from its graph alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import onnx_ir as ir

from ...errors import Code, LnrewriteError
from ...ir.inputs import InputSpec, too_large
from ..inputs import Tensors, draw
from .session import input_of

Sizes = dict[str, int]
KEEPING = {"Cast", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Clip", "Max", "Min"}
"""What may stand between ids and the table that they look up."""
TRIALS = 600
"""How many sizes are tried, but for the last ones, which are all alike."""
MOST = 1 << 24
"""How many numbers an input that is made up may have."""


def given(model: ir.Model) -> dict[str, ir.Value]:
    """Return the inputs that a caller gives, by name: initializers that stand among them are none."""
    return {v.name or "": v for v in model.graph.inputs if v.const_value is None}


def spec_of_model(model: ir.Model) -> InputSpec:
    """Return what a model declares of its inputs, with the rows of the tables that they look up."""
    limits = id_limits(model)
    described = (input_of(value, limits.get(name, 0)) for name, value in given(model).items())
    return InputSpec(tuple(replace(each, dtype=each.dtype or "float32") for each in described))


def example_inputs(model: ir.Model, run: Callable[[Tensors], object]) -> Tensors:
    """Return inputs with which `run` does not raise LnrewriteError.

    Free sizes are small numbers; that one is the sum of two others (a cache's length and the new tokens') is found by
    trying. Raises LnrewriteError LN020 where nothing that is tried runs, LN030 where ONNX Runtime refuses the model,
    LN039 where an input is declared too large.
    """
    first, spec = "", spec_of_model(model)
    for sizes in _sizes(spec, _divisors(model)):
        inputs = drawn(spec.at(sizes), 0)
        try:
            run(inputs)
        except LnrewriteError as error:
            if error.code == Code.LN030:  # the model is refused, whatever it is given
                raise
            first = first or error.why
            continue
        return inputs
    shapes = " ".join(f"--input '{each.name}={each.dtype}[{','.join(map(str, each.dims))}]'" for each in spec)
    raise LnrewriteError(Code.LN020, "inputs", f"synthetic inputs do not run: {first}", f"give them, such as {shapes}")


def drawn(spec: InputSpec, seed: int) -> Tensors:
    """Make up inputs: ids below their table's rows, other integers ones, floats normal, booleans true.

    Raises LnrewriteError LN039 where one is too large.
    """
    if wrong := too_large(spec, MOST):
        why = f"{wrong.name} is declared {list(wrong.dims)}; synthetic inputs have at most {MOST} numbers"
        raise LnrewriteError(Code.LN039, "inputs", why, "check the sizes that the file declares for its inputs")
    return draw(spec, seed)


def id_limits(model: ir.Model) -> dict[str, int]:
    """Return how many rows the table has that each integer input looks up, straight or moved, cast or shaped."""
    limits: dict[str, int] = {}
    for name, value in given(model).items():
        todo, seen = [value], set[ir.Node]()
        while todo and len(seen) < 64:
            held = todo.pop()
            for node, index in held.uses():
                if node in seen:
                    continue
                seen.add(node)
                table = node.inputs[0]
                looked = node.op_type in {"Gather", "GatherElements", "GatherND"} and index == 1 and table is not None
                if looked and table is not None and table.const_value is not None and node.op_type == "Gather":
                    rows = table.const_value.shape[0]
                    limits[name] = min(limits.get(name, 1 << 31), int(str(rows)))
                elif node.op_type in KEEPING or (node.op_type, index) == ("Gather", 0):
                    todo += node.outputs
    return limits


def _sizes(spec: InputSpec, divisors: Sequence[int]) -> Iterator[Sizes]:
    """Yield sizes of the free dimensions to try: the first of most inputs is 2, then of all; others are different.

    divisors: sizes that a dimension of a constant number may have, such as a head's.
    """
    names = list(dict.fromkeys(name for each in spec for name in each.free.values()))
    first = [each.free[0] for each in spec if 0 in each.free]
    batch = max(first, key=first.count) if first else ""
    base = _base(names, batch)
    others = [n for n in names if n != batch]
    changes = _changes(others, base, divisors)[: TRIALS // 2]
    for rows in (2, 1):  # some decoders take one row when they are given a past
        for change in ({}, dict.fromkeys(first, rows), *changes):
            yield base | change | ({batch: rows} if batch else {})
    yield base | dict.fromkeys(others, 8)
    yield dict.fromkeys(names, 1)


def _base(names: Sequence[str], batch: str) -> Sizes:
    """Return a size for each name: 2 for the batch, else 5, 11, 23 and so on, none the sum of others by chance."""
    base = {name: (6 << i) - 1 for i, name in enumerate(n for n in names if n != batch)}
    base |= {batch: 2} if batch else {}
    written = {n: n.replace(" ", "").split("+") for n in names if "+" in n}
    return base | {n: sum(int(p) if p.isdigit() else base.get(p, 0) for p in parts) for n, parts in written.items()}


def _changes(names: Sequence[str], base: Sizes, divisors: Sequence[int]) -> list[Sizes]:
    """Return what else sizes may be: the sum of two others, a number that divides weights, both."""
    pairs = ((n, p) for n in reversed(names) for p in itertools.combinations([m for m in names if m != n], 2))
    sums = [{name: base[a] + base[b]} for name, (a, b) in pairs]
    known = [{name: size} for name in reversed(names) for size in divisors]
    both = [{**b, **a} for a in sums for b in known if not a.keys() & b.keys()]
    return [*sums, *known, *both]


def _divisors(model: ir.Model) -> list[int]:
    """Return the powers of two, from 8 to 256, that divide a size of a weight."""
    sizes = {d for v in model.graph.initializers.values() for d in v.shape or () if isinstance(d, int)}
    return [n for n in (64, 128, 16, 32, 8, 256) if any(d % n == 0 for d in sizes)]
