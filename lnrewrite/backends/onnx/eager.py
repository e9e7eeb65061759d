"""Attention that a model writes out: products, a softmax, and what it does to the scores between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ...compat.torch import operator_name

PRODUCT = {"matmul", "bmm"}
ALONE = {"mul", "div", "tanh", "_to_copy"}
"""Operators that the scores alone go through, with a number at most."""
POINTS = (-60.0, -7.0, -1.0, -0.1, 0.2, 3.0, 40.0)


@dataclass(frozen=True, slots=True)
class Written:
    """Hold the parts of an attention: softmax(f(q key^T) + mask) value, f(z) = cap tanh(z scale / cap), or z scale."""

    q: fx.Node
    key: fx.Node
    value: fx.Node
    mask: fx.Node | None
    scale: float
    cap: float


def written(node: fx.Node) -> Written | None:
    """Return what a product with values computes as attention; None for any other node."""
    if operator_name(node.target) not in PRODUCT or len(node.all_input_nodes) != 2:
        return None
    weights, value = node.all_input_nodes
    while operator_name(weights.target) in ("_to_copy", "dropout", "type_as"):
        if operator_name(weights.target) == "dropout" and weights.args[2:] != (False,):
            return None
        weights = weights.all_input_nodes[0]
    if operator_name(weights.target) not in ("softmax", "_softmax") or weights.args[1] not in (-1, 3):
        return None
    scores = weights.all_input_nodes[0]
    if operator_name(scores.target) != "add" or len(scores.all_input_nodes) != 2:
        return None
    capped, mask = scores.all_input_nodes
    steps, product = list[fx.Node](), capped
    while operator_name(product.target) in ALONE and len(product.all_input_nodes) == 1:
        steps.append(product)
        product = product.all_input_nodes[0]
    if operator_name(product.target) not in PRODUCT or len(product.all_input_nodes) != 2:
        return None
    q, turned = product.all_input_nodes
    if operator_name(turned.target) != "transpose" or turned.args[1:] not in ((2, 3), (-1, -2), (-2, -1)):
        return None
    made = _fit(steps[::-1])
    return None if made is None else Written(q, turned.all_input_nodes[0], value, mask, *made)


def _fit(steps: list[fx.Node]) -> tuple[float, float] | None:
    """Return (scale, cap) of what is done to scores, cap 0 where there is none; None where it is something else."""

    def through(z: Tensor) -> Tensor:
        for step in steps:
            args = [z if isinstance(a, fx.Node) else a for a in step.args]
            z = z if operator_name(step.target) == "_to_copy" else step.target(*args)  # type: ignore[operator]
        return z

    scale = float(through(torch.tensor(1e-6, dtype=torch.float64))) * 1e6
    largest = float(through(torch.tensor(1e12, dtype=torch.float64)))
    cap = 0.0 if abs(largest - scale * 1e12) <= 1e-6 * abs(largest) else largest
    points = torch.tensor(POINTS, dtype=torch.float64)
    wanted = cap * torch.tanh(points * scale / cap) if cap else points * scale
    return (scale, cap) if scale > 0 and torch.allclose(through(points), wanted, rtol=1e-6, atol=1e-9) else None
