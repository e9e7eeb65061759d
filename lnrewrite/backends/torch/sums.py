"""Spell what adds to a value, in whatever operator it does so, as an `add` of it and of what was computed before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx
from torch.fx.node import Argument, Target

from ...compat.torch import OpOverload, operator_name, sizes_of
from ...detect.factors import Expression
from ...detect.gathered import Gathered, gathered
from ...detect.graph import OpGraph
from .lift import lift

aten = torch.ops.aten
PRODUCTS = {"linear", "mm", "bmm", "matmul", "addmm", "einsum", "convolution", "conv1d", "conv2d"}
Spelled = tuple[Target, tuple[Argument, ...], dict[str, Argument]] | None
"""A call's target, arguments and keywords."""


def node_of(value: object) -> fx.Node:
    """Return an argument that is a node, as one."""
    assert isinstance(value, fx.Node)
    return value


def made(node: fx.Node, target: OpOverload, *args: Argument, **kwargs: Argument) -> fx.Node:
    """Return a new call right before `node`, in the same module; neither stands as such at a line of the source."""
    with node.graph.inserting_before(node):
        call = node.graph.call_function(target, args, kwargs)
    call.meta = {**node.meta, "custom": dict(node.meta.get("custom") or {})}
    for each in (node, call):
        each.meta.pop("stack_trace", None)
    with torch.no_grad():
        call.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
    return call


def _plus(node: fx.Node, x: Argument, *terms: Argument) -> Spelled:
    """Spell a node as x plus terms."""
    for term in terms[:-1]:
        x = made(node, aten.add.Tensor, x, term)
    return aten.add.Tensor, (x, terms[-1]), {}


def _times(node: fx.Node, value: Argument, by: Argument) -> Argument:
    return value if by == 1 else made(node, aten.mul.Tensor, value, by)


def _same(node: fx.Node) -> Spelled:
    return node.target, node.args, node.kwargs


def add(node: fx.Node) -> Spelled:
    """x + alpha f; and 0 + x, where Python's sum begins."""
    (x, f), alpha = node.args, node.kwargs.get("alpha", 1)
    if isinstance(f, int | float) and f == 0 and node.meta["val"].dtype == node_of(x).meta["val"].dtype:
        return None
    return _plus(node, x, _times(node, f, alpha)) if alpha != 1 and isinstance(f, fx.Node) else _same(node)


def minus(node: fx.Node) -> Spelled:
    """x - alpha f, or f - alpha x."""
    (x, f), alpha = node.args[:2], node.kwargs.get("alpha", 1)
    if node.target is aten.rsub.Tensor:
        x, f = f, x
    return (aten.sub.Tensor, (x, _times(node, f, alpha)), {}) if alpha != 1 and isinstance(f, fx.Node) else _same(node)


def scattered(node: fx.Node) -> Spelled:
    """x.scatter_add(d, i, f) = x + zeros.scatter_add(d, i, f), where f is computed from the state x by weights."""
    x, dim, index, f = node.args
    if not (isinstance(x, fx.Node) and isinstance(f, fx.Node) and _weighed(x, f)):
        return _same(node)
    zeros = made(node, aten.zeros_like.default, x)
    return _plus(node, x, made(node, aten.scatter_add.default, zeros, dim, index, f))


def _weighed(state: fx.Node, value: fx.Node) -> bool:
    """Return whether a value is computed from a state, and weights have a part in it."""
    todo, seen = [value], {value}
    while todo:
        new = {n for n in todo.pop().all_input_nodes if not n < state} - seen
        seen |= new
        todo += new
    return state in seen and any(operator_name(n.target) in PRODUCTS for n in seen)


def lerp(node: fx.Node) -> Spelled:
    """x + w (f - x) = (1 - w) x + w f."""
    x, f, w = node.args
    rest = 1 - w if isinstance(w, int | float) else made(node, aten.rsub.Scalar, w, 1)
    return _plus(node, _times(node, x, rest), _times(node, f, w))


def product(node: fx.Node) -> Spelled:
    """x + value a b, or x + value a / b."""
    x, a, b = node.args
    operator = aten.mul.Tensor if node.target is aten.addcmul.default else aten.div.Tensor
    return _plus(node, x, _times(node, made(node, operator, a, b), node.kwargs.get("value", 1)))


def matrices(node: fx.Node) -> Spelled:
    """beta x + alpha a @ b; a vector x is the bias of a linear map."""
    x, a, b = node.args
    if sizes_of(node_of(x).meta["val"]) != sizes_of(node.meta["val"]):
        return _same(node)
    found = made(node, aten.mm.default if node.target is aten.addmm.default else aten.bmm.default, a, b)
    beta, alpha = (node.kwargs.get(name, 1) for name in ("beta", "alpha"))
    return _plus(node, _times(node, x, beta), _times(node, found, alpha))


def _axes(dims: Argument, rank: int) -> list[int]:
    """Return axes counted from the front."""
    return [d % rank for d in dims if isinstance(d, int)] if isinstance(dims, Sequence) else []


def stacked(node: fx.Node) -> Spelled:
    """stack([x, f], d).sum(d), or its mean; cat([x[None], f[None]]) is a stack too."""
    stack, dims, *rest = node.args
    terms = _side_by_side(stack, dims) if isinstance(stack, fx.Node) and not rest and not node.kwargs else []
    if node.target is aten.mean.dim:
        terms = [made(node, aten.div.Tensor, term, len(terms)) for term in terms]
    return _plus(node, *terms) if len(terms) > 1 else _same(node)


def _side_by_side(stack: fx.Node, dims: Argument) -> list[Argument]:
    """Return what a stack that one node reads holds along an axis of its own, the one that is asked for."""
    if stack.target not in {aten.stack.default, aten.cat.default} or stack.kwargs or len(stack.users) > 1:
        return []
    (held, *at), rank = stack.args, stack.meta["val"].dim()
    axis = _axes(at or [0], rank)
    terms = list(held) if isinstance(held, Sequence) and _axes(dims, rank) == axis else []
    if stack.target is aten.stack.default:
        return terms
    views = [t for t in terms if isinstance(t, fx.Node) and t.target is aten.unsqueeze.default]
    return [v.args[0] for v in views if _axes(v.args[1:], rank) == axis] if len(views) == len(terms) else []


SUMS: dict[Target, Callable[[fx.Node], Spelled]] = {
    aten.add.Tensor: add, aten.lerp.Scalar: lerp, aten.lerp.Tensor: lerp, aten.addcmul.default: product,
    aten.addcdiv.default: product, aten.addmm.default: matrices, aten.baddbmm.default: matrices,
    aten.sum.dim_IntList: stacked, aten.mean.dim: stacked, aten.sub.Tensor: minus, aten.rsub.Tensor: minus,
    aten.scatter_add.default: scattered,
}  # fmt: skip


TRAINED = {aten.dropout.default, aten.detach.default}
"""Operators that hand their input on as it is, but not in training."""
WRITTEN = {"add": aten.add.Tensor, "sub": aten.sub.Tensor, "mul": aten.mul.Tensor, "div": aten.div.Tensor}


def gather(module: fx.GraphModule) -> None:
    """Write the sums of a module whose terms stand in several places, or are subtracted, as what they come to."""
    view = lift(module)
    nodes = {node.name: node for node in module.graph.nodes}
    for found in list(gathered(view)):
        total = nodes[found.total]
        values = _met(view, total, found)
        if values is None or not isinstance(found.comes_to, tuple):
            continue
        operator, *operands = found.comes_to
        arguments = [_written(total, operand, nodes | values) for operand in operands]
        total.target, total.args, total.kwargs = WRITTEN[str(operator)], tuple(arguments), {}
    module.graph.eliminate_dead_code(lambda node: node.op == "get_attr" or node.is_impure())


def _written(total: fx.Node, expression: Expression, values: Mapping[str, fx.Node]) -> Argument:
    """Write an expression right before a node."""
    if isinstance(expression, float):
        return expression
    if isinstance(expression, str):
        return values[expression]
    operator, *operands = expression
    first, *rest = (_written(total, operand, values) for operand in operands)
    if operator == "mask":
        return made(total, aten._to_copy.default, first, dtype=total.meta["val"].dtype)
    if isinstance(first, float) and operator == "sub":
        return made(total, aten.rsub.Scalar, *rest, first)
    if isinstance(first, float) and operator == "div":
        return made(total, aten.mul.Tensor, made(total, aten.reciprocal.default, *rest), first)
    return made(total, WRITTEN[str(operator)], *([first, *rest] if not isinstance(first, float) else [*rest, first]))


def _met(view: OpGraph, total: fx.Node, found: Gathered) -> dict[str, fx.Node] | None:
    """Return the nodes that a sum is made of, by name; None where training makes two of one, or drops of a part."""
    met: dict[str, fx.Node] = {}
    todo = list(total.all_input_nodes)
    while todo:
        node = todo.pop()
        while node.op == "call_function" and node.name in view.alias and node.target not in TRAINED:
            node = node_of(node.args[0])
        name = view.alias.get(node.name, node.name)
        if node.op == "get_attr":
            continue
        if name in found.names:
            if met.setdefault(name, node) is not node:
                return None
        elif name in found.region:
            if name != node.name:
                return None
            todo += node.all_input_nodes
    return met
