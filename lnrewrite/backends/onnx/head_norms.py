"""Norms of queries and keys that GroupQueryAttention computes itself on CUDA: taken into it, and written before it.

    q, k [batch, tokens, heads * size] -> Reshape -> SimplifiedLayerNormalization -> Reshape -> GroupQueryAttention
      <-> GroupQueryAttention with q_norm_weight and k_norm_weight [size] and qk_norm_epsilon

It norms both or none, each head by itself, before it rotates them (ONNX Runtime 1.28, microsoft/onnxruntime#29186).
CPUs refuse such a node, so a file is read with the norms before it: they are seen, moved and proved there.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .norms import CONTRIB, GROUPED, RMS, NormNode, constant, resemble, site
from .packing import cut

GAINS, EPS = (14, 15), "qk_norm_epsilon"
"""The inputs of the kernel that are gains of queries and of keys, and the attribute that is their eps."""
KEPT = 0
"""A size in a Reshape's shape that stays."""
DEFAULT = 1e-6


def _kernels(model: ir.Model) -> list[ir.Node]:
    return [n for n in model.graph if (n.domain, n.op_type) == (CONTRIB, GROUPED)]


def take_in(model: ir.Model) -> list[str]:
    """Let the kernel norm queries and keys wherever it can; return the sites of those norms."""
    sites = []
    for node in _kernels(model):
        found = [_normed(value) for value in node.inputs[:2]]
        norms = [norm for each in found if each is not None and (norm := NormNode.read(each[1])) is not None]
        held = any(value is not None for value in node.inputs[GAINS[0] :])
        if held or len(norms) < 2 or norms[0].eps != norms[1].eps:
            continue
        node.resize_inputs(GAINS[-1] + 1)
        for index, gain, (x, made), norm in zip((0, 1), GAINS, filter(None, found), norms, strict=True):
            sites.append(site(made))
            node.replace_input_with(index, x)
            node.replace_input_with(gain, norm.gain)
        node.attributes[EPS] = ir.AttrFloat32(EPS, norms[0].eps)
    RemoveUnusedNodesPass()(model)
    return sites


def _normed(value: ir.Value | None) -> tuple[ir.Value, ir.Node] | None:
    """Return what a value is, each head of it normed by itself, and the norm's node."""
    last = _reshape(value)
    node = last.inputs[0].producer() if last is not None and last.inputs[0] is not None else None
    norm = NormNode.read(node) if node is not None and len(node.outputs[0].uses()) == 1 else None
    first = _reshape(norm.x) if norm is not None and norm.operator == RMS and norm.axes == 1 else None
    if first is None or norm is None or node is None or value is None:
        return None
    x, inner, gain = first.inputs[0], norm.x.shape, norm.gain
    shapes = [None if v is None or v.shape is None else list(v.shape) for v in (x, value, norm.x, gain)]
    known = x is not None and None not in shapes and inner is not None
    whole = known and len(shapes[0]) == len(shapes[1]) == 3 and shapes[0][2] == shapes[1][2]  # type: ignore[arg-type, index]
    heads = known and len(inner) == 4 and shapes[3] == [inner[3]] and gain.dtype == norm.x.dtype  # type: ignore[arg-type, index]
    return (x, node) if x is not None and whole and heads else None


def _reshape(value: ir.Value | None) -> ir.Node | None:
    """Return the Reshape that makes a value which is read once."""
    node = value.producer() if value is not None and len(value.uses()) == 1 else None
    return node if node is not None and node.op_type == "Reshape" and not value.is_graph_output() else None  # type: ignore[union-attr]


def stand_apart(model: ir.Model) -> int:
    """Write the norms that kernels compute before them; return in how many kernels there were any."""
    found = [n for n in _kernels(model) if len(n.inputs) > GAINS[-1] and all(n.inputs[i] for i in GAINS)]
    for node in found:
        gains, eps = [node.inputs[i] for i in GAINS], node.attributes.get_float(EPS, DEFAULT)
        heads = [node.attributes.get_int(name, 0) for name in ("num_heads", "kv_num_heads")]
        size = gains[0].shape[0] if gains[0] is not None and gains[0].shape is not None else None
        if not isinstance(size, int):
            continue
        if node.inputs[1] is None:
            _split(model.graph, node, [heads[0] * size, heads[1] * size, heads[1] * size])
        for index, gain, count in zip((0, 1), gains, heads, strict=True):
            x = node.inputs[index]
            assert x is not None and gain is not None
            node.replace_input_with(index, _apart(model.graph, node, x, gain, eps, count, size))
        node.attributes.pop(EPS, None)
        node.resize_inputs(GAINS[0])
        while node.inputs[-1] is None:
            node.resize_inputs(len(node.inputs) - 1)
    return len(found)


def _split(graph: ir.Graph, node: ir.Node, widths: list[int]) -> None:
    """Give a kernel that takes queries, keys and values as one its three inputs."""
    packed = node.inputs[0]
    assert packed is not None
    graph.insert_before(node, made := cut(graph, packed, widths))
    for index, piece in enumerate(made.outputs):
        node.replace_input_with(index, piece)


def _apart(graph: ir.Graph, node: ir.Node, x: ir.Value, gain: ir.Value, eps: float, heads: int, size: int) -> ir.Value:
    """Write what the kernel does to queries or keys before it; return them."""
    kinds = ((KEPT, KEPT, heads, size), (KEPT, KEPT, heads * size))
    shapes = [constant(graph, f"heads_{'_'.join(map(str, s[2:]))}_of", np.array(s, np.int64)) for s in kinds]
    first = ir.node("Reshape", [x, shapes[0]])
    first.outputs[0].type = x.type
    first.outputs[0].shape = None if x.shape is None else ir.Shape([*x.shape[:2], heads, size])
    norm = NormNode(RMS, first.outputs[0], gain, None, eps).build()
    last = ir.node("Reshape", [norm.outputs[0], shapes[1]])
    resemble(last.outputs[0], x)
    graph.insert_before(node, [first, norm, last])
    return last.outputs[0]
