"""Let what is done to each token be done to tokens as they lie: [batch, tokens, width], not [batch * tokens, width].

Reshape, then products, norms and functions of one number, then Reshape back, as torch's addmm needs it: without the two
the sums ride in norms, biases in what follows, and products can be packed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .norms import NormNode

ALIKE = {"Add", "Sub", "Mul", "Div", "Pow", "Relu", "Tanh", "Sigmoid", "Erf", "Sqrt", "Neg", "Gelu", "Cast", "Identity"}
"""Operators on each number; other operands are constants for all tokens, or tokens too."""


@dataclass(slots=True)
class _Region:
    """Hold the reshapes that go in, the nodes between, the reshapes that come out, and the values inside."""

    entries: list[ir.Node]
    nodes: list[ir.Node] = field(default_factory=list)
    exits: list[ir.Node] = field(default_factory=list)
    values: set[ir.Value] = field(default_factory=set)


def keep_tokens_apart(model: ir.Model) -> None:
    """Drop reshapes around what treats each token alone, in place."""
    for node in list(model.graph):
        if _flattens(node) and node.outputs[0].uses() and (region := _region(node)) is not None:
            _apply(model.graph, region)
    RemoveUnusedNodesPass()(model)


def _flattens(node: ir.Node | None) -> bool:
    """Return whether a node makes [all, width] of [batch, tokens, width]."""
    if node is None or node.op_type != "Reshape" or node.domain or node.inputs[0] is None:
        return False
    before, after = node.inputs[0].shape, node.outputs[0].shape
    return before is not None and after is not None and (len(before), len(after)) == (3, 2) and before[2] == after[1]


def _region(start: ir.Node) -> _Region | None:
    """Return all that is computed of a flattened value, up to reshapes back; None where it does not end so."""
    shape = start.inputs[0].shape  # type: ignore[union-attr]
    region, todo = _Region([start]), [start]
    while todo:
        for value in todo.pop().outputs:
            region.values.add(value)
            if value.is_graph_output():
                return None
            for use in value.uses():
                node = use.node
                if node.op_type == "Reshape" and use.idx == 0:
                    if not _restores(node, shape):
                        return None
                    region.exits += [node] if node not in region.exits else []
                elif node not in region.nodes:
                    if not _alone(node):
                        return None
                    region.nodes.append(node)
                    todo.append(node)
        for node in region.nodes:
            for other in [v for v in node.inputs if v is not None and v.const_value is None]:
                entry = other.producer()
                if other not in region.values and _flattens(entry) and entry.inputs[0].shape == shape:  # type: ignore
                    region.entries.append(entry)  # type: ignore[arg-type]
                    region.values.add(other)
                    todo.append(entry)  # type: ignore[arg-type]
    held = {v for node in region.nodes for v in node.inputs if v is not None and v.const_value is None}
    return region if region.nodes and held <= region.values else None


def _restores(node: ir.Node, shape: ir.Shape | None) -> bool:
    """Return whether a reshape makes [batch, tokens, some width] of tokens again."""
    before, after = node.inputs[0].shape, node.outputs[0].shape  # type: ignore[union-attr]
    if shape is None or before is None or after is None or node.outputs[0].is_graph_output():
        return False
    return len(after) == 3 and list(after)[:2] == list(shape)[:2] and after[2] == before[-1]


def _alone(node: ir.Node) -> bool:
    """Return whether a node treats each token alone."""
    if node.op_type in ("Gemm", "MatMul") and not node.domain:
        weights = [v for v in node.inputs[1:] if v is not None]
        plain = all(node.attributes.get_float(name, 1.0) == 1.0 for name in ("alpha", "beta"))
        plain = plain and not node.attributes.get_int("transA", 0) and all(v.const_value is not None for v in weights)
        return plain and all(len(v.shape or ()) == 1 for v in weights[1:]) and len(weights[0].shape or ()) == 2
    norm = NormNode.read(node)
    if norm is not None:
        return norm.axes == 1 and norm.skip is None and len(node.outputs) == 1
    held = [v for v in node.inputs if v is not None and v.const_value is not None]
    return node.op_type in ALIKE and all(v.shape is not None and len(v.shape) < 2 for v in held)


def _apply(graph: ir.Graph, region: _Region) -> None:
    """Drop the reshapes of a region; a Gemm becomes a product and a sum."""
    lead = list(region.entries[0].inputs[0].shape or ())[:2]  # type: ignore[union-attr]
    for entry in region.entries:
        entry.outputs[0].replace_all_uses_with(entry.inputs[0])  # type: ignore[arg-type]
    for node in region.nodes:
        for value in node.outputs:
            value.shape = ir.Shape([*lead, value.shape[-1]]) if value.shape is not None else None
        if node.op_type == "Gemm":
            _product(graph, node)
    for leaving in region.exits:
        leaving.outputs[0].replace_all_uses_with(leaving.inputs[0])  # type: ignore[arg-type]


def _product(graph: ir.Graph, node: ir.Node) -> None:
    """Write a Gemm of tokens as a product of three axes, and what is added."""
    x, weight, *bias = node.inputs
    made = list[ir.Node]()
    if node.attributes.get_int("transB", 0) and weight is not None:
        made.append(ir.node("Transpose", [weight], {"perm": [1, 0]}))
        made[0].outputs[0].shape, made[0].outputs[0].type = ir.Shape(list(weight.shape or ())[::-1]), weight.type
        weight = made[0].outputs[0]
    made.append(ir.node("MatMul", [x, weight]))
    made += [ir.node("Add", [made[-1].outputs[0], bias[0]])] if bias and bias[0] is not None else []
    old = node.outputs[0]
    for each in made:
        if each.op_type != "Transpose":
            each.outputs[0].shape, each.outputs[0].type = old.shape, old.type
    graph.insert_before(node, made)
    name = old.name
    old.replace_all_uses_with(made[-1].outputs[0])
    graph.remove(node, safe=True)
    made[-1].outputs[0].name = name
