"""Tidy a graph whose attention kernels compute: weights as products read them, and one product for each attention.

    q = x W_q + b_q, k = x W_k + b_k, v = x W_v + b_v -> MultiHeadAttention(q, k, v, mask)
      ->  Attention(x, [W_q W_k W_v], [b_q b_k b_v], mask)

where queries, keys and values are products of the same tokens, or columns of one, and nothing else comes between.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .columns import Parts, gather_columns, read_off
from .flattening import keep_tokens_apart
from .norms import CONTRIB, HEADED, PACKED, resemble
from .packing import pack_heads, product, sizes, stored_as, turn_weights, unturned_norms

BIAS = 5
"""The input of both operators that is added to the scores."""


def tidy(model: ir.Model, whole: bool = False) -> None:
    """Tidy a graph in place. whole: let one operator compute attention with its products."""
    for step in (keep_tokens_apart, turn_weights, unturned_norms, gather_columns):
        step(model)
    if whole:
        attend_whole(model)
    pack_heads(model)


def attend_whole(model: ir.Model) -> None:
    """Let Attention compute queries, keys and values too, in place, wherever it can."""
    for node in [n for n in model.graph if (n.domain, n.op_type) == (CONTRIB, HEADED)]:
        others = [value for i, value in enumerate(node.inputs) if i > 2 and i != BIAS]
        if any(others) or len(node.outputs) > 1 or (found := _products(node.inputs[:3])) is None:
            continue
        parts, of = found
        weight, bias = _stored(model.graph, parts, np.concatenate(of))
        held = {name: node.attributes[name] for name in ("num_heads", "scale") if name in node.attributes}
        held["qkv_hidden_sizes"] = ir.AttrInt64s("qkv_hidden_sizes", [len(each) for each in of])
        given = [parts[0][0], weight, bias, None, None, *node.inputs[BIAS:]]
        made = ir.Node(CONTRIB, PACKED, given, held.values(), num_outputs=1, name=node.name)
        resemble(made.outputs[0], node.outputs[0])
        made.outputs[0].name = node.outputs[0].name
        model.graph.insert_before(node, made)
        node.outputs[0].replace_all_uses_with(made.outputs[0], replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
    RemoveUnusedNodesPass()(model)


def _products(ends: Sequence[ir.Value | None]) -> tuple[Sequence[Parts], Sequence[np.ndarray]] | None:
    """Return products of the same tokens, and which of their columns queries, keys and values are."""
    if None in ends:
        return None
    if (found := read_off(ends)) is not None:
        return [found[0]], found[1]
    parts = [part for end in ends if (part := product(end)) is not None]
    if len(parts) < 3 or len({part[0] for part in parts}) > 1:
        return None
    last = np.cumsum([0, *(sizes(weight)[1] for _, weight, _ in parts)])
    return parts, [np.arange(*pair) for pair in zip(last, last[1:], strict=False)]


def _stored(graph: ir.Graph, parts: Sequence[Parts], of: np.ndarray) -> tuple[ir.Value, ir.Value]:
    """Store the weights of products side by side, and their biases, columns in this order.

    There is always a bias: without one ONNX Runtime's kernel for CPUs reads what is not there (1.31).
    """
    _, weight, bias = parts[0]
    if bias is not None and np.array_equal(of, np.arange(sizes(weight)[1])):
        return weight, bias  # as they are
    weights, widths = [weight for _, weight, _ in parts], [sizes(weight)[1] for _, weight, _ in parts]
    name, shape = f"{weights[0].name}_packed", [sizes(weights[0])[0], len(of)]
    weight = stored_as(graph, weights, name, shape, lambda held: np.concatenate(held, 1)[:, of])
    there = [bias is not None for _, _, bias in parts]
    known = [bias for _, _, bias in parts if bias is not None] or weights[:1]  # of which the type is taken

    def values(held: Sequence[np.ndarray]) -> np.ndarray:
        left, kind = iter(held), held[0].dtype
        pieces = (next(left) if has else np.zeros(width, kind) for has, width in zip(there, widths, strict=True))
        return np.concatenate([*pieces])[of]

    return weight, stored_as(graph, known, f"{known[0].name}_packed_bias", [len(of)], values)
