"""Store weights as products read them, and what queries, keys and values are made with as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .norms import CONTRIB

GROUPED = "GroupQueryAttention"
Change = Callable[[Sequence[np.ndarray]], np.ndarray]


def turn_weights(model: ir.Model) -> None:
    """Store weights that only a product reads, through a Transpose, transposed: `<name>_transposed`."""
    graph = model.graph
    for node in [n for n in graph if n.op_type == "Transpose" and n.attributes.get_ints("perm", ()) == (1, 0)]:
        (weight,), turned = node.inputs, node.outputs[0]
        if weight is None or weight.const_value is None or len(weight.uses()) > 1 or weight.is_graph_output():
            continue
        rows, columns = _sizes(weight)
        made = _stored(graph, [weight], f"{weight.name}_transposed", [columns, rows], lambda held: held[0].T)
        turned.replace_all_uses_with(made)
        graph.remove(node, safe=True)
        del graph.initializers[str(weight.name)]


def pack_heads(model: ir.Model) -> None:
    """Compute queries, keys and values by one product where nothing comes between it and the kernel.

    q = x W_q + b_q, k = x W_k + b_k, v = x W_v + b_v    ->    [q k v] = x [W_q W_k W_v] + [b_q b_k b_v]
    """
    for node in [n for n in model.graph if (n.domain, n.op_type) == (CONTRIB, GROUPED)]:
        parts = [_product(value) for value in node.inputs[:3]]
        known = [part for part in parts if part is not None]
        if len(known) < 3 or len({part[0] for part in known}) > 1 or len({part[2] is None for part in known}) > 1:
            continue
        (x, first, bias), graph = known[0], model.graph
        weights, biases = [part[1] for part in known], [part[2] for part in known if part[2] is not None]
        width = sum(_sizes(weight)[1] for weight in weights)
        name = f"{first.name}_packed"
        joined = _stored(graph, weights, name, [_sizes(first)[0], width], lambda held: np.concatenate(held, 1))
        made = [ir.node("MatMul", [x, joined])]
        if bias is not None:
            added = _stored(graph, biases, f"{bias.name}_packed", [width], np.concatenate)
            made.append(ir.node("Add", [made[0].outputs[0], added]))
        for each in made:
            each.outputs[0].type, each.outputs[0].shape = x.type, ir.Shape([*(x.shape or ())[:-1], width])
        graph.insert_before(node, made)
        for index, value in enumerate((made[-1].outputs[0], None, None)):
            node.replace_input_with(index, value)
    RemoveUnusedNodesPass()(model)


def _product(value: ir.Value | None) -> tuple[ir.Value, ir.Value, ir.Value | None] | None:
    """Return (x, W, b) where a value is x W + b, constants W and b (None: there is none) that are read here alone."""
    node = value.producer() if value is not None and len(value.uses()) == 1 else None
    bias: ir.Value | None = None
    if node is not None and node.op_type == "Add" and node.domain == "":
        held = sorted((v for v in node.inputs if v is not None), key=lambda v: v.const_value is not None)
        rest, bias = held[0], held[-1]
        plain = rest.const_value is None and bias.const_value is not None and len(bias.shape or ()) == 1
        node = rest.producer() if plain and len(rest.uses()) == 1 else None
    if node is None or node.op_type != "MatMul" or node.domain or value is None or value.shape is None:
        return None
    x, weight = node.inputs
    if x is None or weight is None or weight.const_value is None or len(weight.shape or ()) != 2:
        return None
    alone = all(held is None or len(held.uses()) == 1 for held in (weight, bias))
    return (x, weight, bias) if alone and len(value.shape) == 3 else None


def _sizes(value: ir.Value) -> list[int]:
    return [int(str(size)) for size in value.shape or ()]


def _stored(graph: ir.Graph, of: Sequence[ir.Value], name: str, shape: Sequence[int], change: Change) -> ir.Value:
    """Return a new initializer that is computed of others when it is written."""
    held = [value.const_value for value in of if value.const_value is not None]

    def values() -> ir.TensorProtocol:
        array = np.ascontiguousarray(change([tensor.numpy() for tensor in held]))
        return ir.tensor(array, dtype=held[0].dtype, name=name)

    tensor = ir.LazyTensor(values, dtype=held[0].dtype, shape=ir.Shape(shape), name=name)
    made = ir.Value(name=name, shape=ir.Shape(shape), type=of[0].type, const_value=tensor)
    graph.register_initializer(made)
    return made
