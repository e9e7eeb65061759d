"""Make up inputs that an ONNX model accepts, from its graph alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from math import prod

import onnx_ir as ir
import torch
from torch import Tensor

from ...errors import Code, LnrewriteError
from .lift import size
from .session import TORCH

Sizes = dict[str, int]
TRIALS = 600
MOST = 1 << 24
"""How many numbers an input that is made up may have."""


def given(model: ir.Model) -> dict[str, ir.Value]:
    """Return the inputs that a caller gives, by name: initializers that stand among them are none."""
    return {v.name or "": v for v in model.graph.inputs if v.const_value is None}


def dynamic_axes(model: ir.Model) -> dict[str, dict[int, str]]:
    """Return, for each input, its dynamic axes and the names of their sizes."""
    return {name: {i: d for i, d in enumerate(_dims(v)) if isinstance(d, str)} for name, v in given(model).items()}


def example_inputs(model: ir.Model, run: Callable[[dict[str, Tensor]], object]) -> dict[str, Tensor]:
    """Return inputs with which `run` does not raise LnrewriteError.

    Free sizes are small numbers; that one is the sum of two others (a cache's length and the new tokens') is found by
    trying. Raises LnrewriteError LN020 where nothing that is tried runs, LN039 where an input is declared too large.
    """
    first = ""
    for sizes in itertools.islice(_sizes(model), TRIALS):
        inputs = drawn(model, sizes)
        try:
            run(inputs)
        except LnrewriteError as error:
            first = first or error.why
            continue
        return inputs
    shapes = " ".join(f"--input '{n}={_word(v)}[{','.join(map(str, _dims(v)))}]'" for n, v in given(model).items())
    raise LnrewriteError(Code.LN020, "inputs", f"made-up inputs do not run: {first}", f"give them, such as {shapes}")


def drawn(model: ir.Model, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Tensor]:
    """Draw inputs of these sizes: ids below their table's rows, other integers ones, floats normal, booleans true."""
    generator = torch.Generator().manual_seed(seed)
    limits = id_limits(model)
    inputs = {}
    for name, value in given(model).items():
        shape = [d if isinstance(d, int) else sizes[d] for d in _dims(value)]
        if min(shape, default=0) < 0 or prod(shape) > MOST:
            why = f"{name} is declared {_dims(value)}; inputs of up to {MOST} numbers are made up"
            raise LnrewriteError(Code.LN039, "inputs", why, "check the sizes that the file declares for its inputs")
        dtype = TORCH.get(value.dtype, torch.float32) if value.dtype is not None else torch.float32
        if dtype.is_floating_point:
            inputs[name] = torch.randn(shape, generator=generator).to(dtype)
        elif dtype is torch.bool or name not in limits:
            inputs[name] = torch.ones(shape, dtype=dtype)
        else:
            inputs[name] = torch.randint(limits[name], shape, generator=generator).to(dtype)
    return inputs


def resized(model: ir.Model, inputs: Mapping[str, Tensor]) -> Iterator[Sizes]:
    """Yield further sizes of the free dimensions: a row more, a token more; sums of sizes stay sums."""
    sizes: Sizes = {}
    for name, value in given(model).items():
        sizes.update({d: n for d, n in zip(_dims(value), inputs[name].shape, strict=True) if isinstance(d, str)})
    sums = _sums(sizes)
    free = [s for s in sizes if s not in sums]
    for count in range(len(free), 0, -1):
        for chosen in itertools.combinations(free, count):
            new = {s: n + (s in chosen) for s, n in sizes.items()}
            yield {s: sum(new[p] for p in sums[s]) if s in sums else n for s, n in new.items()}


def id_limits(model: ir.Model) -> dict[str, int]:
    """Return how many rows the table has that each integer input looks up, straight or through casts and shapes."""
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
                elif node.op_type in {"Cast", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Clip", "Max", "Min"}:
                    todo += node.outputs
    return limits


def _dims(value: ir.Value) -> list[int | str]:
    """Return an input's sizes: numbers, or names; one without a name gets its place."""
    dims = value.shape if value.shape is not None else ()
    return [f"{value.name}.{i}" if (held := size(d)) is None else held for i, d in enumerate(dims)]


def _word(value: ir.Value) -> str:
    return str(TORCH.get(value.dtype, torch.float32)).removeprefix("torch.") if value.dtype else "float32"


def _sizes(model: ir.Model) -> Iterator[Sizes]:
    """Yield sizes of the free dimensions to try: the first of most inputs is 2, others are small and different."""
    dims = [_dims(v) for v in given(model).values()]
    names = list(dict.fromkeys(d for each in dims for d in each if isinstance(d, str)))
    first = [each[0] for each in dims if each and isinstance(each[0], str)]
    batch = max(first, key=first.count) if first else ""
    base = {name: (6 << i) - 1 for i, name in enumerate(n for n in names if n != batch)}  # 5, 11, 23: no sums by chance
    base |= {batch: 2} if batch else {}
    written = {n: n.replace(" ", "").split("+") for n in names if "+" in n}
    base |= {n: sum(int(p) if p.isdigit() else base.get(p, 0) for p in parts) for n, parts in written.items()}
    others = [n for n in names if n != batch]
    pairs = ((n, p) for n in reversed(others) for p in itertools.combinations([m for m in others if m != n], 2))
    sums = [{name: base[a] + base[b]} for name, (a, b) in pairs]
    known = [{name: size} for name in reversed(others) for size in _divisors(model)]  # such as a head's size
    both = [{**b, **a} for a in sums for b in known if not a.keys() & b.keys()]
    for rows in (2, 1):  # some decoders take one row when they are given a past
        for change in ({}, *sums, *known, *both):
            yield base | change | ({batch: rows} if batch else {})
    yield base | dict.fromkeys(others, 8)
    yield dict.fromkeys(names, 1)


def _divisors(model: ir.Model) -> list[int]:
    """Return the powers of two, from 8 to 256, that divide a size of a weight."""
    sizes = {d for v in model.graph.initializers.values() for d in v.shape or () if isinstance(d, int)}
    return [n for n in (64, 128, 16, 32, 8, 256) if any(d % n == 0 for d in sizes)]


def _sums(sizes: Sizes) -> dict[str, tuple[str, str]]:
    """Return which sizes are the sum of two others."""
    pairs = list(itertools.combinations(sizes, 2))
    return {s: p for s, n in sizes.items() for p in pairs if s not in p and sizes[p[0]] + sizes[p[1]] == n}
