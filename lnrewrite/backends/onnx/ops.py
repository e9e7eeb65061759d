"""The neutral names of ONNX operators, and how their inputs become operands and attributes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from .norms import CONTRIB, NormNode, epsilon

Operands = Sequence[ir.Value | float | int | None]
Neutral = tuple[str, Operands, dict[str, object]]

STANDARD = {"", "ai.onnx"}
SIZES = {"Shape", "Size", "NonZero"}
"""Operators whose outputs say how large a value is, or where it is not zero: they read no features."""
ALIAS = {"Identity", "Dropout"}
RESHAPE = {"Reshape", "Squeeze", "Unsqueeze", "Flatten"}
SAME = {
    "Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Neg": "neg", "Pow": "pow", "Sqrt": "sqrt",
    "Reciprocal": "reciprocal", "Abs": "abs", "Exp": "exp", "Sigmoid": "sigmoid", "Tanh": "tanh", "Concat": "cat",
    "Attention": "scaled_dot_product_attention", "MatMul": "matmul", "OneHot": "one_hot", "LeakyRelu": "leaky_relu",
}  # fmt: skip
FIRST = {"Cast": "cast", "CastLike": "cast", "Expand": "expand", "Relu": "relu", "Elu": "elu"}
CONTRIB_SAME = {
    "MultiHeadAttention": "scaled_dot_product_attention", "GroupQueryAttention": "scaled_dot_product_attention",
    "DecoderMaskedMultiHeadAttention": "scaled_dot_product_attention", "FastGelu": "gelu", "BiasGelu": "gelu",
    "QuickGelu": "gelu", "PackedMultiHeadAttention": "scaled_dot_product_attention",
    "SparseAttention": "scaled_dot_product_attention", "PagedAttention": "scaled_dot_product_attention",
}  # fmt: skip
NO_LENGTH = 1e-30
"""The length from which on LpNormalization divides: rows of zeros stay zeros there."""
QUANTISED = {"MatMulNBits": 1, "MatMulBnb4": 1, "MatMulIntegerToFloat": 1, "DynamicQuantizeMatMul": 1}
"""Products whose weights are stored in few bits, by the place of the weight."""


def meant(number: np.floating) -> float:
    """Return the double that a narrower float was rounded from: 1/n, or the shortest decimal (1e-05)."""
    n = round(1 / float(number)) if 1e-6 < abs(number) < 1 else 0
    return 1 / n if n and type(number)(1 / n) == number else float(str(number))


@dataclass(frozen=True)
class NodeReader:
    """Give the rules what they ask of a node: attributes, constant inputs, ranks."""

    node: ir.Node

    @property
    def inputs(self) -> tuple[ir.Value | None, ...]:
        """Return the inputs; one that was left out is None."""
        return tuple(self.node.inputs)

    def attr(self, name: str, default: Any = None) -> Any:
        """Return an attribute's value."""
        found = self.node.attributes.get(name)
        if found is None:
            return default
        return meant(np.float32(found.as_float())) if found.type == ir.AttributeType.FLOAT else found.value

    def eps(self) -> float:
        """Return a norm's eps, as it was meant."""
        return meant(np.float32(epsilon(self.node)))

    def at(self, index: int) -> ir.Value | None:
        """Return an input, None where there is none."""
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def ints(self, index: int) -> tuple[int, ...] | None:
        """Return the values of a constant integer input, None where they are not known."""
        tensor = ir.convenience.get_const_tensor(value) if (value := self.at(index)) is not None else None
        return None if tensor is None or tensor.size > 64 else tuple(int(i) for i in tensor.numpy().reshape(-1))

    def rank(self, index: int = 0) -> int:
        """Return the rank of an input, 0 where it is not known."""
        value = self.at(index)
        return len(value.shape) if value is not None and value.shape is not None else 0

    def axes(self, attribute: str = "axes", index: int = 1) -> tuple[int, ...] | None:
        """Return the axes of a reduction: an attribute in old opsets, an input in new ones; none at all are all."""
        found = self.attr(attribute)
        return tuple(found) if found is not None else self.ints(index)


def _reduce(kind: str, **more: object) -> Callable[[NodeReader], Neutral]:
    def rule(node: NodeReader) -> Neutral:
        axes = node.axes()
        if (axes is None and node.at(1) is not None) or (not axes and node.attr("noop_with_empty_axes", 0)):
            return f"{kind}!", node.inputs, {}
        return kind, node.inputs[:1], {"axes": axes or None, "keepdim": bool(node.attr("keepdims", 1)), **more}

    return rule


def _layer_norm(kind: str) -> Callable[[NodeReader], Neutral]:
    def rule(node: NodeReader) -> Neutral:
        norm = NormNode.read(node.node)
        if norm is None:
            return f"{kind}!", node.inputs, {}
        gain = None if norm.plain else norm.gain
        return kind, (norm.x, gain, norm.bias), {"axes": norm.axes, "eps": node.eps()}

    return rule


def _length(node: NodeReader) -> Neutral:
    axis = int(node.attr("axis", -1))
    axis = axis - node.rank() if axis >= 0 else axis
    if int(node.attr("p", 2)) != 2 or axis >= 0:
        return "lp_norm!", node.inputs, {}
    return "l2_norm", node.inputs, {"axis": axis, "eps": NO_LENGTH}


def _statistics(kind: str) -> Callable[[NodeReader], Neutral]:
    def rule(node: NodeReader) -> Neutral:
        stored = (node.at(3), node.at(4)) if kind == "batch_norm" else ()
        if node.attr("training_mode", 0):
            return f"{kind}!", node.inputs, {}
        return kind, (node.at(0), node.at(1), node.at(2), *stored), {"eps": node.eps()}

    return rule


def _clip(node: NodeReader) -> Neutral:
    low = node.attr("min", node.at(1))
    high = node.attr("max", node.at(2))
    if high is None and low is not None:
        return "clamp_min", (node.at(0), low), {}
    return "clamp", (node.at(0), low, high), {}


def _max(node: NodeReader) -> Neutral:
    return ("maximum" if len(node.inputs) == 2 else "max_of_many"), node.inputs, {}


def _sum(node: NodeReader) -> Neutral:
    return ("add" if len(node.inputs) == 2 else "sum_of_many"), node.inputs, {}


def _transpose(node: NodeReader) -> Neutral:
    order = node.attr("perm") or range(node.rank())[::-1]
    return "permute", node.inputs[:1], {"order": tuple(order)}


def _slice(node: NodeReader) -> Neutral:
    starts = node.attr("starts") or node.ints(1) or ()
    axes = node.axes(index=3) or tuple(range(len(starts)))
    steps = node.ints(4) if node.at(4) is not None else (1,)  # a negative step turns the axis around
    forward = steps is not None and min(steps) > 0
    if len(axes) == 1 and forward:
        return "slice", node.inputs[:1], {"axis": axes[0]}
    return "slices", node.inputs[:1], {}


def _gather(node: NodeReader) -> Neutral:
    data, axis, index = node.at(0), node.attr("axis", 0), node.at(1)
    if data is not None and data.const_value is not None and axis == 0 and node.rank() == 2:
        return "embedding", (data, index), {}
    if index is not None and index.shape is not None and not len(index.shape):
        return "slice", (data,), {"axis": axis, "drop": True}
    return "gather", (data,), {"axes": (axis % max(1, node.rank()),)}


def _gather_nd(node: NodeReader) -> Neutral:
    data, index = node.at(0), node.at(1)
    depth = index.shape[-1] if index is not None and index.shape else 1
    batch = node.attr("batch_dims", 0)
    if data is not None and data.const_value is not None and node.rank() == 2 and (depth, batch) == (1, 0):
        return "embedding", (data, index), {}
    return "gather", node.inputs[:1], {"axes": tuple(range(batch + (depth if isinstance(depth, int) else 1)))}


def _gather_elements(node: NodeReader) -> Neutral:
    """Name picking each element by its own index; one that was expanded over the channels picks whole tokens."""
    at, axis = node.at(1), node.attr("axis", 0)
    made = at.producer() if at is not None else None
    held = made.inputs[0] if made is not None and made.op_type == "Expand" else None
    if node.rank() == 3 and axis in (1, -2) and held is not None and held.shape and held.shape[-1] == 1:
        return "gather", node.inputs[:1], {"axes": (1,)}
    return "gather_elements", node.inputs, {}


def _scatter(node: NodeReader) -> Neutral:
    return ("scatter_add" if node.attr("reduction", "none") == "add" else "scatter"), node.inputs, {}


def _pad(node: NodeReader) -> Neutral:
    """Describe padding; with anything but zeros it adds values, and where it pads must be known."""
    pads, rank, mode = node.attr("pads") or node.ints(1), node.rank(), node.attr("mode", "constant")
    given = node.at(2)
    tensor = ir.convenience.get_const_tensor(given) if given is not None else None
    zeros = given is None or (tensor is not None and not tensor.numpy().any())
    if pads is None or not rank or node.at(3) is not None or node.attr("value", 0.0):
        return "pad!", node.inputs, {}
    axes = {i % rank for i, n in enumerate(pads) if n}
    return ("pad" if zeros or mode != "constant" else "pad_value"), node.inputs[:1], {"axes": tuple(sorted(axes))}


def _gemm(node: NodeReader) -> Neutral:
    x, weight, bias = node.at(0), node.at(1), node.at(2)
    if node.attr("transA", 0) or node.attr("alpha", 1.0) != 1 or (bias is not None and node.attr("beta", 1.0) != 1):
        return "gemm", node.inputs, {}
    return ("linear" if node.attr("transB", 0) else "matmul"), (x, weight, bias), {}


def _fused_matmul(node: NodeReader) -> Neutral:
    batched = node.attr("transBatchA", 0) or node.attr("transBatchB", 0)
    if batched or node.attr("transA", 0) or node.attr("alpha", 1.0) != 1:
        return "gemm", node.inputs, {}
    return ("linear" if node.attr("transB", 0) else "matmul"), node.inputs[:2], {}


def _einsum(node: NodeReader) -> Neutral:
    return "einsum", node.inputs, {"equation": str(node.attr("equation", "")).replace(" ", "")}


def _conv(kind: str) -> Callable[[NodeReader], Neutral]:
    def rule(node: NodeReader) -> Neutral:
        padded = any(node.attr("pads") or ()) or str(node.attr("auto_pad", "NOTSET")).startswith("SAME")
        return kind, (node.at(0), node.at(1), node.at(2)), {"padded": padded, "groups": node.attr("group", 1)}

    return rule


RULES: dict[str, Callable[[NodeReader], Neutral]] = {
    "ReduceMean": _reduce("mean"), "ReduceSum": _reduce("sum"), "ReduceL2": _reduce("vector_norm", ord=2),
    "ReduceSumSquare": _reduce("sum_square"), "LayerNormalization": _layer_norm("layer_norm"),
    "LpNormalization": _length, "Einsum": _einsum,
    "RMSNormalization": _layer_norm("rms_norm"), "SimplifiedLayerNormalization": _layer_norm("rms_norm"),
    "BatchNormalization": _statistics("batch_norm"), "InstanceNormalization": _statistics("instance_norm"),
    "GroupNormalization": _statistics("group_norm"), "Clip": _clip, "Max": _max, "Sum": _sum,
    "Transpose": _transpose, "Slice": _slice, "Gather": _gather, "GatherND": _gather_nd, "Gemm": _gemm,
    "GatherElements": _gather_elements, "ScatterElements": _scatter,
    "Pad": _pad, "Conv": _conv("conv"), "ConvTranspose": _conv("conv_transpose"),
}  # fmt: skip


def neutral(node: ir.Node) -> Neutral:
    """Return (neutral kind, operands, attributes) of a node; an operator without a rule keeps its name and inputs."""
    name = node.op_type
    if node.domain == CONTRIB:
        if name in QUANTISED:
            return "linear", (node.inputs[0] if node.inputs else None, None), {"quantised": True}
        if name == "FusedMatMul":
            return _fused_matmul(NodeReader(node))
        return CONTRIB_SAME.get(name, name.lower()), node.inputs, {}
    if node.domain not in STANDARD:
        return f"{node.domain}.{name}", node.inputs, {}
    if name in ALIAS:
        return "alias", node.inputs[:1], {}
    if name in RESHAPE:
        return "reshape", node.inputs[:1], {}
    if name in FIRST:
        return FIRST[name], node.inputs[:1], {}
    if name in RULES:
        return RULES[name](NodeReader(node))
    return SAME.get(name, name.lower()), node.inputs, {}
