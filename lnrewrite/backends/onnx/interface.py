"""A decoder's ONNX model as servers of such models know it: names, axes, weights as products read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ..torch.cached import PAST, PRESENT

BATCH, NEW, BEFORE, TOTAL = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"


def name_cache(model: ir.Model, cache: Sequence[str]) -> set[str]:
    """Name a decoder's cache `past_key_values.N.key` and `present.N.key`, and its free axes by what they count.

    Drops inputs that nothing reads, and returns their names.
    """
    graph = model.graph
    held = [v for v in graph.inputs if (v.name or "").startswith("past_")]
    for values, side in ((held, PAST), (graph.outputs[1:], PRESENT)):
        for value, name in zip(values, cache, strict=True):
            value.name = f"{side}.{name}"
    unread = [v for v in graph.inputs if not v.uses() and v not in held]
    for value in unread:
        graph.inputs.remove(value)
    tokens = dict.fromkeys(("input_ids", "position_ids", "logits"), (BATCH, NEW))
    axes = {**tokens, "attention_mask": (BATCH, TOTAL)}
    for value in (*graph.inputs, *graph.outputs):
        shape = value.shape
        assert shape is not None
        if value.name in axes:
            value.shape = ir.Shape([*axes[value.name], *shape[2:]])
        else:
            value.shape = ir.Shape([BATCH, shape[1], BEFORE if value in held else TOTAL, shape[3]])
    return {str(value.name) for value in unread}


def turn_weights(model: ir.Model) -> None:
    """Store weights that only a product reads, through a Transpose, transposed: `<name>_transposed`."""
    graph = model.graph
    for node in [n for n in graph if n.op_type == "Transpose"]:
        (weight,), turned = node.inputs, node.outputs[0]
        if weight is None or weight.const_value is None or len(weight.uses()) > 1 or weight.is_graph_output():
            continue
        if node.attributes.get_ints("perm", ()) != (1, 0):
            continue
        name = f"{weight.name}_transposed"
        tensor = _turned(weight.const_value, name)
        made = ir.Value(name=name, shape=ir.Shape(tensor.shape.numpy()), type=weight.type, const_value=tensor)
        graph.register_initializer(made)
        turned.replace_all_uses_with(made)
        graph.remove(node, safe=True)
        del graph.initializers[str(weight.name)]


def _turned(held: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    """Return a tensor transposed, computed when it is written."""

    def values() -> ir.TensorProtocol:
        return ir.tensor(np.ascontiguousarray(held.numpy().T), dtype=held.dtype, name=name)

    rows, columns = (int(str(size)) for size in held.shape)
    return ir.LazyTensor(values, dtype=held.dtype, shape=ir.Shape([columns, rows]), name=name)
