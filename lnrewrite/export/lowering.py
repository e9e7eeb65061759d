"""Write each norm of a semantic ONNX model, and the residual add before it, in the form that a target runs best.

A norm stands as LayerNormalization or SimplifiedLayerNormalization (see `backends.onnx.norms`). The add rides in it, as
SkipLayerNormalization, where the target's table says that this is cheaper, whoever else reads the sum. Targets without
ONNX Runtime's operators get LayerNormalization (opset 17), RMSNormalization (23) or primitives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass, TopologicalSortPass

from ..backends.onnx.lift import dtype as type_of
from ..backends.onnx.norms import (
    CONTRIB,
    LAYER,
    PLAIN,
    RMS,
    SKIP,
    STANDARD_RMS,
    NormNode,
    constant,
    resemble,
    site,
    take_place,
)
from ..backends.onnx.ops import RESHAPE
from ..pipeline.report import Form
from .targets import DECOMPOSED, Target, release


def split(model: ir.Model) -> int:
    """Write every Skip* norm as the add and the norm that it computes, RMSNormalization as the semantic operator.

    Returns how many Skip* there were. One whose mean or deviation something reads is left alone.
    """
    count = 0
    for node in list(model.graph):
        norm = NormNode.read(node)
        if norm is not None and norm.skip is not None and not any(v.uses() for v in node.outputs[1:3]):
            _apart(model.graph, node, norm, norm.skip)
            count += 1
        elif norm is not None and norm.operator == STANDARD_RMS and norm.x.dtype == norm.gain.dtype and norm.axes == 1:
            node.op_type = RMS
            node.attributes.setdefault("stash_type", ir.AttrInt64("stash_type", 1))
    RemoveUnusedNodesPass()(model)
    return count


def _apart(graph: ir.Graph, node: ir.Node, norm: NormNode, skip: ir.Value) -> None:
    x, bias, made = norm.x, norm.added, list[ir.Node]()
    whole = x if x.shape is not None else node.outputs[0]  # an output of the model may call the same sizes otherwise

    def plus(a: ir.Value, b: ir.Value) -> ir.Value:
        made.append(ir.node("Add", [a, b]))
        resemble(made[-1].outputs[0], whole)
        return made[-1].outputs[0]

    if bias is not None:  # it is the bias of the product that was added, and goes back to it
        x, skip = (plus(x, bias), skip) if _is_product(x) else (x, plus(skip, bias))
    x = plus(x, skip)
    made.append(replace(norm, operator=PLAIN[norm.operator], x=x, skip=None, added=None).build())
    made[-1].metadata_props.update(node.metadata_props)
    graph.insert_before(node, made)
    pairs = [(node.outputs[0], made[-1].outputs[0])]
    pairs += [(node.outputs[3], x)] if len(node.outputs) > 3 else []
    for old, new in pairs:
        take_place(old, new)


def _is_product(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type.startswith(("MatMul", "Gemm", "Conv"))


def _is_vector(value: ir.Value) -> bool:
    """Return whether a constant is the same for every token; tables of positions are not."""
    return value.shape is None or all(size == 1 for size in list(value.shape)[:-1])


def reshaped(value: ir.Value) -> ir.Node | None:
    """Return the reshape that made a value, where it kept the last axis: norms do not see it."""
    node = value.producer()
    if node is None or node.op_type not in RESHAPE or node.inputs[0] is None:
        return None
    shapes = node.inputs[0].shape, value.shape
    known = all(s is not None and len(s) and isinstance(s[-1], int) for s in shapes)
    return node if known and shapes[0][-1] == shapes[1][-1] else None  # type: ignore[index]


def lower(model: ir.Model, target: Target, ort: str) -> list[Form]:
    """Write every semantic norm of a model in the target's cheapest form; return a row for each.

    ort: the version of ONNX Runtime that the model is made for, such as "1.31.1".
    """
    lowering = _Lowering(model, target, release(ort))
    rows = [lowering.one(node, norm) for node in list(model.graph) if (norm := NormNode.read(node)) and norm.semantic]
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

    def one(self, node: ir.Node, norm: NormNode) -> Form:
        """Write one norm; return its row."""
        name, own = site(node), norm.operator
        if not self.target.contrib:
            return Form(name, *self.standard(node, norm))
        if norm.axes != 1 or any(v.uses() or v.is_graph_output() for v in node.outputs[1:]):
            why = "its statistics are read too" if norm.axes == 1 else "it runs over several axes"
            return Form(name, own, f"{why}: no Skip* operator does that")
        turned = reshaped(norm.x)
        add, why = self.addition(turned.inputs[0] if turned is not None else norm.x)  # type: ignore[arg-type]
        if add is None:
            return Form(name, own, why)
        rank, dtype = len(add.outputs[0].shape or ()), type_of(add.outputs[0])
        cost = self.target.cost(SKIP[own], dtype, rank, self.ort)
        if cost.cost == inf:
            return Form(name, own, f"the table has no {SKIP[own]} for {dtype} in ORT {self.version}")
        if cost.cost > 1:
            apart = self.keep_apart(node, add)
            why = f"with its add in one operator both take {cost.cost} times as long{apart} ({cost.source})"
            return Form(name, own, why)
        self.together(node, norm, add, turned)
        return Form(name, SKIP[own], f"its add rides in it: {cost.cost} of the time of both ({cost.source})")

    def addition(self, x: ir.Value) -> tuple[ir.Node | None, str]:
        """Return the add that makes `x` and can ride in its norm, or None and why there is none."""
        add = x.producer()
        if add is None or add.op_type not in {"Add", "Sum"} or len(add.inputs) != 2:
            taken = add is not None and add.op_type in PLAIN
            return None, "another norm took the add in" if taken else "no residual add stands before it"
        if any(v is None or v.const_value is not None and _is_vector(v) for v in add.inputs):
            return None, "what is added before it is a constant vector, no residual"
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

    def together(self, node: ir.Node, norm: NormNode, add: ir.Node, turned: ir.Node | None) -> None:
        """Write the add and the norm as one Skip* operator; a reshape between them goes behind both."""
        total, y = add.outputs[0], node.outputs[0]
        x, skip = add.inputs
        assert x is not None and skip is not None
        if x.shape != total.shape:
            x, skip = skip, x
        (x, bias), (skip, more) = self.biased(x), self.biased(skip) if self.biased(x)[1] is None else (skip, None)
        read = any(len(v.uses()) > 1 or v.is_graph_output() for v in (total, *(turned.outputs if turned else ())))
        fused = replace(norm, operator=SKIP[norm.operator], x=x, skip=skip, added=bias or more)
        made = fused.build(outputs=4 if read else 1)
        made.metadata_props.update(node.metadata_props)
        resemble(made.outputs[0], total)
        self.graph.insert_before(node, made)
        result = made.outputs[0]
        if turned is not None:
            again = ir.node(turned.op_type, [result, *turned.inputs[1:]], dict(turned.attributes))
            resemble(result := again.outputs[0], y)
            self.graph.insert_before(node, again)
        take_place(y, result)
        if read:
            for empty in made.outputs[1:3]:
                empty.name = ""
            resemble(made.outputs[3], total)
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

    def standard(self, node: ir.Node, norm: NormNode) -> tuple[str, str]:
        """Write a norm in standard operators; return the form and why it is that one."""
        if norm.operator == LAYER and self.opset >= 17:
            return LAYER, "a standard operator since opset 17"
        if norm.operator == RMS and self.opset >= 23:
            node.op_type = STANDARD_RMS
            return STANDARD_RMS, "a standard operator since opset 23"
        self.decompose(node, norm)
        needed = 17 if norm.operator == LAYER else 23
        return DECOMPOSED, f"opset {self.opset} has no operator for it; opset {needed} does"

    def decompose(self, node: ir.Node, norm: NormNode) -> None:
        """Write x -> (x - m) / sqrt(mean((x - m)^2) + eps) * gamma + beta in primitives, statistics in float32."""
        x = norm.x
        assert x.dtype is not None
        half = x.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        wide = ir.DataType.FLOAT if half else x.dtype
        nodes: list[ir.Node] = []

        def op(name: str, first: ir.Value, *more: ir.Value | None, **held: int | Sequence[int]) -> ir.Value:
            nodes.append(ir.node(name, [first, *more], held))
            resemble(value := nodes[-1].outputs[0], first)
            return value

        def cast(value: ir.Value, to: ir.DataType) -> ir.Value:
            value = op("Cast", value, to=to.value)
            value.type = ir.TensorType(to)
            return value

        def mean(value: ir.Value) -> ir.Value:
            if self.opset < 18:
                made = op("ReduceMean", value, axes=[-1], keepdims=1)
            else:
                made = op("ReduceMean", value, constant(self.graph, "lnrewrite.last", np.array([-1])), keepdims=1)
            made.shape = ir.Shape([*list(x.shape or ())[:-1], 1]) if x.shape is not None else None
            return made

        name = f"lnrewrite.eps.{norm.eps!r}.{wide.name.lower()}"
        number = constant(self.graph, name, np.array(norm.eps, wide.numpy()))
        u = cast(x, wide) if half else x
        if norm.operator == LAYER:
            u = op("Sub", u, mean(u))
        variance = mean(op("Mul", u, u))
        root = op("Sqrt", op("Add", variance, number))
        u = op("Div", u, root)
        u = cast(u, x.dtype) if half else u
        u = op("Mul", u, norm.gain)
        u = op("Add", u, norm.bias) if norm.bias is not None else u
        self.graph.insert_before(node, nodes)
        take_place(node.outputs[0], u)
