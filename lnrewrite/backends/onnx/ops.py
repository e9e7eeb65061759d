"""The neutral names of ONNX operators, and how their inputs become operands and attributes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from .norms import CONTRIB, NormNode, epsilon

Operands = Sequence[ir.Value | float | int | None]
Normalised = tuple[str, Operands, dict[str, Any]]

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
QUANTISED = {"MatMulNBits": 1, "MatMulBnb4": 1, "MatMulIntegerToFloat": 1, "DynamicQuantizeMatMul": 1}
"""Products whose weights are stored in few bits, by the place of the weight."""


def meant(number: Any) -> float:
    """Return the double that a narrower float was rounded from: 1/n, or the shortest decimal (1e-05)."""
    n = round(1 / float(number)) if 1e-6 < abs(number) < 1 else 0
    return 1 / n if n and type(number)(1 / n) == number else float(str(number))


@dataclass(frozen=True)
class Call:
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


def _reduce(kind: str, **more: Any) -> Callable[[Call], Normalised]:
    def rule(call: Call) -> Normalised:
        axes = call.axes()
        if (axes is None and call.at(1) is not None) or (not axes and call.attr("noop_with_empty_axes", 0)):
            return f"{kind}!", call.inputs, {}
        return kind, call.inputs[:1], {"axes": axes or None, "keepdim": bool(call.attr("keepdims", 1)), **more}

    return rule


def _layer_norm(kind: str) -> Callable[[Call], Normalised]:
    def rule(call: Call) -> Normalised:
        norm = NormNode.read(call.node)
        if norm is None:
            return f"{kind}!", call.inputs, {}
        gain = None if norm.plain else norm.gain
        return kind, (norm.x, gain, norm.bias), {"axes": norm.axes, "eps": call.eps()}

    return rule


def _statistics(kind: str) -> Callable[[Call], Normalised]:
    def rule(call: Call) -> Normalised:
        stored = (call.at(3), call.at(4)) if kind == "batch_norm" else ()
        if call.attr("training_mode", 0):
            return f"{kind}!", call.inputs, {}
        return kind, (call.at(0), call.at(1), call.at(2), *stored), {"eps": call.eps()}

    return rule


def _clip(call: Call) -> Normalised:
    low = call.attr("min", call.at(1))
    high = call.attr("max", call.at(2))
    if high is None and low is not None:
        return "clamp_min", (call.at(0), low), {}
    return "clamp", (call.at(0), low, high), {}


def _max(call: Call) -> Normalised:
    return ("maximum" if len(call.inputs) == 2 else "max_of_many"), call.inputs, {}


def _sum(call: Call) -> Normalised:
    return ("add" if len(call.inputs) == 2 else "sum_of_many"), call.inputs, {}


def _transpose(call: Call) -> Normalised:
    order = call.attr("perm") or range(call.rank())[::-1]
    return "permute", call.inputs[:1], {"order": tuple(order)}


def _slice(call: Call) -> Normalised:
    starts = call.attr("starts") or call.ints(1) or ()
    axes = call.axes(index=3) or tuple(range(len(starts)))
    steps = call.ints(4) if call.at(4) is not None else (1,)  # a negative step turns the axis around
    forward = steps is not None and min(steps) > 0
    if len(axes) == 1 and forward:
        return "slice", call.inputs[:1], {"axis": axes[0]}
    return "slices", call.inputs[:1], {}


def _gather(call: Call) -> Normalised:
    data, axis, index = call.at(0), call.attr("axis", 0), call.at(1)
    if data is not None and data.const_value is not None and axis == 0 and call.rank() == 2:
        return "embedding", (data, index), {}
    if index is not None and index.shape is not None and not len(index.shape):
        return "slice", (data,), {"axis": axis, "drop": True}
    return "gather", (data,), {"axes": (axis % max(1, call.rank()),)}


def _gather_nd(call: Call) -> Normalised:
    index = call.at(1)
    depth = index.shape[-1] if index is not None and index.shape else 1
    batch = call.attr("batch_dims", 0)
    return "gather", call.inputs[:1], {"axes": tuple(range(batch + (depth if isinstance(depth, int) else 1)))}


def _pad(call: Call) -> Normalised:
    """Describe padding; with anything but zeros it adds values, and where it pads must be known."""
    pads, rank, mode = call.attr("pads") or call.ints(1), call.rank(), call.attr("mode", "constant")
    given = call.at(2)
    tensor = ir.convenience.get_const_tensor(given) if given is not None else None
    zeros = given is None or (tensor is not None and not tensor.numpy().any())
    if pads is None or not rank or call.at(3) is not None or call.attr("value", 0.0):
        return "pad!", call.inputs, {}
    axes = {i % rank for i, n in enumerate(pads) if n}
    return ("pad" if zeros or mode != "constant" else "pad_value"), call.inputs[:1], {"axes": tuple(sorted(axes))}


def _gemm(call: Call) -> Normalised:
    x, weight, bias = call.at(0), call.at(1), call.at(2)
    if call.attr("transA", 0) or call.attr("alpha", 1.0) != 1 or (bias is not None and call.attr("beta", 1.0) != 1):
        return "gemm", call.inputs, {}
    return ("linear" if call.attr("transB", 0) else "matmul"), (x, weight, bias), {}


def _conv(kind: str) -> Callable[[Call], Normalised]:
    def rule(call: Call) -> Normalised:
        padded = any(call.attr("pads") or ()) or str(call.attr("auto_pad", "NOTSET")).startswith("SAME")
        return kind, (call.at(0), call.at(1), call.at(2)), {"padded": padded, "groups": call.attr("group", 1)}

    return rule


RULES: dict[str, Callable[[Call], Normalised]] = {
    "ReduceMean": _reduce("mean"), "ReduceSum": _reduce("sum"), "ReduceL2": _reduce("vector_norm", ord=2),
    "ReduceSumSquare": _reduce("sum_square"), "LayerNormalization": _layer_norm("layer_norm"),
    "RMSNormalization": _layer_norm("rms_norm"), "SimplifiedLayerNormalization": _layer_norm("rms_norm"),
    "BatchNormalization": _statistics("batch_norm"), "InstanceNormalization": _statistics("instance_norm"),
    "GroupNormalization": _statistics("group_norm"), "Clip": _clip, "Max": _max, "Sum": _sum,
    "Transpose": _transpose, "Slice": _slice, "Gather": _gather, "GatherND": _gather_nd, "Gemm": _gemm,
    "Pad": _pad, "Conv": _conv("conv"), "ConvTranspose": _conv("conv_transpose"),
}  # fmt: skip


def normalise(node: ir.Node) -> Normalised:
    """Return (neutral kind, operands, attributes) of a node; an operator without a rule keeps its name and inputs."""
    call, name = Call(node), node.op_type
    if node.domain == CONTRIB:
        if name in QUANTISED:
            return "linear", (call.at(0), None), {"quantised": True}
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
        return RULES[name](call)
    return SAME.get(name, name.lower()), node.inputs, {}
