"""A norm as one operator of ONNX, read and built in this file alone.

    LayerNormalization(x, scale[, bias])      SimplifiedLayerNormalization(x, scale), which is RMSNorm

are what raising, translation and edits write, and what targets choose a form of. Both stand in the default domain, run
over the last axis with float32 statistics, and have one dtype throughout. ONNX Runtime runs them at every opset. Its
own operators take the add before the norm in as well:

    y, _, _, sum = SkipLayerNormalization(x, skip, gamma, beta, bias)     sum = x + skip + bias, y = LN(sum)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import onnx_ir as ir

from ...ir import Kind, Norm

CONTRIB = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""
GROUPED, HEADED, PACKED = "GroupQueryAttention", "MultiHeadAttention", "Attention"
"""Those of them that are attention."""
UNBIASED = "GroupQueryAttention without a bias"
"""Stands among the kernels of a target whose fast form of grouped-query attention takes no bias."""
NORMED = "GroupQueryAttention with norms of heads"
"""Stands among the kernels of a target whose grouped-query attention norms queries and keys itself."""
EXPERTS = "MoE"
"""That of them that is a mixture of experts."""
LAYER, RMS, STANDARD_RMS = "LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization"
OPERATORS = {Kind.LAYER: LAYER, Kind.RMS: RMS}
SKIP = {LAYER: "SkipLayerNormalization", RMS: "SkipSimplifiedLayerNormalization"}
PLAIN = {skip: norm for norm, skip in SKIP.items()}
"""What a Skip* operator is without its add."""
TELLING = {*SKIP, *PLAIN, STANDARD_RMS, "MatMul", "Add", "Mul"}
"""Operators whose stored operands tell how wide the others are."""
EPSILON = {
    **dict.fromkeys((LAYER, RMS, STANDARD_RMS), 1e-5), **dict.fromkeys(PLAIN, 1e-12),
    **dict.fromkeys(("BatchNormalization", "InstanceNormalization", "GroupNormalization"), 1e-5),
}  # fmt: skip
"""The epsilon of a norm that gives none: its operator's default, as the schema has it."""
SITE = "lnrewrite.site"
"""The key of a norm's site in its node's metadata."""
ONES = "lnrewrite.ones"
"""How the names begin of the gains that the operators demand where the norm itself has none."""
ZEROS = "lnrewrite.zeros"
"""How the names begin of biases of that kind."""

Attributes = Mapping[str, ir.Attr | int | float | Sequence[int]]


def attributes(eps: float) -> dict[str, int | float]:
    """Return the attributes of LayerNormalization or SimplifiedLayerNormalization."""
    return {"axis": -1, "epsilon": eps, "stash_type": 1}


@dataclass(frozen=True, slots=True)
class NormNode:
    """Hold a norm that is one node: its operator, gain [width], bias [width] and eps.

    With `skip`, it normalises x + skip + added, and `added` [width] may be None. `axes` is how many trailing axes it
    runs over; 0 or less where the rank of `x` is not known.
    """

    operator: str
    x: ir.Value
    gain: ir.Value
    bias: ir.Value | None
    eps: float
    axes: int = 1
    skip: ir.Value | None = None
    added: ir.Value | None = None

    @classmethod
    def read(cls, node: ir.Node) -> Self | None:
        """Return what a node computes, None where it is no such norm or lacks an input."""
        name, inputs = node.op_type, (*node.inputs, None, None, None, None, None)
        x, eps = inputs[0], epsilon(node)
        if node.domain == CONTRIB and name in PLAIN:
            _, skip, gain, bias, added = inputs[:5]
            bias, added = (bias, added) if PLAIN[name] == LAYER else (None, bias)
            return None if x is None or skip is None or gain is None else cls(name, x, gain, bias, eps, 1, skip, added)
        gain = inputs[1]
        if node.domain not in ("", "ai.onnx") or name not in (*SKIP, STANDARD_RMS) or x is None or gain is None:
            return None
        axis, rank = node.attributes.get_int("axis", -1), len(x.shape) if x.shape is not None else 0
        return cls(name, x, gain, inputs[2] if name == LAYER else None, eps, -axis if axis < 0 else rank - axis)

    @property
    def semantic(self) -> bool:
        """Return whether the operator is one of the two that every norm is written as."""
        return self.operator in SKIP

    @property
    def plain(self) -> bool:
        """Return whether the norm has no gain: the operator's is of ones that were made for it."""
        return (self.gain.name or "").startswith(ONES)

    @property
    def inputs(self) -> list[ir.Value | None]:
        """Return the node's inputs; one that is left out before others is None."""
        beta = [self.bias] if PLAIN.get(self.operator, self.operator) == LAYER else []
        given = [self.x, self.gain, *beta] if self.skip is None else [self.x, self.skip, self.gain, *beta, self.added]
        while given[-1] is None:
            given.pop()
        return given

    @property
    def attributes(self) -> Attributes:
        """Return the node's attributes."""
        return attributes(self.eps) if self.skip is None else {"epsilon": self.eps}

    def build(self, outputs: int = 1) -> ir.Node:
        """Return a new node that computes the norm; its first output has the type and the shape of `x`."""
        domain = "" if self.skip is None else CONTRIB
        node = ir.node(self.operator, self.inputs, self.attributes, domain=domain, num_outputs=outputs)
        resemble(node.outputs[0], self.x)
        return node


def resemble(value: ir.Value, other: ir.Value) -> None:
    """Give a value the shape and the type of another, as far as these are known."""
    value.shape = None if other.shape is None else other.shape.copy()
    if other.dtype is not None:
        value.type = ir.TensorType(other.dtype)


def take_place(old: ir.Value, new: ir.Value) -> None:
    """Make `new` stand for `old` everywhere, under its name."""
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    name, old.name = old.name, f"{old.name}_before" if old.name else old.name
    if name:
        new.name = name


def epsilon(node: ir.Node) -> float:
    """Return the eps of a norm's node."""
    return node.attributes.get_float("epsilon", EPSILON[node.op_type]) if node.op_type in EPSILON else 0.0


def site(node: ir.Node) -> str:
    """Return the site that a norm's node is called by."""
    return node.metadata_props.get(SITE, node.outputs[0].name or "")


# ---- writing a norm and its vectors ----


class Write(Protocol):
    """Add a node of one output, which has the type and the shape of `like`, and return that; `name` is a proposal."""

    def __call__(
        self, operator: str, inputs: Sequence[ir.Value], like: ir.Value, name: str, held: Attributes | None = None
    ) -> ir.Value: ...


def write_norm(
    graph: ir.Graph, write: Write, norm: Norm, x: ir.Value, held: Callable[[str], ir.Value], name: str
) -> ir.Value:
    """Write a norm of `x` over the last axis, of kind layer, rms or crms, and return its value.

    held: the value of a gain or bias by its name.
    """
    gain = _vector(graph, write, held(norm.gamma), x, norm.plus_one) if norm.gamma else ones(graph, x)
    bias = _vector(graph, write, held(norm.beta), x) if norm.beta else None
    if norm.kind is Kind.CRMS:
        result = write("Mul", [_compressed(graph, write, norm.eps, x, name), gain], x, f"{name}.gained")
        return result if bias is None else write("Add", [result, bias], x, f"{name}.bias.add")
    inside = bias if norm.kind is Kind.LAYER else None
    made = NormNode(OPERATORS[norm.kind], x, gain, inside, norm.eps)
    result = write(made.operator, [v for v in made.inputs if v is not None], x, name, made.attributes)
    return result if bias is inside or bias is None else write("Add", [result, bias], x, f"{name}.bias.add")


def _compressed(graph: ir.Graph, write: Write, eps: float, x: ir.Value, name: str) -> ir.Value:
    """Write x / sqrt((sum x^2 + (sum x)^2) / (n + 1) + eps)."""
    width, like = width_of(x), dtype_of(x).numpy()
    kept = None if x.shape is None else ir.Shape([*x.shape[:-1], 1])
    old = graph.opset_imports.get("", 1) < 13
    axes = [] if old else [constant(graph, "lnrewrite.axis-1", np.array([-1], np.int64))]
    held: Attributes = {"axes": [-1], "keepdims": 1} if old else {"keepdims": 1}

    def narrow(operator: str, inputs: list[ir.Value], part: str) -> ir.Value:
        made = write(operator, inputs, x, f"{name}.{part}", held if operator == "ReduceSum" else None)
        made.shape = kept
        return made

    square = write("Mul", [x, x], x, f"{name}.square")
    once, twice = (narrow("ReduceSum", [v, *axes], part) for v, part in ((x, "sum"), (square, "squares")))
    total = narrow("Add", [twice, narrow("Mul", [once, once], "sum_squared")], "total")
    numbers = {"count": float(width + 1), "eps": eps}
    many, small = (constant(graph, f"{name}.{key}", np.array(by, like)) for key, by in numbers.items())
    mean = narrow("Add", [narrow("Div", [total, many], "mean"), small], "variance")
    return write("Div", [x, narrow("Sqrt", [mean], "root")], x, f"{name}.normed")


def _vector(graph: ir.Graph, write: Write, value: ir.Value, x: ir.Value, plus_one: bool = False) -> ir.Value:
    """Return a constant vector [width] in the dtype of `x`, computed in the graph where it has another form."""
    name, wanted, held = value.name, dtype_of(x), dtype_of(value)
    if plus_one:
        one = constant(graph, f"lnrewrite.one.{held.name.lower()}", np.ones((), held.numpy()))
        value = write("Add", [value, one], value, f"{name}.plus_one")
    if value.shape is not None and len(value.shape) != 1:
        flat = constant(graph, "lnrewrite.flat", np.array([-1], np.int64))
        shape = [1] if all(d == 1 for d in value.shape) else None if x.shape is None else x.shape[-1:]
        value = write("Reshape", [value, flat], value, f"{name}.flat")
        value.shape = None if shape is None else ir.Shape(shape)
    value = value if held == wanted else cast(write, value, wanted)
    if value.shape is not None and value.shape[0] == 1 and x.shape is not None and x.shape[-1] != 1:
        value = write("Mul", [ones(graph, x), value], ones(graph, x), f"{name}.wide")  # one number for all channels
    return value


def cast(write: Write, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Return a value in another dtype."""
    result = write("Cast", [value], value, f"{value.name}.{dtype.name.lower()}", {"to": dtype})
    result.dtype = dtype
    return result


def ones(graph: ir.Graph, x: ir.Value) -> ir.Value:
    """Return the gain of ones [width] in the dtype of `x` [..., width], made where the graph has none yet."""
    return _filled(graph, x, ONES, 1)


def zeros(graph: ir.Graph, x: ir.Value) -> ir.Value:
    """Return the bias of zeros [width] in the dtype of `x` [..., width], made where the graph has none yet."""
    return _filled(graph, x, ZEROS, 0)


def _filled(graph: ir.Graph, x: ir.Value, name: str, number: int) -> ir.Value:
    width, dtype = width_of(x), dtype_of(x)
    return constant(graph, f"{name}.{width}.{dtype.name.lower()}", np.full(width, number, dtype.numpy()))


def width_of(x: ir.Value) -> int:
    """Return how many channels a value has at its last axis, as its shape says, or a norm or a product beside it.

    Raises LookupError where neither does.
    """
    told = (size for node, place in _beside(x) if (size := _told(node, place)) is not None)
    found = _size(x, -1) or next(told, None)
    if found is None:
        raise LookupError(f"{x.name} has no known width, which a new norm of it needs")
    return found


def dtype_of(x: ir.Value) -> ir.DataType:
    """Return a value's type, or that of what it meets. Raises LookupError where neither is known."""
    beside = (v.dtype for node, _ in _beside(x) for v in node.inputs[:2] if v is not None)
    found = x.dtype or next((dtype for dtype in beside if dtype is not None), None)
    if found is None:
        raise LookupError(f"{x.name} has no known type, which what is made of it needs")
    return found


def _beside(x: ir.Value) -> Iterator[tuple[ir.Node, int | None]]:
    """Yield the norms, products and sums that read a value, with the place where they do, and the one that makes it."""
    made = x.producer()
    given = [*((use.node, use.idx) for use in x.uses()), *([] if made is None else [(made, None)])]
    yield from ((node, place) for node, place in given if node.op_type in TELLING and (place or 0) < 2)


def _told(node: ir.Node, place: int | None) -> int | None:
    """Return how wide a node says that its input at a place is, or its output; None where it does not say it."""
    if (norm := NormNode.read(node)) is not None:
        return _size(norm.gain, -1)
    ranks = [len(v.shape) if v is not None and v.shape is not None else 0 for v in node.inputs[:2]]
    if node.op_type == "MatMul":
        return _size(node.inputs[1], -1 if place is None else 0) if ranks[1:] == [2] and place != 1 else None
    sizes = (_size(v, -1) for v, rank in zip(node.inputs[:2], ranks, strict=True) if rank == 1)
    return next((size for size in sizes if size is not None and size > 1), None)


def _size(value: ir.Value | None, axis: int) -> int | None:
    """Return a size that is known."""
    size = str(value.shape[axis]) if value is not None and value.shape is not None and len(value.shape) else ""
    return int(size) if size.isdecimal() else None


def constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """Return the initializer of that name, made where the graph has none yet."""
    if name not in graph.initializers:
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        graph.register_initializer(value)
    return graph.initializers[name]
