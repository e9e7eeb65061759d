"""Find the sizes at which a module computes something else than its capture, and assert in the graph that none is met.

A forward may choose by the sizes of its inputs. torch.export follows the example's and notes what it took for granted
(`T <= 16`); that a dynamic size is not 1 it always takes for granted. Mostly that is a limit, beyond which the module
fails too, or a matter of how and not of what. So the module is run where a guard does not hold, and at sizes of 1;
where it runs, and gives something else, the graph asserts what was taken for granted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from sympy.core.relational import Relational
from torch import fx, nn

from ...compat.torch import guards, pytree, sizes_of
from ..inputs import resized
from .checked import away, has_no_numbers, run
from .fixed import ASSERT, FIXED, mark
from .module import Args, CapturedModule, Kwargs

aten = torch.ops.aten
Sizes = dict[str, int]
FURTHEST, LARGEST = 1 << 13, 1 << 20
"""A module is run at sizes, and on inputs of as many numbers, no larger than these."""
RELATIONS: dict[type, Callable[..., object]] = {
    sympy.LessThan: aten.le.Tensor, sympy.StrictLessThan: aten.lt.Tensor, sympy.GreaterThan: aten.ge.Tensor,
    sympy.StrictGreaterThan: aten.gt.Tensor, sympy.Equality: aten.eq.Tensor, sympy.Unequality: aten.ne.Tensor,
}  # fmt: skip


def guard(module: nn.Module, captured: CapturedModule, args: Args, kwargs: Kwargs) -> None:
    """Assert in a captured graph, in place, what sizes its computation takes for granted, where the module's does not.

    args, kwargs: what it was captured with.
    """
    sizes = _sizes(captured, args, kwargs)
    if not sizes or has_no_numbers(captured):
        return
    ones = [sympy.Ne(sympy.Symbol(name), 1) for name in sizes]
    taken_for_granted = (each for each in guards(captured) if isinstance(each, Relational))
    for taken in sorted((*taken_for_granted, *ones), key=lambda each: each.count_ops()):  # plain ones tell the others
        for other in _others(taken, sizes):
            found = _differs(module, captured, *_at(captured, args, kwargs, other))
            if found is not None:  # it ran there
                if found:
                    _assert(captured, taken)
                break


def _places(captured: CapturedModule) -> Iterator[tuple[str, fx.Node, int]]:
    """Yield each dynamic size, with an input and an axis that has it."""
    for node in captured.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for axis, size in enumerate(sizes_of(value) if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, str):
                yield size, node, axis


def _shapes(captured: CapturedModule, args: Args, kwargs: Kwargs) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the tensors of a call beside those, without numbers, that the graph takes for them."""
    held = [node.meta.get("val") for node in captured.graph.find_nodes(op="placeholder")]
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    yield from zip(given, [value for value in held if isinstance(value, torch.Tensor)], strict=False)


def _sizes(captured: CapturedModule, args: Args, kwargs: Kwargs) -> Sizes:
    """Return each dynamic size as the example has it."""
    found: Sizes = {}
    for given, like in _shapes(captured, args, kwargs):
        found |= {d: n for d, n in zip(sizes_of(like), given.shape, strict=False) if isinstance(d, str)}
    return found


def _others(taken: sympy.Basic, sizes: Sizes) -> Iterator[Sizes]:
    """Yield sizes, one of them another, at which a guard does not hold, the nearest first."""
    symbols = {str(s): s for s in taken.free_symbols}
    if not symbols.keys() <= sizes.keys():
        return
    for name in symbols:
        for _, size in sorted((abs(n - sizes[name]), n) for n in {*range(1, 65), *_limit(taken)}):
            other = {**sizes, name: size}
            if size <= FURTHEST and _fails(taken, {s: other[n] for n, s in symbols.items()}):
                yield other
                break


def _fails(taken: sympy.Basic, sizes: dict[sympy.Basic, int]) -> bool:
    try:
        return bool(taken.subs(sizes) == sympy.false)
    except (ArithmeticError, AssertionError, TypeError, ValueError):  # such as a remainder by nothing
        return False


def _limit(taken: sympy.Basic) -> tuple[int, ...]:
    """Return the numbers of a guard and their neighbors: what is beyond it lies there."""
    return tuple(int(n) + more for n in taken.atoms(sympy.Integer) for more in (-1, 0, 1) if int(n) + more > 0)


def _at(captured: CapturedModule, args: Args, kwargs: Kwargs, sizes: Sizes) -> tuple[Args, Kwargs]:
    """Return a call's inputs at other sizes."""
    wanted = {
        id(given): [
            d if isinstance(d, int) else sizes.get(d, n) for d, n in zip(sizes_of(like), given.shape, strict=False)
        ]
        for given, like in _shapes(captured, args, kwargs)
    }
    made: tuple[Args, Kwargs] = pytree.tree_map_only(
        torch.Tensor, lambda t: resized(t, wanted.get(id(t), list(t.shape))), (args, kwargs)
    )
    return made


def _differs(module: nn.Module, captured: CapturedModule, args: Args, kwargs: Kwargs) -> bool | None:
    """Return whether a capture computes something else; None where the module does not run, or is not to be run."""
    if any(t.numel() > LARGEST for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)):
        return None
    try:
        want = run(module, args, kwargs)
    except Exception:  # the module's own code, at sizes that it does not take
        return None
    try:
        got = run(captured, args, kwargs)
    except Exception:  # it says so itself
        return False
    return bool(away(module, captured, want, got, args, kwargs))


def _assert(captured: CapturedModule, taken: sympy.Basic) -> None:
    """Assert a guard in a graph, in words of its inputs."""
    places = {name: (node, axis) for name, node, axis in reversed(list(_places(captured)))}
    words = {name: sympy.Symbol(f"{node.target}.shape[{axis}]") for name, (node, axis) in places.items()}
    told: Any = taken.subs({s: words[str(s)] for s in taken.free_symbols})
    text = FIXED + f"`{told.lhs} {told.rel_op} {told.rhs}`"
    graph = captured.graph
    with graph.inserting_before(graph.output_node()):
        try:
            graph.call_function(ASSERT, (_written(graph, taken, places), text))
        except LookupError:  # more than sums and products
            mark(captured, text.removeprefix(FIXED))
    captured.recompile()


def _written(graph: fx.Graph, taken: sympy.Basic, places: dict[str, tuple[fx.Node, int]]) -> fx.Node:
    """Write a guard on scalar tensors. Raises LookupError for what is more than sums, products and remainders."""
    if isinstance(taken, (sympy.Symbol, sympy.Integer)):
        size = int(taken) if taken.is_Integer else graph.call_function(aten.sym_size.int, places[str(taken)])
        node = graph.call_function(aten.scalar_tensor.default, (size,), {"dtype": torch.int64})
        node.meta["val"] = torch.empty((), dtype=torch.int64, device="meta")
        return node
    name = type(taken).__name__
    operators = {"Add": aten.add.Tensor, "Mul": aten.mul.Tensor, "Mod": aten.remainder.Tensor}
    target = RELATIONS.get(type(taken)) or operators[name]
    first, *rest = (_written(graph, part, places) for part in taken.args)
    for other in rest:
        first = graph.call_function(target, (first, other))
        first.meta["val"] = torch.empty((), dtype=torch.bool if name not in operators else torch.int64, device="meta")
    return first
