"""Write a model so that ONNX Runtime computes it in float64: the judge of rewrites that claim to be exact.

Its CPU kernels take float64 but for a few operators. Erf, and Gelu with it, is written as the integral that it is,

    erf(x) = 2 / sqrt(pi) * x * integral of exp(-(x t)^2) over t from 0 to 1,

by Gauss and Legendre's rule with 48 points: right to 2e-14 for every x, beyond |x| = 6 it is 1.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}
RESIZING = {"Resize", "Upsample"}
"""Operators that compute sizes of what they take after their first input."""
DOMAIN = "lnrewrite.float64"
MOVED = {ir.DataType.FLOAT16: 2.0**-9, ir.DataType.BFLOAT16: 2.0**-6}
"""How far apart, relative to it, a number in half precision is moved: two last bits, and else one of a float32."""


def doubled(model: ir.Model) -> ir.Model:
    """Return a copy of the model that computes in float64 in ONNX Runtime."""
    model = widened(model, ir.DataType.DOUBLE)
    wanted = set()
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        plain = node.op_type == "Gelu" and node.attributes.get_string("approximate", "none") == "none"
        if node.domain == "" and (node.op_type == "Erf" or plain):
            node.domain = DOMAIN
            wanted.add(node.op_type)
    for function in (_erf(), _gelu()) if wanted else ():
        held = ir.serde.deserialize_function(function)
        model.functions[held.identifier()] = held
    if wanted:
        model.graph.opset_imports[DOMAIN] = 1
    return model


def is_in(model: ir.Model, dtype: ir.DataType) -> bool:
    """Return whether a node of the model's graph gives values of a type."""
    return any(v.dtype is dtype for node in model.graph for v in node.outputs)


def widened(model: ir.Model, to: ir.DataType, kinds: Collection[ir.DataType] = FLOATS) -> ir.Model:
    """Return a copy of the model, its floats of these kinds of the type `to`: weights, constants, casts, inputs."""
    model = model.clone()
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None and value.const_value.dtype in kinds:
                value.const_value = _wide(value.const_value, to)
        for value in [*graph.inputs, *graph.initializers.values(), *(v for n in graph for v in n.outputs)]:
            if value.dtype in kinds:
                value.type = ir.TensorType(to)
        for node in graph:
            _widen_attributes(node, to, kinds)
    return model


def _widen_attributes(node: ir.Node, to: ir.DataType, kinds: Collection[ir.DataType]) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in kinds:
            node.attributes[name] = ir.AttrTensor(name, _wide(attribute.as_tensor(), to))
        elif node.op_type == "Constant" and name in ("value_float", "value_floats") and ir.DataType.FLOAT in kinds:
            del node.attributes[name]
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.array(attribute.value, to.numpy())))
        elif name in ("to", "dtype") and ir.DataType(attribute.as_int()) in kinds:
            node.attributes[name] = ir.AttrInt64(name, to.value)


def _wide(tensor: ir.TensorProtocol, to: ir.DataType) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().astype(to.numpy()), name=tensor.name)


def jittered(model: ir.Model) -> ir.Model:
    """Return a copy of the model with each number of its weights moved by up to half its last bit.

    In half precision by a whole one, for it is rounded again: half of one would often be nothing. What sizes are
    computed of stays: twice as large, but for a last bit, is one less.
    """
    model, draw = model.clone(), np.random.default_rng(0)
    for graph in model.graphs():
        for value in graph.initializers.values():
            sizes = any(use.node.op_type in RESIZING and use.idx for use in value.uses())
            if value.const_value is not None and value.const_value.dtype in FLOATS and not sizes:
                held, dtype = value.const_value.numpy().astype(np.float64), value.const_value.dtype
                moved = held * (1 + MOVED.get(dtype, 2.0**-23) * (draw.random(held.shape) - 0.5))
                value.const_value = ir.tensor(moved.astype(dtype.numpy()), dtype, name=value.name)
    return model


def _function(name: str, constants: dict[str, np.ndarray], lines: list[tuple[str, str]]) -> onnx.FunctionProto:
    """Write a function of x giving y: `lines` are ("out", "Op a b")."""
    nodes = [helper.make_node("Constant", [], [n], value=numpy_helper.from_array(a)) for n, a in constants.items()]
    for made, text in lines:
        op, *inputs = text.split()
        domain = DOMAIN if op == "Erf" else ""
        nodes.append(helper.make_node(op, inputs, [made], domain=domain))
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_function(DOMAIN, name, ["x"], ["y"], nodes, imports)


def _erf() -> onnx.FunctionProto:
    points, weights = np.polynomial.legendre.leggauss(48)
    constants = {
        "low": np.array(-6.0), "high": np.array(6.0), "last": np.array([-1]), "t": (points + 1) / 2,
        "w": (weights / np.sqrt(np.pi)).reshape(-1, 1),
    }  # fmt: skip
    lines = [
        ("c", "Clip x low high"), ("u", "Unsqueeze c last"), ("p", "Mul u t"), ("q", "Mul p p"), ("n", "Neg q"),
        ("g", "Exp n"), ("s", "MatMul g w"), ("i", "Squeeze s last"), ("y", "Mul c i"),
    ]  # fmt: skip
    return _function("Erf", constants, lines)


def _gelu() -> onnx.FunctionProto:
    constants = {"root": np.array(np.sqrt(0.5)), "one": np.array(1.0), "half": np.array(0.5)}
    lines = [("a", "Mul x root"), ("e", "Erf a"), ("o", "Add e one"), ("h", "Mul x half"), ("y", "Mul h o")]
    return _function("Gelu", constants, lines)
