"""Work out the few integers that a graph computes of constants alone: axes and sizes, as exporters leave them.

    Mod(2, 3) -> Slice(Shape(x), 0, .) -> Concat -> Reshape(y, .)

is how the TorchScript exporter writes `y.unflatten(2, ...)`. onnx's shape inference follows Slice and Concat, not Mod,
and without the number the rank of all that comes behind is unknown.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import helper
from onnx.reference import ReferenceEvaluator

OPERATORS = {
    "Abs", "Add", "And", "Cast", "Concat", "ConstantOfShape", "Div", "Equal", "Gather", "Greater", "Identity", "Less",
    "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "ReduceProd", "ReduceSum", "Reshape", "Slice", "Squeeze", "Sub",
    "Unsqueeze", "Where",
}  # fmt: skip
"""Operators that sizes are computed with; each gives one value, the same at each call."""
KINDS = {ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL}
MOST = 64
"""How many numbers a value may have: a shape has one for each axis, and tables of ids are left as they are."""


def work_out_integers(model: ir.Model) -> None:
    """Let initializers of the same names stand for what nodes of the main graph compute of constant integers."""
    for node in list(model.graph):
        if node.domain or node.op_type not in OPERATORS or node.outputs[0].is_graph_output():
            continue
        given = {str(v.name): _constant(v) for v in node.inputs if v is not None}
        held = {name: array for name, array in given.items() if array is not None}
        if given and len(held) == len(given) and (made := _result(node, held, model)) is not None:
            _store(model.graph, node, made)


def _constant(value: ir.Value) -> np.ndarray | None:
    """Return the few integers that a value is stored as; None for any other value."""
    if value.is_graph_input():  # a caller may give others
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None or tensor.dtype not in KINDS or tensor.size > MOST else tensor.numpy()


def _result(node: ir.Node, given: dict[str, np.ndarray], model: ir.Model) -> np.ndarray | None:
    """Return what a node computes; None where that is no few integers, or nothing."""
    if node.op_type == "ConstantOfShape" and prod(map(int, next(iter(given.values())))) > MOST:
        return None
    if node.op_type in ("Div", "Mod") and not all((array > 0).all() for array in given.values()):
        return None  # libraries round such in several ways, or fail
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in given.items()}
    inputs = [helper.make_tensor_value_info(name, kinds[name], array.shape) for name, array in given.items()]
    output = helper.make_empty_tensor_value_info(str(node.outputs[0].name))
    graph = helper.make_graph([ir.serde.serialize_node(node)], "one", inputs, [output])
    versions = [helper.make_opsetid("", model.graph.opset_imports.get("", 1))]
    try:
        (made,) = ReferenceEvaluator(helper.make_model(graph, opset_imports=versions)).run(None, dict[str, Any](given))
    except Exception:  # what breaks a rule, or is of an opset that the library does not compute
        return None
    array = np.asarray(made)
    return array if array.size <= MOST and array.dtype in (np.int64, np.int32, np.bool_) else None


def _store(graph: ir.Graph, node: ir.Node, array: np.ndarray) -> None:
    """Put an initializer in the place of a node."""
    old = node.outputs[0]
    name = str(old.name)
    new = ir.Value(name=name, shape=ir.Shape(array.shape), const_value=ir.tensor(array, name=name))
    new.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
    ir.convenience.replace_all_uses_with(old, new)
    graph.remove(node, safe=True)
    graph.register_initializer(new)
