"""Describe what shapes ONNX Runtime's own operators give, so that shape inference does not stop at them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from .integers import work_out_integers
from .norms import CONTRIB
from .widths import told_by_gains, told_by_heads, told_by_products, told_by_reshapes, told_by_shapes, told_by_sublayers

LIKE_FIRST = {
    ("", "LayerNormalization"): 3, ("", "SimplifiedLayerNormalization"): 2, (CONTRIB, "FastGelu"): 2,
    (CONTRIB, "BiasGelu"): 2, (CONTRIB, "QuickGelu"): 1, (CONTRIB, "Gelu"): 1, (CONTRIB, "RotaryEmbedding"): 4,
    (CONTRIB, "MultiHeadAttention"): 10, (CONTRIB, "GroupQueryAttention"): 14,
}  # fmt: skip
"""Operators whose first output has their first input's shape, with the number of inputs that they may have."""


TOLD = told_by_reshapes, told_by_shapes, told_by_products, told_by_sublayers, told_by_heads, told_by_gains


def infer_shapes(model: ir.Model) -> None:
    """Fill in the shapes and types that a model's values lack, where onnx's own inference, or a gain, tells them.

    Integers that are computed of constants alone become constants: inference does not follow all that computes them.
    """
    told = told_by_shapes(model.graph)
    if not told and all(v.shape is not None and v.dtype is not None for node in model.graph for v in node.outputs):
        return
    work_out_integers(model)
    with _meanings(model), _products(model.graph):
        again = True
        while again:
            ShapeInferencePass(check_type=False, strict_mode=False)(model)
            again = any(tell(model.graph) for tell in TOLD)
    infer_types(model)


def infer_types(model: ir.Model) -> None:
    """Fill in the types that values lack by what operators' schemas say, where nothing is known of shapes."""
    opset = model.graph.opset_imports.get("", 1)
    for node in model.graph:
        for place, value in enumerate(node.outputs):
            if value.dtype is None and onnx.defs.has(node.op_type, opset, node.domain):
                found = _type(node, place, onnx.defs.get_schema(node.op_type, opset, node.domain))
                value.type = None if found is None else ir.TensorType(found)


def _type(node: ir.Node, place: int, schema: onnx.defs.OpSchema) -> ir.DataType | None:
    """Return the type of a node's output: that of an input which the schema ties to it."""
    if place >= len(schema.outputs):
        return None
    wanted, last = schema.outputs[place].type_str, len(schema.inputs) - 1
    tied = (v for i, v in enumerate(node.inputs) if v is not None and schema.inputs[min(i, last)].type_str == wanted)
    return next((value.dtype for value in tied if value.dtype is not None), None)


@contextmanager
def _meanings(model: ir.Model) -> Iterator[None]:
    """Give the model, for a while, a function that says what each of ORT's operators in it makes of a shape.

    A node whose second input is missing packs its first: its output is narrower, and nothing is said of it.
    """
    held = {(n.domain, n.op_type) for n in model.graph}
    packed = {(n.domain, n.op_type) for n in model.graph if len(n.inputs) > 1 and n.inputs[1] is None}
    added = []
    for (domain, name), count in LIKE_FIRST.items():
        if (domain, name) in held - packed and (domain, name, "") not in model.functions:
            inputs = ", ".join(f"x{i}" for i in range(count))
            text = f'<domain: "{domain}", opset_import: ["" : 17]> {name} ({inputs}) => (y) {{ y = Identity (x0) }}'
            function = ir.serde.deserialize_function(onnx.parser.parse_function(text))
            model.functions[function.identifier()] = function
            added.append(function.identifier())
    try:
        yield
    finally:
        for identifier in added:
            del model.functions[identifier]


@contextmanager
def _products(graph: ir.Graph) -> Iterator[None]:
    """Make products with packed weights be, for a while, products with a weight [K, N] that is an input."""
    was = [(n, n.inputs) for n in graph if (n.domain, n.op_type) == (CONTRIB, "MatMulNBits")]
    count = len(graph.inputs)
    for index, (node, inputs) in enumerate(was):
        shape = ir.Shape([node.attributes[key].as_int() for key in ("K", "N")])
        kind = inputs[0].type if inputs[0] is not None and inputs[0].type else ir.TensorType(ir.DataType.FLOAT)
        graph.inputs.append(weight := ir.Value(name=f"lnrewrite.packed.{index}", shape=shape, type=kind))
        node.domain, node.op_type = "", "MatMul"
        node.resize_inputs(2)
        node.replace_input_with(1, weight)
    try:
        yield
    finally:
        for node, inputs in was:
            node.domain, node.op_type = CONTRIB, "MatMulNBits"
            node.resize_inputs(len(inputs))
            for index, value in enumerate(inputs):
                node.replace_input_with(index, value)
        del graph.inputs[count:]
