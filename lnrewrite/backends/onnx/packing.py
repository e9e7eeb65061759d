"""Store weights as products read them, and what queries, keys and values are made with as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .norms import CONTRIB, GROUPED, HEADED, NormNode, constant, resemble

Change = Callable[[Sequence[np.ndarray]], np.ndarray]


def turn_weights(model: ir.Model) -> None:
    """Store weights that only a product reads, through a Transpose, transposed: `<name>_transposed`."""
    graph = model.graph
    for node in [n for n in graph if n.op_type == "Transpose" and n.attributes.get_ints("perm", ()) == (1, 0)]:
        (weight,), turned = node.inputs, node.outputs[0]
        if weight is None or weight.const_value is None or len(weight.uses()) > 1 or weight.is_graph_output():
            continue
        rows, columns = sizes(weight)
        made = stored_as(graph, [weight], f"{weight.name}_transposed", [columns, rows], lambda held: held[0].T)
        turned.replace_all_uses_with(made)
        graph.remove(node, safe=True)
        del graph.initializers[str(weight.name)]


def pack_heads(model: ir.Model) -> None:
    """Compute queries, keys and values by one product, which the kernel takes where nothing comes between them.

    q = x W_q + b_q, k = x W_k + b_k, v = x W_v + b_v    ->    [q k v] = x [W_q W_k W_v] + [b_q b_k b_v]

    Where norms come between, it is split.
    """
    for node in [n for n in model.graph if (n.domain, n.op_type) == (CONTRIB, HEADED)]:
        _scale(model, node)
        _biases(model.graph, node)
    for node in [n for n in model.graph if (n.domain, n.op_type) == (CONTRIB, GROUPED)]:
        _scale(model, node)
        ends = [_unnormed(value) for value in node.inputs[:3]]
        parts = [product(value) for value in ends]
        known = [part for part in parts if part is not None]
        if len(known) < 3 or len({part[0] for part in known}) > 1 or len({part[2] is None for part in known}) > 1:
            continue
        (x, first, bias), graph = known[0], model.graph
        weights, biases = [part[1] for part in known], [part[2] for part in known if part[2] is not None]
        widths = [sizes(weight)[1] for weight in weights]
        name = f"{first.name}_packed"
        joined = stored_as(graph, weights, name, [sizes(first)[0], sum(widths)], lambda held: np.concatenate(held, 1))
        made = [ir.node("MatMul", [x, joined])]
        if bias is not None:
            added = stored_as(graph, biases, f"{bias.name}_packed", [sum(widths)], np.concatenate)
            made.append(ir.node("Add", [made[0].outputs[0], added]))
        for each in made:
            each.outputs[0].type, each.outputs[0].shape = x.type, ir.Shape([*(x.shape or ())[:-1], sum(widths)])
        if ends == list(node.inputs[:3]):
            graph.insert_before(node, made)
            for index, value in enumerate((made[-1].outputs[0], None, None)):
                node.replace_input_with(index, value)
        else:
            _split(graph, made, [end for end in ends if end is not None], widths)
    RemoveUnusedNodesPass()(model)


def _unnormed(value: ir.Value | None) -> ir.Value | None:
    """Return what norms alone, of heads or of all channels, lie between and a value."""
    while value is not None and (node := value.producer()) is not None and len(value.uses()) == 1:
        if node.op_type != "Reshape" and NormNode.read(node) is None or len(node.outputs) > 1:
            break
        value = node.inputs[0]
    return value


def cut(graph: ir.Graph, packed: ir.Value, widths: Sequence[int]) -> ir.Node:
    """Return a node, not in the graph yet, that takes a product [batch, tokens, channels] apart into pieces."""
    if graph.opset_imports.get("", 0) < 13:
        made = ir.node("Split", [packed], {"axis": 2, "split": widths}, num_outputs=len(widths))
    else:
        taken = constant(graph, f"heads_{'_'.join(map(str, widths))}", np.array(widths, np.int64))
        made = ir.node("Split", [packed, taken], {"axis": -1}, num_outputs=len(widths))
    for piece, width in zip(made.outputs, widths, strict=True):
        piece.type = packed.type
        piece.shape = None if packed.shape is None else ir.Shape([*packed.shape[:-1], width])
    return made


def _split(graph: ir.Graph, made: list[ir.Node], ends: Sequence[ir.Value], widths: Sequence[int]) -> None:
    """Put one product in front of the first of several, and let its pieces stand for them."""
    made = [*made, cut(graph, made[-1].outputs[0], widths)]
    producers = [end.producer() for end in ends]
    graph.insert_before(next(node for node in graph if node in producers), made)
    for end, piece in zip(ends, made[-1].outputs, strict=True):
        piece.type, piece.shape = end.type, end.shape
        end.replace_all_uses_with(piece)


def _scale(model: ir.Model, node: ir.Node) -> None:
    """Let the kernel multiply by a number that its queries are multiplied by before."""
    value, scale = node.inputs[0], node.attributes.get_float("scale", 0.0)
    before = value.producer() if value is not None and len(value.uses()) == 1 else None
    if before is None or before.op_type != "Mul" or before.domain or not scale:
        return
    held = sorted((v for v in before.inputs if v is not None), key=lambda v: v.const_value is not None)
    number = held[-1].const_value
    if len(held) == 2 and number is not None and number.size == 1 and held[0].const_value is None:
        node.attributes["scale"] = ir.AttrFloat32("scale", scale * float(number.numpy().item()))
        node.replace_input_with(0, held[0])
        model.graph.remove(before, safe=True)


def _biases(graph: ir.Graph, node: ir.Node) -> None:
    """Let the kernel that has an input for them add what is added to queries, keys and values as they are made."""
    given = [value for value in node.inputs[:3] if value is not None and len(value.shape or ()) == 3]
    parts = [_added(value) for value in given]
    known = [part[1] for part in parts if part is not None]
    last = [value.shape[-1] for value in given if value.shape]
    widths = [width for width in last if isinstance(width, int)]
    if len(widths) < 3 or not known or any(node.inputs[3:4]):
        return
    node.resize_inputs(max(len(node.inputs), 4))

    def values(held: Sequence[np.ndarray]) -> np.ndarray:
        left = iter(held)
        pieces = (
            np.zeros(n, held[0].dtype) if part is None else next(left) for n, part in zip(widths, parts, strict=True)
        )
        return np.concatenate([*pieces])

    node.replace_input_with(3, stored_as(graph, known, f"{known[0].name}_packed", [sum(widths)], values))
    for index, part in enumerate(parts):
        if part is not None:
            node.replace_input_with(index, part[0])


def _added(value: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Return (x, b) where a value that is read here alone is x + b, b constant and one number for each channel."""
    node = value.producer() if len(value.uses()) == 1 else None
    if node is None or node.op_type != "Add" or node.domain:
        return None
    rest, bias = sorted((v for v in node.inputs if v is not None), key=lambda v: v.const_value is not None)
    plain = rest.const_value is None and bias.const_value is not None and len(bias.shape or ()) == 1
    return (rest, bias) if plain and list(bias.shape or ()) == list(value.shape or ())[-1:] else None


def unturned_norms(model: ir.Model) -> None:
    """Let norms of heads run over tokens as they lie: turned, normed and turned back is normed."""
    for node in model.graph:
        norm = NormNode.read(node)
        if norm is None or norm.axes != 1 or len(node.outputs) > 1 or (before := _turn(norm.x.producer())) is None:
            continue
        (source,), after = before.inputs, [_turn(use.node) for use in node.outputs[0].uses()]
        if source is None or node.outputs[0].is_graph_output() or any(turn is None for turn in after):
            continue
        node.replace_input_with(0, source)
        resemble(node.outputs[0], source)
        for turn in after:
            if turn is not None:
                turn.outputs[0].replace_all_uses_with(node.outputs[0], replace_graph_outputs=False)
    RemoveUnusedNodesPass()(model)


def _turn(node: ir.Node | None) -> ir.Node | None:
    """Return a node that changes heads and tokens of [batch, heads, tokens, size], None for any other."""
    plain = node is not None and node.op_type == "Transpose" and not node.domain
    return node if plain and node.attributes.get_ints("perm", ()) == (0, 2, 1, 3) else None  # type: ignore[union-attr]


def product(value: ir.Value | None) -> tuple[ir.Value, ir.Value, ir.Value | None] | None:
    """Return (x, W, b) where a value is x W + b, constants W and b (None: there is none) that are read here alone."""
    node = value.producer() if value is not None and len(value.uses()) == 1 else None
    bias: ir.Value | None = None
    if value is not None and (added := _added(value)) is not None:
        node, bias = added[0].producer() if len(added[0].uses()) == 1 else None, added[1]
    if node is None or node.op_type != "MatMul" or node.domain or value is None or value.shape is None:
        return None
    x, weight = node.inputs
    if x is None or weight is None or weight.const_value is None or len(weight.shape or ()) != 2:
        return None
    alone = all(held is None or len(held.uses()) == 1 for held in (weight, bias))
    return (x, weight, bias) if alone and len(value.shape) == 3 else None


def sizes(value: ir.Value) -> list[int]:
    return [int(str(size)) for size in value.shape or ()]


def stored_as(graph: ir.Graph, of: Sequence[ir.Value], name: str, shape: Sequence[int], change: Change) -> ir.Value:
    """Return a new initializer that is computed of others when it is written."""
    held = [value.const_value for value in of if value.const_value is not None]

    def values() -> ir.TensorProtocol:
        array = np.ascontiguousarray(change([tensor.numpy() for tensor in held]))
        return ir.tensor(array, dtype=held[0].dtype, name=name)

    tensor = ir.LazyTensor(values, dtype=held[0].dtype, shape=ir.Shape(shape), name=name)
    made = ir.Value(name=name, shape=ir.Shape(shape), type=of[0].type, const_value=tensor)
    graph.register_initializer(made)
    return made
