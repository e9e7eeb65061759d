"""Lift an ONNX model into the neutral view that detection looks at: ops are named by the values that they make."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ...detect.graph import Op, Operand, OpGraph, unchanged
from .ops import SIZES, meant, neutral
from .shapes import infer_shapes

DTYPES = {ir.DataType.FLOAT: "float32", ir.DataType.DOUBLE: "float64"}
FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
INTEGERS = {ir.DataType.INT64, ir.DataType.INT32}
PRODUCTS = {"matmul", "linear"}
DRAWN = re.compile("^(Random|Bernoulli|Multinomial)")
"""Operators that draw random numbers."""


def lift(model: ir.Model) -> OpGraph:
    """Return the neutral view of a model's main graph. Missing shapes are inferred and kept in the model.

    Constants of one number become operands; a product with the bias that is added to it is one linear op, named by the
    sum. What tells sizes alone (Shape) reads nothing in this view.
    """
    infer_shapes(model)
    return _Lift(model.graph).view()


class _Lift:
    """Hold one lift's state: the ops so far, by the name of the value that each makes, and what stands for what."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.ops: dict[str, Op] = {}
        self.alias: dict[str, str] = {}

    def view(self) -> OpGraph:
        fixed = {name(v) for v in self.graph.initializers.values() if v.dtype in FLOATS or literal(v) is not None}
        for value in self.graph.inputs:
            if value.const_value is None:
                self.add(value, "input")
        for value in self.graph.initializers.values():
            if literal(value) is None:
                self.add(value, "param" if value.dtype in FLOATS else "const", param=name(value))
        for node in self.graph:
            self.node(node)
            if not DRAWN.search(node.op_type) and all(
                v is None or name(v) in fixed for v in (*node.inputs, *captured(node))
            ):
                fixed |= {name(v) for v in node.outputs}
        outputs = tuple(n for v in self.graph.outputs if isinstance(n := self.operand(v), str))
        return OpGraph(self.living(outputs), self.alias, outputs, frozenset(fixed))

    def living(self, outputs: tuple[str, ...]) -> dict[str, Op]:
        """Return the ops without those that nothing reads, such as the transposes that linear maps took in."""
        read = set(outputs)
        kept = []
        for op in reversed(self.ops.values()):
            if op.name in read or op.kind == "input":
                read.update(op.data)
                kept.append(op)
        return {op.name: op for op in reversed(kept)}

    def add(self, value: ir.Value, kind: str, inputs: tuple[Operand, ...] = (), **attrs: object) -> None:
        op = Op(name(value), kind, inputs, attrs, shape(value), dtype(value))
        source = inputs[0] if inputs else None
        if isinstance(source, str) and (kind == "alias" or unchanged(op, self.ops[source])):
            self.alias[op.name] = source
        else:
            self.ops[op.name] = op

    def operand(self, value: ir.Value | float | int | None) -> Operand:
        """Return what stands for an operand: an op's name, a number, or None."""
        if not isinstance(value, ir.Value):
            return value
        if (number := literal(value)) is not None:
            return number
        found = self.alias.get(name(value), name(value))
        return found if found in self.ops else None

    def node(self, node: ir.Node) -> None:
        if node.op_type in SIZES:
            kind, inputs, attrs = "size", tuple[Operand, ...](), dict[str, object]()
        else:
            kind, values, attrs = neutral(node)
            inputs = tuple(self.operand(v) for v in [*values, *captured(node)])
            kind, inputs = self.transposed(*self.rolled(kind, inputs))
        for value in node.outputs:
            if value.name and literal(value) is None and not (kind == "add" and self.biased(value, node.inputs)):
                self.add(value, kind, inputs, **attrs)

    def rolled(self, kind: str, inputs: tuple[Operand, ...]) -> tuple[str, tuple[Operand, ...]]:
        """Read the parts of one value, put together in another order, as a roll."""
        parts = [self.ops[i] for i in inputs if isinstance(i, str)] if kind == "cat" else []
        sources = {part.inputs[0] for part in parts if part.kind == "slice"}
        whole = len(sources) == 1 and len(parts) == len(inputs) and all(part.kind == "slice" for part in parts)
        return ("roll", tuple(sources)) if whole else (kind, inputs)

    def transposed(self, kind: str, inputs: tuple[Operand, ...]) -> tuple[str, tuple[Operand, ...]]:
        """Read x @ w.T as a linear map of w."""
        if kind == "matmul" and len(inputs) == 2 and isinstance(inputs[1], str):
            turned = self.ops[inputs[1]]
            if turned.kind == "permute" and turned.attrs["order"] == (1, 0):
                return "linear", (inputs[0], turned.inputs[0])
        return kind, inputs

    def biased(self, total: ir.Value, terms: Sequence[ir.Value | None]) -> bool:
        """Take a bias that is added to a product, which nothing else reads, into the product; say whether it is so."""
        for product, bias in (terms, terms[::-1]):
            map_, vector = self.operand(product), self.operand(bias)
            if not (isinstance(map_, str) and isinstance(vector, str) and isinstance(product, ir.Value)):
                continue
            op, weight = self.ops[map_], self.ops[vector]
            alone = len(product.uses()) == 1 and not product.is_graph_output() and map_ == product.name
            sizes = weight.shape or ()
            fits = weight.kind == "param" and sizes[-1:] == (op.shape or ())[-1:] and set(sizes[:-1]) <= {1}
            if alone and fits and op.kind in PRODUCTS and len(op.inputs) == 2:
                del self.ops[map_]
                self.add(total, op.kind, (*op.inputs, vector))
                return True
        return False


def captured(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the values of the outer graph that a node's subgraphs read."""
    for attribute in node.attributes.values():
        if attribute.type in {ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS}:
            held = attribute.value if attribute.type == ir.AttributeType.GRAPHS else [attribute.value]
            for graph in held:
                for inner in ir.traversal.RecursiveGraphIterator(graph):
                    yield from (v for v in inner.inputs if v is not None and v.graph is node.graph)


def literal(value: ir.Value) -> float | int | None:
    """Return the number that a value is known to be, None where it is no constant of one element."""
    number = _number(value)
    if number is None:
        return None
    return int(number) if isinstance(number, np.integer) else meant(number)


def _number(value: ir.Value) -> np.integer[Any] | np.floating[Any] | None:
    """Return the one number that a value is stored as, rounded by casts behind it."""
    node = value.producer()
    if node is not None and node.op_type in {"Cast", "CastLike"} and node.inputs[0] and value.dtype in FLOATS:
        stored = _number(node.inputs[0])
        return None if stored is None else stored.astype(value.dtype.numpy())
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size != 1 or tensor.dtype not in FLOATS | INTEGERS:
        return None
    return tensor.numpy().reshape(-1)[0]


def name(value: ir.Value) -> str:
    """Return a value's name; every value of a model that was read has one."""
    return value.name or ""


def shape(value: ir.Value) -> tuple[int | str, ...] | None:
    """Return a shape with numbers and symbols; a size that nobody knows is a symbol of its own."""
    if value.shape is None:
        return None
    sizes = [size(d) for d in value.shape]
    return tuple(f"?{value.name}.{i}" if d is None else d for i, d in enumerate(sizes))


def size(dimension: int | ir.SymbolicDim) -> int | str | None:
    """Return a dimension's number, also one that stands there as a name ("4"), its name, or None."""
    named = dimension if isinstance(dimension, int) else dimension.value or None
    return int(named) if isinstance(named, str) and re.fullmatch("[0-9]{1,18}", named) else named


def dtype(value: ir.Value) -> str:
    """Return the name that torch has for a value's element type."""
    return DTYPES.get(value.dtype, value.dtype.name.lower()) if value.dtype is not None else ""
