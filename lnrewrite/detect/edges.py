"""Follow the stream's channel axis to the linear maps at the edges of a branch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from math import prod

from ..ir import Linear
from .graph import CASTS, SHAPE, Op, Operand, OpGraph

PRODUCTS = frozenset({"matmul", "mm", "bmm"})
PASS = CASTS | {"dropout"}
RESIZED = ("upsample_", "_upsample_")
"""Operators that interpolate each channel [.., channels, places ..] by itself, with weights whose sum is one."""


@dataclass(frozen=True, slots=True)
class LinearEdge:
    """Hold the linears found at one edge of a branch, and the first ops behind which no linear could be followed.

    `path` are the ops that were followed, the linears among them.
    """

    linears: tuple[Linear, ...]
    others: tuple[str, ...]
    path: frozenset[str] = frozenset()


def moved(graph: OpGraph, op: Op, axis: int, back: bool = False) -> int | None:
    """Return where a shape op moves a (negative) axis of its input; `back`: where an axis of its output comes from."""
    if not op.data:  # a number that is spread
        return None
    source, target = graph[op.data[0]].shape or (), op.shape or ()
    if not source or not target:  # of unknown rank
        return None
    if op.kind == "permute":
        order = _order(op, len(target))
        return order[axis] - len(target) if back else order.index(axis + len(target)) - len(target)
    if op.kind == "gather":
        axes, rank = op.numbers("axes"), len(source)
        return axis if axis + rank not in axes and axis > max(a - rank for a in axes) else None
    if op.kind == "slice":
        cut = int(op.number("axis"))
        cut = cut - len(source) if cut >= 0 else cut
        if "drop" not in op.attrs:
            return axis if cut != axis or source[axis] == target[axis] else None
        if cut == axis and not back:
            return None
        return axis if cut < axis else (axis - 1 if back else axis + 1)
    if op.kind in {"roll", "pad", "flip"}:
        return axis if op.axes is not None and axis + len(source) not in op.axes else None
    if op.kind == "expand":
        return axis if -axis <= min(len(source), len(target)) and source[axis] == target[axis] else None
    old, new = (target, source) if back else (source, target)
    same = [j for j in range(-len(new), 0) if new[j] == old[axis] and _right(new, j) == _right(old, axis)]
    return same[-1] if same else None


def _order(op: Op, rank: int) -> list[int]:
    if "order" in op.attrs:
        return [a % rank for a in op.numbers("order")]
    order = list(range(rank))
    a, b = op.numbers("swap")
    order[a], order[b] = order[b], order[a]
    return order


def _right(shape: tuple[int | str, ...], axis: int) -> tuple[int, tuple[str, ...]]:
    """Return the extent to the right of an axis: the product of its numbers, and its symbols."""
    tail = shape[axis:][1:]
    return prod(d for d in tail if isinstance(d, int)), tuple(sorted(d for d in tail if isinstance(d, str)))


def parameter(graph: OpGraph, name: Operand, axis: int) -> tuple[str, int, bool] | None:
    """Return (parameter, its axis, whether it is read as it is) behind a weight operand's axis, or None."""
    whole = True
    while isinstance(name, str):
        op = graph[name]
        if op.kind == "param":
            return str(op.attrs["param"]), axis + len(op.shape or ()), whole
        if len(graph.users[name]) > 1:
            return None
        if op.kind in CASTS:
            name = op.inputs[0]
        elif op.data and (op.kind in SHAPE or op.kind == "gather"):
            before = moved(graph, op, axis, back=True)
            if before is None:
                return None
            every = op.kind != "gather" and _numbers(graph, name) == _numbers(graph, op.data[0])
            axis, name, whole = before, op.inputs[0], whole and every
        else:
            return None
    return None


def parameter_behind(graph: OpGraph, name: Operand) -> str | None:
    """Return the parameter that a value holds number by number, through casts and reshapes."""
    first = name
    while isinstance(name, str):
        op = graph[name]
        if op.kind == "param":
            return str(op.attrs["param"]) if _numbers(graph, str(first)) == _numbers(graph, name) else None
        if op.kind not in {"cast", "reshape", "expand"}:
            return None
        name = op.inputs[0]
    return None


def _numbers(graph: OpGraph, name: str) -> int:
    """Return how many numbers a value holds, as far as its sizes are known."""
    return prod(d for d in graph[name].shape or () if isinstance(d, int))


def whole_vector(graph: OpGraph, name: Operand) -> str | None:
    """Return the parameter that is a linear map's bias, whole and one number for each output."""
    found = parameter(graph, name, -1)
    shape = graph[name].shape or () if isinstance(name, str) else ()
    return found[0] if found and found[2] and all(d == 1 for d in shape[:-1]) else None


def _linear(graph: OpGraph, op: Op, weight: Operand, axis: int, exact: bool, writes: bool = False) -> Linear | None:
    """Return a map by a parameter; a writer's bias must be one too, or else it would be left as it is."""
    found = parameter(graph, weight, axis)
    if found is None:
        return None
    param, place, whole = found
    bias = op.inputs[2] if len(op.inputs) > 2 and op.kind not in {"bmm", "mm"} else None
    named = whole_vector(graph, bias)
    if writes and bias is not None and named is None:
        return None
    exact = exact and whole and (bias is None or named is not None)
    return Linear(param, place, named, exact=exact, node=op.name)


def counted(graph: OpGraph, linear: Linear) -> Linear:
    """Return a linear map with the number of places in the graph that use its parameter (or bias)."""
    return replace(linear, uses=max(graph.uses[n] for n in (linear.param, linear.bias) if n))


def _flat(graph: OpGraph, name: Operand) -> bool:
    """Return whether a weight is one matrix, behind which there is a place for a bias."""
    return isinstance(name, str) and len(graph[name].shape or ()) < 3


def read(graph: OpGraph, op: Op, value: str, axis: int) -> Linear | None:
    """Return the linear map by which `op` contracts `axis` of `value` with a parameter, or None."""
    if op.kind == "linear" and op.inputs[0] == value and axis == -1:
        return _linear(graph, op, op.inputs[1], -1, True)
    if op.kind in PRODUCTS and op.inputs[0] == value and axis == -1:
        return _linear(graph, op, op.inputs[1], -2, _flat(graph, op.inputs[1]))
    if op.kind in PRODUCTS and op.inputs[1] == value and axis == -2:
        return _linear(graph, op, op.inputs[0], -1, False)
    if op.kind == "conv" and op.inputs[0] == value and axis == 1 - len(graph[value].shape or ()):
        rank, groups = len(graph[value].shape or ()), op.attrs["groups"]
        depthwise = groups == graph.width(value, axis)
        if groups == 1 or depthwise:
            exact = not (op.attrs["padded"] or depthwise)
            found = _linear(graph, op, op.inputs[1], -rank if depthwise else 1 - rank, exact)
            return replace(found, apart=True) if found and depthwise and groups != 1 else found
    return None


def written(graph: OpGraph, op: Op, axis: int, mixing: bool = True) -> Linear | None:
    """Return the linear map by which `op` produces `axis` of its output from a parameter, or None."""
    if op.kind == "linear" and axis == -1:
        return _linear(graph, op, op.inputs[1], -2, True, writes=True)
    if op.kind in PRODUCTS and axis == -1:
        return _linear(graph, op, op.inputs[1], -1, _flat(graph, op.inputs[1]), writes=True)
    if op.kind in PRODUCTS and axis == -2:
        return _linear(graph, op, op.inputs[0], -2, False, writes=True)
    if op.kind == "conv" and axis == 1 - len(op.shape or ()) and (op.attrs["groups"] == 1 or not mixing):
        return _linear(graph, op, op.inputs[1], -len(op.shape or ()), True, writes=True)
    return None


def readers(graph: OpGraph, start: str, axis: int, within: Collection[str] | None = None) -> LinearEdge:
    """Return every consumer of `start` (inside `within`): the linears that read `axis`, and the others by name."""
    linears: dict[str, Linear] = {}
    others: list[str] = []
    todo = [(start, axis, True)]
    while todo:
        value, at, exact = todo.pop(0)
        for user in graph.users[value]:
            if user == "output" or (within is not None and user not in within):
                others += ["output"] if within is None else []
                continue
            op = graph[user]
            linear = read(graph, op, value, at)
            if linear is not None:
                linears[user] = linear if exact else replace(linear, exact=False)
            elif (step := _onward(graph, op, value, at)) is not None:
                todo.append((user, step[0], exact and step[1]))
            else:
                others.append(user)
    return LinearEdge(tuple(linears.values()), tuple(dict.fromkeys(others)))


def _onward(graph: OpGraph, op: Op, value: str, axis: int) -> tuple[int, bool] | None:
    """Return where the channel axis goes through a transparent op, and whether a shift passes unchanged."""
    if op.kind in PASS or _resized(graph, op, axis):
        return axis, True
    if (op.kind in SHAPE or op.kind == "gather") and op.inputs[0] == value:
        after = moved(graph, op, axis)
        return None if after is None else (after, op.kind != "pad")
    if op.kind in {"mean", "sum"} and (after := _reduced(op, len(graph[value].shape or ()), axis)) is not None:
        return after, op.kind == "mean"
    if op.kind in {"mul", "div"} and op.inputs[0] == value and graph.is_scalar(op.inputs[1]):
        return axis, False
    if op.kind == "mul" and op.inputs[1] == value and graph.is_scalar(op.inputs[0]):
        return axis, False
    return None


def _resized(graph: OpGraph, op: Op, axis: int) -> bool:
    """Return whether an operator interpolates over places alone: the axes behind the channels."""
    return op.kind.startswith(RESIZED) and len(op.data) == 1 and axis == 1 - len(op.shape or ())


def _reduced(op: Op, rank: int, axis: int) -> int | None:
    """Return where an axis goes through a reduction over others; None where it is reduced itself."""
    gone = {a - rank if a >= 0 else a for a in op.axes} if op.axes else set(range(-rank, 0))
    if axis in gone:
        return None
    return axis if op.attrs["keepdim"] else axis + sum(a > axis for a in gone)


def writers(
    graph: OpGraph,
    end: str,
    axis: int,
    within: Collection[str] | None = None,
    width: int = 0,
    mixing: bool = True,
) -> LinearEdge:
    """Return the linears (inside `within`) whose sum makes up `axis` of `end`, and what else does or takes a part.

    Whatever linear map of the channels follows them follows the sum: no factor on the way tells one channel from
    another. Tables that are looked up and parameters that are added count as linears. `width`: follow the axis into a
    larger one of which it is the fast part (heads). Without `mixing`, a convolution in groups counts too: it can take
    a factor for each channel, not a mixture of channels.
    """
    linears: dict[str, Linear] = {}
    others: list[str] = []
    todo, seen = [(end, axis, True)], set()
    while todo:
        name, at, exact = todo.pop(0)
        if name in seen:
            continue
        seen.add(name)
        op = graph[name]
        held = within is None or name in within or name in graph.constant
        linear = (written(graph, op, at, mixing) or _rows(graph, op, at)) if held else None
        if linear is not None:
            linears[name] = linear if exact else replace(linear, exact=False)
            continue
        steps = list(_backward(graph, op, at, width)) if held else []
        todo += [(source, place, exact and whole) for source, place, whole in steps]
        if not steps:
            others.append(name)
    passing = seen - set(linears)  # a linear that reads a term of the sum is another reader
    strays = [u for n in seen - {end} for u in graph.users[n] if u not in passing and graph[n].kind != "param"]
    return LinearEdge(tuple(linears.values()), tuple(dict.fromkeys([*others, *strays])), frozenset(seen - set(others)))


def _rows(graph: OpGraph, op: Op, axis: int) -> Linear | None:
    """Return the table that `op` looks rows up in, or the parameter that it is."""
    if op.kind == "embedding" and axis == -1:
        found = parameter(graph, op.inputs[0], -1)
    else:
        found = parameter(graph, op.name, axis) if op.kind == "param" else None
    return Linear(found[0], found[1], table=True, node=op.name) if found else None


def _backward(graph: OpGraph, op: Op, axis: int, width: int) -> Iterator[tuple[str, int, bool]]:
    """Yield (operand, axis, whether a shift passes) for the operands that any linear map of `axis` passes on to."""
    if not op.data:
        return
    if op.kind in PASS or _resized(graph, op, axis):
        yield op.data[0], axis, True
    elif op.kind in SHAPE or op.kind == "gather":
        before = moved(graph, op, axis, back=True)
        if before is None and op.kind == "reshape" and width and axis == -1:
            whole = graph.width(op.data[0])
            before = -1 if whole and graph.width(op.name) == width and whole % width == 0 else None
        if before is not None:
            yield op.data[0], before, op.kind != "pad"
    elif op.kind in {"mul", "div"}:
        for i, name in enumerate(op.inputs[: 1 if op.kind == "div" else 2]):
            other = op.inputs[1 - i]
            if isinstance(name, str) and name not in graph.constant and _commutes(graph, other, axis):
                yield name, axis, False
                return
    elif op.kind == "add":
        terms = [n for n in op.data if len(graph[n].shape or ()) >= -axis and graph.width(n, axis) != 1]
        if len(terms) == len(op.inputs):
            yield from ((n, axis, True) for n in terms)
    elif op.kind == "cat":
        if all(graph.width(n, axis) == graph.width(op.name, axis) for n in op.data):
            yield from ((n, axis, True) for n in op.data)
    elif op.kind == "sum" and op.axes:
        rank = len(graph[op.data[0]].shape or ())
        axes = sorted(a % rank for a in op.axes)
        if len(axes) == 1 and not op.attrs["keepdim"]:
            place = axis + rank - 1
            place = place if place < axes[0] else place + 1
            yield op.data[0], place - rank, False


def _commutes(graph: OpGraph, factor: Operand, axis: int) -> bool:
    """Return whether a factor acts alike on all channels."""
    if not isinstance(factor, str) or graph.is_scalar(factor):
        return True
    shape = graph[factor].shape or ()
    return len(shape) < -axis or shape[axis] == 1
