"""Spell what is multiplied by a gain before it is divided by its own size as a norm, and the gain behind it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.fx.node import Argument, Target

from ...compat.torch import operator_name, sizes_of
from .sums import Spelled, made

aten = torch.ops.aten
SIZE = {"rsqrt", "sqrt", "reciprocal", "add", "mean", "sum", "pow", "square", "mul", "linalg_vector_norm", "_to_copy"}
"""What a size is computed by, from one value."""


def sized(node: fx.Node) -> Spelled:
    """(g x) s = g (x s), where s is a size of x alone and g, of x's shape, is computed from data (SeeDNorm)."""
    pairs = [node.args[:2]] + [node.args[1::-1]] * (node.target is aten.mul.Tensor)
    for value, size in pairs:
        for gain, x in _factors(value):
            if _whole(node, gain) and _whole(node, x) and _of(size, x):
                normed = made(node, node.target, x, size)  # type: ignore[arg-type]
                return aten.mul.Tensor, (gain, normed), {}
    return node.target, node.args, node.kwargs


def _factors(value: Argument) -> list[tuple[Argument, Argument]]:
    """Return the two orders of a product that nothing else reads."""
    if not isinstance(value, fx.Node) or value.target is not aten.mul.Tensor or len(value.users) != 1:
        return []
    one, two = value.args
    return [] if one is two else [(one, two), (two, one)]


def _whole(node: fx.Node, factor: Argument) -> bool:
    """Return whether a factor is a computed value of the product's shape."""
    return (
        isinstance(factor, fx.Node)
        and factor.op == "call_function"
        and sizes_of(factor.meta["val"]) == sizes_of(node.meta["val"])
    )


def _of(size: Argument, x: Argument) -> bool:
    """Return whether a value, one number a token, is a size of x."""
    if not (isinstance(size, fx.Node) and isinstance(x, fx.Node)) or sizes_of(size.meta["val"])[-1:] != (1,):
        return False
    for _ in range(10):
        inner = set(size.all_input_nodes)
        if size is x or len(inner) != 1 or operator_name(size.target) not in SIZE:
            return size is x
        size = inner.pop()
    return False


SIZED: dict[Target, Callable[[fx.Node], Spelled]] = {aten.mul.Tensor: sized, aten.div.Tensor: sized}
