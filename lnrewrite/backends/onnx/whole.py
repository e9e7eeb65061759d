"""Let one operator compute attention with its products, and write such attention as products and attention.

    q = x W_q + b_q, k = x W_k + b_k, v = x W_v + b_v -> MultiHeadAttention(q, k, v, mask)
      <->  Attention(x, [W_q W_k W_v], [b_q b_k b_v], mask)

where queries, keys and values are products of the same tokens, or columns of one, and nothing else comes between. A
file is read with the products apart: they are seen, and what is moved into weights reaches them. It is written as it
was.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .columns import Parts, read_off
from .norms import CONTRIB, HEADED, PACKED, resemble, take_place
from .packing import cut, product, sizes, stored_as

PADDING, BIAS = 4, 5
"""The inputs of MultiHeadAttention that say which keys are seen, and that are added to the scores: 3 and 5 there."""
CARRIED = ("num_heads", "scale", "unidirectional", "mask_filter_value")
"""The attributes that both operators have."""
PLAIN = {"do_rotary": 0, "past_present_share_buffer": 0}
"""Attributes of Attention that MultiHeadAttention lacks, and what they are where it needs none."""
APART = "lnrewrite.whole"
"""The mark of a node that was one operator with its products in the file."""


def attend_whole(model: ir.Model, marked: bool = False) -> None:
    """Let Attention compute queries, keys and values too, in place, wherever it can. marked: where a file had it so."""
    for node in [n for n in model.graph if (n.domain, n.op_type) == (CONTRIB, HEADED)]:
        if marked and not node.metadata_props.pop(APART, ""):
            continue
        others = [value for i, value in enumerate(node.inputs) if i > 2 and i not in (PADDING, BIAS)]
        if any(others) or len(node.outputs) > 1 or (found := _products(node.inputs[:3])) is None:
            continue
        parts, of = found
        weight, bias = _stored(model.graph, parts, np.concatenate(of))
        held = {name: node.attributes[name] for name in CARRIED if name in node.attributes}
        held["qkv_hidden_sizes"] = ir.AttrInt64s("qkv_hidden_sizes", [len(each) for each in of])
        padding, added, *_ = [*node.inputs[PADDING:], None, None]
        given = _given(parts[0][0], weight, bias, padding, None, added)
        made = ir.Node(CONTRIB, PACKED, given, held.values(), num_outputs=1, name=node.name)
        _stand(model.graph, node, made, [made])
    RemoveUnusedNodesPass()(model)


def attend_apart(model: ir.Model) -> None:
    """Write attention with its products as these and MultiHeadAttention, in place, wherever that means the same."""
    for node in [n for n in model.graph if (n.domain, n.op_type) == (CONTRIB, PACKED)]:
        inputs: list[ir.Value | None] = [*node.inputs, *[None] * (6 - len(node.inputs))]
        x, weight, bias, mask, past, added, *more = inputs
        plain = all(node.attributes.get_int(name, value) == value for name, value in PLAIN.items())
        widths = _widths(node, weight)
        if x is None or weight is None or past or any(more) or len(node.outputs) > 1 or not plain or not widths:
            continue
        if mask is not None and not _shown(x, mask):
            continue
        made = _apart(model.graph, x, weight, bias, widths)
        held = [node.attributes[name] for name in CARRIED if name in node.attributes]
        given = _given(*made[-1].outputs, None, mask, added)
        last = ir.Node(CONTRIB, HEADED, given, held, num_outputs=1, name=node.name)
        last.metadata_props[APART] = "1"
        _stand(model.graph, node, last, [*made, last])


def _apart(
    graph: ir.Graph, x: ir.Value, weight: ir.Value, bias: ir.Value | None, widths: list[int]
) -> Sequence[ir.Node]:
    """Return the nodes that make queries, keys and values of so many channels, the last one's outputs."""
    made = [ir.node("MatMul", [x, weight])]
    if bias is not None:
        made.append(ir.node("Add", [made[0].outputs[0], bias]))
    kind = weight.dtype or x.dtype
    for value in (each.outputs[0] for each in made):
        value.shape = None if x.shape is None else ir.Shape([*x.shape[:-1], sum(widths)])
        value.type = None if kind is None else ir.TensorType(kind)
    return [*made, cut(graph, made[-1].outputs[0], widths)]


def _widths(node: ir.Node, weight: ir.Value | None) -> list[int]:
    """Return how many channels queries, keys and values have; empty where that is not known."""
    given = [*node.attributes.get_ints("qkv_hidden_sizes", ())]
    held = weight.shape[-1] if weight is not None and weight.shape else None
    return given or ([held // 3] * 3 if isinstance(held, int) else [])


def _shown(x: ir.Value, mask: ir.Value) -> bool:
    """Return whether a mask means the same to both operators: which keys are seen, or how many, not from where on."""
    if mask.shape is None or len(mask.shape) not in (1, 2, 3):
        return False
    made = mask.producer()
    embedded = made is not None and made.op_type == "EmbedLayerNormalization"
    return len(mask.shape) > 1 or embedded or (x.shape is not None and mask.shape[0] == x.shape[0])


def _given(*inputs: ir.Value | None) -> Sequence[ir.Value | None]:
    """Return a node's inputs without those at their end that are not given."""
    return inputs[: max(i for i, value in enumerate(inputs, 1) if value is not None)]


def _stand(graph: ir.Graph, node: ir.Node, last: ir.Node, made: Sequence[ir.Node]) -> None:
    """Let what the last of new nodes gives stand for what another gives."""
    resemble(last.outputs[0], node.outputs[0])
    graph.insert_before(node, made)
    take_place(node.outputs[0], last.outputs[0])
    graph.remove(node, safe=True)


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
