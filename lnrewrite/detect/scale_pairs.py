"""Find the scale pairs of a branch: linears whose output's scale passes unchanged to other linears, and nowhere else.

The linear arm of a gated MLP, the two linears around a ReLU, the value and output projections of attention: what the
first is multiplied by can be divided out of the second, W2 relu(W1 x) = (k W2) relu(W1 x / k).
"""

from __future__ import annotations

from collections.abc import Collection

from ..ir import ScalePair
from .edges import moved, read, written
from .graph import CASTS, SHAPE, Op, OpGraph

POSITIVE = frozenset({"relu", "leaky_relu"})
"""Activations with f(k x) = k f(x) for k > 0."""
PRODUCTS = frozenset({"matmul", "bmm", "mm"})


def find_scale_pairs(graph: OpGraph, region: Collection[str], closed: Collection[str]) -> list[ScalePair]:
    """Return the scale pairs inside a branch, in order; `closed` are the members of norms, which see no scale."""
    found = []
    for name in sorted(set(region) - set(closed), key=graph.index.__getitem__):
        pair = _follow(graph, graph[name], region, closed)
        if pair:
            found.append(pair)
    return found


def _follow(graph: OpGraph, producer: Op, region: Collection[str], closed: Collection[str]) -> ScalePair | None:
    linear = written(graph, producer, -1)
    if linear is None or linear.table:
        return None
    consumers, values = {}, {producer.name: None}
    todo: list[tuple[str, int | None, int]] = [(producer.name, -1, 0)]
    runs = set()
    while todo:
        value, axis, run = todo.pop()
        for user in graph.users[value]:
            if user not in region or user in closed:
                return None
            op = graph[user]
            if consumer := read(graph, op, value, -1):
                consumers[user] = consumer
                runs.add(run if axis == -1 and not consumer.apart else 0)
            elif (step := _onward(graph, op, value, axis, run, producer.name)) is not None:
                if user not in values:
                    values[user] = None
                    todo.append((user, *step))
            else:
                return None
    if not consumers:
        return None
    run = runs.pop() if len(runs) == 1 else 0
    return ScalePair((linear,), tuple(dict.fromkeys(consumers.values())), run, tuple(values))


def _onward(
    graph: OpGraph, op: Op, value: str, axis: int | None, run: int, producer: str
) -> tuple[int | None, int] | None:
    """Return (channel axis, channels of a head) behind an op that passes a positive factor on; axis None: lost."""
    if op.kind in CASTS | {"dropout"}:
        return axis, run
    if op.kind in SHAPE | {"gather"} and op.inputs[0] == value:
        return _turned(graph, op, axis, run)
    if op.kind in POSITIVE:
        return None, 0
    others = [n for n in op.data if n != value]
    if any(graph.reaches(producer, n) for n in others) or op.data.count(value) != 1:
        return None
    if op.kind == "mul" or (op.kind == "div" and op.inputs[0] == value):
        return (axis, run) if not others or graph.is_scalar(others[0]) else (None, 0)
    if op.kind in PRODUCTS and others and op.inputs[1] == value:
        return (axis if axis == -1 else None), run
    if op.kind == "scaled_dot_product_attention" and op.inputs[2] == value:
        return (axis if axis == -1 else None), run
    return None


def _turned(graph: OpGraph, op: Op, axis: int | None, run: int) -> tuple[int | None, int]:
    """Follow the channel axis through a shape op, into heads and out of them."""
    if axis is None:
        return None, 0
    after = moved(graph, op, axis)
    if after is not None:
        return after, run
    size, whole = graph.width(op.name), graph.width(op.data[0])
    if op.kind == "reshape" and axis == -1 and size and whole:
        if whole % size == 0 and run in (0, size):
            return -1, size
        if size % whole == 0 and run in (0, whole):
            return -1, run or whole
    return None, 0
