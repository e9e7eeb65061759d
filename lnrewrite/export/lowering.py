"""Write each norm of a semantic ONNX model, and the residual add before it, in the form that a target runs best.

A norm stands as LayerNormalization or SimplifiedLayerNormalization (see `backends.onnx_norms`). The add rides in it as

    y, _, _, sum = SkipLayerNormalization(x, skip, gamma, beta, bias)     sum = x + skip + bias, y = LN(sum)

where the target's table says that this is cheaper, whoever else reads the sum. Targets without ONNX Runtime's
operators get LayerNormalization (opset 17), RMSNormalization (23) or primitives.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass, TopologicalSortPass

from ..backends.onnx.lift import dtype as type_of
from ..backends.onnx.norms import SITE, attributes, constant
from ..backends.onnx.ops import CONTRIB, RESHAPE
from .targets import DECOMPOSED, LAYER, RMS, SKIP, STANDARD_RMS, Target

KINDS = {skip: norm for norm, skip in SKIP.items()}


@dataclass(frozen=True, slots=True)
class Row:
    """Name a norm, the form that it was written in, and why that one."""

    site: str
    form: str
    why: str


def split(model: ir.Model) -> int:
    """Write every Skip* norm as the add and the norm that it computes, RMSNormalization as the semantic operator.

    Returns how many Skip* there were. One whose mean or deviation something reads is left alone.
    """
    count = 0
    for node in list(model.graph):
        if node.domain == CONTRIB and node.op_type in KINDS and not any(v.uses() for v in node.outputs[1:3]):
            _apart(model.graph, node)
            count += 1
        elif node.op_type == STANDARD_RMS and node.domain == "" and _same_types(node) and _last_axis(node):
            node.op_type = RMS
            node.attributes.setdefault("stash_type", ir.AttrInt64("stash_type", 1))
    RemoveUnusedNodesPass()(model)
    return count


def _same_types(node: ir.Node) -> bool:
    return len({v.dtype for v in node.inputs if v is not None}) == 1


def _last_axis(node: ir.Node) -> bool:
    axis, x = node.attributes.get_int("axis", -1), node.inputs[0]
    return axis == -1 or (x is not None and x.shape is not None and axis == len(x.shape) - 1)


def _apart(graph: ir.Graph, node: ir.Node) -> None:
    kind = KINDS[node.op_type]
    x, skip, gamma, *rest = node.inputs
    beta, bias = (*rest, None, None)[:2] if kind == LAYER else (None, (*rest, None)[0])
    assert x is not None and skip is not None
    made: list[ir.Node] = []

    def plus(a: ir.Value, b: ir.Value) -> ir.Value:
        made.append(ir.node("Add", [a, b]))
        like(made[-1].outputs[0], node.outputs[0])
        return made[-1].outputs[0]

    if bias is not None:  # it is the bias of the product that was added, and goes back to it
        x, skip = (plus(x, bias), skip) if _is_product(x) else (x, plus(skip, bias))
    x = plus(x, skip)
    inputs = [x, gamma] + ([beta] if beta is not None else [])
    eps = node.attributes.get_float("epsilon", 1e-12 if kind == LAYER else 1e-6)
    made.append(ir.node(kind, inputs, attributes(eps)))
    like(made[-1].outputs[0], node.outputs[0])
    made[-1].metadata_props.update(node.metadata_props)
    graph.insert_before(node, made)
    pairs = [(node.outputs[0], made[-1].outputs[0])]
    pairs += [(node.outputs[3], x)] if len(node.outputs) > 3 else []
    for old, new in pairs:
        take_place(old, new)


def _is_product(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type.startswith(("MatMul", "Gemm", "Conv"))


def like(value: ir.Value, other: ir.Value) -> None:
    """Give a value the shape and the type of another."""
    value.shape = other.shape
    if other.dtype is not None:
        value.type = ir.TensorType(other.dtype)


def take_place(old: ir.Value, new: ir.Value) -> None:
    """Make `new` stand for `old` everywhere, under its name."""
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    name, old.name = old.name, f"{old.name}_before" if old.name else old.name
    if name:
        new.name = name


def reshaped(value: ir.Value) -> ir.Node | None:
    """Return the reshape that made a value, where it kept the last axis: norms do not see it."""
    node = value.producer()
    if node is None or node.op_type not in RESHAPE or node.inputs[0] is None:
        return None
    shapes = node.inputs[0].shape, value.shape
    known = all(s is not None and len(s) and isinstance(s[-1], int) for s in shapes)
    return node if known and shapes[0][-1] == shapes[1][-1] else None  # type: ignore[index]


def lower(model: ir.Model, target: Target, ort: str) -> list[Row]:
    """Write every semantic norm of a model in the target's cheapest form; return a row for each.

    ort: the version of ONNX Runtime that the model is made for, such as "1.31.1".
    """
    major, minor = ort.split(".")[:2]
    lowering = _Lowering(model, target, (int(major), int(minor)))
    rows = [lowering.one(node) for node in list(model.graph) if node.domain == "" and node.op_type in SKIP]
    TopologicalSortPass()(model)
    RemoveUnusedNodesPass()(model)
    if any(n.domain == CONTRIB for n in model.graph):
        model.graph.opset_imports[CONTRIB] = 1
    RemoveUnusedOpsetsPass()(model)
    return rows


class _Lowering:
    """Hold what the choice of each norm's form depends on."""

    def __init__(self, model: ir.Model, target: Target, ort: tuple[int, int]) -> None:
        self.graph, self.target, self.ort = model.graph, target, ort
        self.version = ".".join(map(str, ort))
        self.opset = model.graph.opset_imports.get("", 1)

    def one(self, node: ir.Node) -> Row:
        site = node.metadata_props.get(SITE, node.outputs[0].name or "")
        if not self.target.contrib:
            form, why = self.standard(node)
            return Row(site, form, why)
        if not _last_axis(node) or any(v.uses() or v.is_graph_output() for v in node.outputs[1:]):
            why = "its statistics are read too" if _last_axis(node) else "it runs over several axes"
            return Row(site, node.op_type, f"{why}: no Skip* operator does that")
        x = node.inputs[0]
        assert x is not None
        turned = reshaped(x)
        add, why = self.addition(turned.inputs[0] if turned is not None else x)  # type: ignore[arg-type]
        if add is None:
            return Row(site, node.op_type, why)
        rank, dtype = len(add.outputs[0].shape or ()), type_of(add.outputs[0])
        cost = self.target.cost(SKIP[node.op_type], dtype, rank, self.ort)
        if cost.cost == inf:
            return Row(site, node.op_type, f"the table has no {SKIP[node.op_type]} for {dtype} in ORT {self.version}")
        if cost.cost >= 1:
            apart = self.keep_apart(node, add)
            why = f"with its add in one operator both take {cost.cost} times as long{apart} ({cost.source})"
            return Row(site, node.op_type, why)
        self.together(node, add, turned)
        why = f"its add rides in it: {cost.cost} of the time of both ({cost.source})"
        return Row(site, SKIP[node.op_type], why)

    def addition(self, x: ir.Value) -> tuple[ir.Node | None, str]:
        """Return the add that makes `x` and can ride in its norm, or None and why there is none."""
        add = x.producer()
        if add is None or add.op_type not in {"Add", "Sum"} or len(add.inputs) != 2:
            taken = add is not None and add.op_type in KINDS
            return None, "another norm took the add in" if taken else "no residual add stands before it"
        if any(v is None or v.const_value is not None for v in add.inputs):
            return None, "what is added before it is a constant, no residual"
        if x.shape is None or len(x.shape) not in (2, 3):
            rank = "unknown" if x.shape is None else len(x.shape)
            return None, f"Skip* operators take ranks 2 and 3, and the sum's is {rank}"
        if not self.full(add):
            return None, "the add broadcasts in a way that Skip* operators do not"
        return add, ""

    def full(self, add: ir.Node) -> bool:
        """Return whether one operand has the sum's shape and the other that, or one that lacks the batch alone."""
        total = add.outputs[0].shape
        shapes = [v.shape for v in add.inputs if v is not None]
        if total is None or any(s is None for s in shapes):
            return False
        return any(a == total and (b == total or self.batchless(b, total)) for a, b in (shapes, shapes[::-1]))

    def batchless(self, shape: ir.Shape | None, total: ir.Shape) -> bool:
        if shape is None or len(total) != 3:
            return False
        return list(shape) in ([1, *list(total)[1:]], list(total)[1:])

    def together(self, node: ir.Node, add: ir.Node, turned: ir.Node | None) -> None:
        """Write the add and the norm as one Skip* operator; a reshape between them goes behind both."""
        total, y = add.outputs[0], node.outputs[0]
        x, skip = add.inputs
        assert x is not None and skip is not None
        if x.shape != total.shape:
            x, skip = skip, x
        (x, bias), (skip, more) = self.biased(x), self.biased(skip) if self.biased(x)[1] is None else (skip, None)
        bias = bias or more
        layer = node.op_type == LAYER
        beta = node.inputs[2] if layer and len(node.inputs) > 2 else None
        inputs = [x, skip, node.inputs[1], *([beta, bias] if layer else [bias])]
        while inputs[-1] is None:
            inputs.pop()
        read = len(total.uses()) > 1 or total.is_graph_output()
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        made = ir.node(SKIP[node.op_type], inputs, {"epsilon": epsilon}, domain=CONTRIB, num_outputs=4 if read else 1)
        made.metadata_props.update(node.metadata_props)
        like(made.outputs[0], total)
        self.graph.insert_before(node, made)
        result = made.outputs[0]
        if turned is not None:
            again = ir.node(turned.op_type, [result, *turned.inputs[1:]], dict(turned.attributes))
            like(result := again.outputs[0], y)
            self.graph.insert_before(node, again)
        take_place(y, result)
        if read:
            for empty in made.outputs[1:3]:
                empty.name = ""
            like(made.outputs[3], total)
            take_place(total, made.outputs[3])
        self.graph.remove([node], safe=True)

    def biased(self, value: ir.Value) -> tuple[ir.Value, ir.Value | None]:
        """Take a constant vector that was added to an operand, and that only the sum reads, out of it."""
        add = value.producer()
        if add is None or add.op_type != "Add" or len(value.uses()) != 1 or value.is_graph_output():
            return value, None
        for x, bias in (add.inputs, add.inputs[::-1]):
            if x is None or bias is None or bias.const_value is None or x.shape != value.shape:
                continue
            if bias.shape is not None and len(bias.shape) == 1:
                return x, bias
        return value, None

    def keep_apart(self, node: ir.Node, add: ir.Node) -> str:
        """Spell an add so that ONNX Runtime does not fuse it into the norm by itself where that is slower."""
        if node.op_type == LAYER and add.op_type == "Add":
            add.op_type = "Sum"
            return ", and written as Sum ONNX Runtime leaves the add alone"
        return ""

    def standard(self, node: ir.Node) -> tuple[str, str]:
        """Write a norm in standard operators."""
        if node.op_type == LAYER and self.opset >= 17:
            return LAYER, "a standard operator since opset 17"
        if node.op_type == RMS and self.opset >= 23:
            node.op_type = STANDARD_RMS
            return STANDARD_RMS, "a standard operator since opset 23"
        self.decompose(node)
        needed = 17 if node.op_type == LAYER else 23
        return DECOMPOSED, f"opset {self.opset} has no operator for it; opset {needed} does"

    def decompose(self, node: ir.Node) -> None:
        """Write x -> (x - m) / sqrt(mean((x - m)^2) + eps) * gamma + beta in primitives, statistics in float32."""
        x, scale = node.inputs[0], node.inputs[1]
        beta = node.inputs[2] if len(node.inputs) > 2 else None
        y = node.outputs[0]
        assert x is not None and x.dtype is not None
        half = x.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        wide = ir.DataType.FLOAT if half else x.dtype
        nodes: list[ir.Node] = []

        def op(name: str, first: ir.Value, *more: ir.Value | None, **held: Any) -> ir.Value:
            nodes.append(ir.node(name, [first, *more], held))
            like(value := nodes[-1].outputs[0], first)
            if "to" in held:
                value.type = ir.TensorType(ir.DataType(held["to"]))
            return value

        def mean(value: ir.Value) -> ir.Value:
            if self.opset < 18:
                made = op("ReduceMean", value, axes=[-1], keepdims=1)
            else:
                made = op("ReduceMean", value, constant(self.graph, "lnrewrite.last", np.array([-1])), keepdims=1)
            made.shape = ir.Shape([*list(x.shape or ())[:-1], 1]) if x.shape is not None else None
            return made

        number = constant(
            self.graph,
            f"lnrewrite.eps.{node.attributes.get_float('epsilon', 1e-5)!r}.{wide.name.lower()}",
            np.array(node.attributes.get_float("epsilon", 1e-5), wide.numpy()),
        )
        u = op("Cast", x, to=wide.value) if half else x
        if node.op_type == LAYER:
            u = op("Sub", u, mean(u))
        variance = mean(op("Mul", u, u))
        root = op("Sqrt", op("Add", variance, number))
        u = op("Div", u, root)
        u = op("Cast", u, to=x.dtype.value) if half else u
        u = op("Mul", u, scale)
        u = op("Add", u, beta) if beta is not None else u
        self.graph.insert_before(node, nodes)
        take_place(y, u)
