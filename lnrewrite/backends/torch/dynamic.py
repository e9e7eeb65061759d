"""Find which axes of a captured module can be dynamic: batch and sequence, where a run at a second size agrees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from ...compat.torch import pytree, sizes_of
from ...errors import one_line, told
from ..inputs import resized
from .checked import alike, others, run
from .fixed import other_path
from .module import Args, CapturedModule, Kwargs, signature_of

TANGLED = 300
"""How many shapes may be computed by remainders of a dynamic size."""
Axes = Mapping[int, object] | None
"""The dynamic axes of one tensor."""
Shapes = Mapping[str, object] | Sequence[object] | None
"""Dynamic shapes as torch.export takes them."""
Trace = Callable[..., CapturedModule]
"""Capture a module with dynamic shapes as torch.export takes them; raises what torch.export raises, and TangledError
where more shapes than its second argument says (None: any number) are computed by remainders."""


class TangledError(Exception):
    """Too many shapes of a program are computed by remainders of a dynamic size."""


def placeholders(module: CapturedModule) -> list[torch.Tensor]:
    """Return the tensors, without numbers, that a graph takes."""
    values = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
    return [v for v in values if isinstance(v, torch.Tensor)]


def _auto(value: object) -> Axes:
    """Mark batch and sequence of a tensor as dynamic where torch.export finds that they can be."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return None
    return dict.fromkeys(range(1 if value.dim() > 3 else min(2, value.dim())), Dim.AUTO)


def dynamic(module: nn.Module, args: Args, kwargs: Kwargs, notes: list[str], trace: Trace) -> CapturedModule:
    """Export with as many dynamic axes as hold: batch and sequence, batch alone, none."""
    every, fixed = pytree.tree_map(_auto, (args, kwargs)), list[str]()
    batch = pytree.tree_map_only(torch.Tensor, lambda t: {0: Dim.AUTO} if t.dim() else None, (args, kwargs))
    batch = pytree.tree_map(
        lambda v: v if isinstance(v, dict) else None,
        batch,
        is_leaf=lambda v: isinstance(v, dict) and bool(v) and all(isinstance(k, int) for k in v),
    )
    why, specs = "", [every, batch]
    while specs:
        spec = specs.pop(0)
        try:
            captured = trace((*spec[0], *spec[1].values()), None if spec is batch else TANGLED)
        except TangledError as error:
            why = str(error)
            continue
        except Exception as error:  # torch.export may raise anything, and so may the module
            why = f"with other sizes {one_line(told(error)):.160}"
            continue
        if holds(module, captured, args, kwargs):
            notes += [f"the sequence length is fixed: {why}"] if spec is batch else fixed
            return captured
        why = "the model did not run, or differed, at a second size"
        if spec is every and (fixed := _numbers(captured)):
            leaves = iter(placeholders(captured))
            specs.insert(0, pytree.tree_map(lambda value, held=leaves: _free(value, held), (args, kwargs)))
    captured = trace(None)
    notes.append(f"batch and sequence length are fixed: {why}")
    return captured


def _numbers(captured: CapturedModule) -> list[str]:
    """Return notes on the axes of which torch.export made a number, and left it as a symbol."""
    found = [n for n in captured.graph.find_nodes(op="placeholder") if isinstance(n.meta.get("val"), torch.Tensor)]
    sizes = [(node.target, axis, size) for node in found for axis, size in enumerate(sizes_of(node.meta["val"]))]
    return [
        f"axis {axis} of {name} is fixed at {size}"
        for name, axis, size in sizes
        if str(size).isdigit() and not isinstance(size, int)
    ]


def _free(value: object, held: Iterator[torch.Tensor]) -> Axes:
    """Mark axes of a tensor as dynamic but those of which torch.export made a number."""
    if not isinstance(value, torch.Tensor):
        return None
    sizes = sizes_of(next(held))
    return {axis: Dim.AUTO for axis in _auto(value) or () if not str(sizes[axis]).isdigit()}


def untangled(program: ExportedProgram, most: int | None) -> ExportedProgram:
    """Return a program, unless more than `most` of its values have shapes computed by remainders of a dynamic size.

    That is padding to chunks in unrolled loops. Each costs some 20 ms whenever the program is traced again, as
    decomposing it does: two layers of a chunked linear attention take a minute. Raises TangledError.
    """
    if most is None:
        return program
    values = [n.meta.get("val") for n in program.graph.nodes]
    many = sum(any("Mod(" in str(d) for d in v.shape) for v in values if isinstance(v, torch.Tensor))
    if many > most:
        raise TangledError(f"{many} shapes depend on it by remainders, too many to follow")
    return program


def holds(module: nn.Module, captured: CapturedModule, args: Args, kwargs: Kwargs) -> bool:
    """Run both at a second size of every dynamic axis, on other values where it takes them; say whether they agree."""
    if not symbols(captured) or any(t.is_meta for t in module.parameters()):
        return True
    for size in (lambda n: n - 1, lambda n: 2 * n):
        same = _resized(captured, args, kwargs, size)
        for more in (*others(captured, *same, count=1), same):
            try:
                want = run(module, *more)
            except Exception:  # the module's own code, on sizes or values that it does not take
                continue
            try:
                got = run(captured, *more)
            except Exception as error:
                if other_path(error):
                    continue
                return False
            pairs = zip(want, got, strict=True)
            return all(alike(a, b) and torch.allclose(a, b, 1e-3, 1e-4, equal_nan=True) for a, b in pairs)
    return False


def symbols(captured: CapturedModule) -> set[str]:
    """Return the names of the sizes that are dynamic."""
    return {size for leaf in placeholders(captured) for size in sizes_of(leaf) if isinstance(size, str)}


def _resized(captured: CapturedModule, args: Args, kwargs: Kwargs, other: Callable[[int], int]) -> tuple[Args, Kwargs]:
    """Return the inputs with every dynamic axis at another size: rows repeated or cut off."""
    s = signature_of(captured)
    shapes = dict(zip((*s.positional, *s.keywords), placeholders(captured), strict=False))

    def resize(name: str, value: object) -> object:
        if not isinstance(value, torch.Tensor) or name not in shapes:
            return value
        shape = list(value.shape)
        for axis, size in enumerate(sizes_of(shapes[name])):
            if isinstance(size, str):
                shape[axis] = max(2, other(shape[axis])) if axis else shape[0] + 1
        return resized(value, shape)

    new = {k: resize(k, v) for k, v in kwargs.items()}
    return tuple(resize(n, v) for n, v in zip(s.names, args, strict=False)), new
