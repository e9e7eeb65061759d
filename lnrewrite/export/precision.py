"""Turn a float32 model into half precision, and keep in float32 what needs it.

Whether a value is half is told by where it comes from, not by its operator:

    features   float inputs, rows of tables, and all that is computed with them     half, where the operator can
    places     numbers made from integers: positions, distances, masks              float32, until they meet features
    constants  weights and what is computed from them alone                         as who reads them

So rotary angles and relative positions keep their digits. Norms take and give half, with statistics in float32 inside.
The converters of ONNX Runtime's tools were weighed: they know no bfloat16, go by operator, and hold the model as one
protobuf, which ends at 2 GiB.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir

from ..backends.onnx.shapes import infer_types
from ..errors import Code, LnrewriteError

HALVES = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
LARGEST = {ir.DataType.FLOAT16: 65504.0, ir.DataType.BFLOAT16: 3.3895e38}
FLOAT_ONLY = {"MeanVarianceNormalization"}
"""Operators whose schema allows half, and whose definition, which runtimes expand, holds float32 constants."""
MASK = 1e30
"""Finite constants from here on stand for minus infinity, and become the type's largest number."""


class Role(enum.Enum):
    """Describe what a float32 value holds; CONSTANT is decided by who reads it."""

    FEATURE = "half"
    WIDE = "float32, from an operator that has no half"
    PLACE = "float32"
    CONSTANT = "as its readers"


SINGLE = {Role.PLACE, Role.WIDE}


def lower_precision(model: ir.Model, dtype: str) -> list[str]:
    """Turn the float32 values of a model into `dtype`, fp16 or bf16, in place; return notes for people.

    Values that are half already stay as they are, and so do float32 islands between them. Raises LnrewriteError LN502
    for a weight that the type cannot hold.
    """
    if len(list(model.graphs())) > 1:
        why = "it has control flow, whose bodies are float32"
        raise LnrewriteError(Code.LN502, f"--dtype {dtype}", why, "export the PyTorch model in that dtype")
    infer_types(model)
    return _Narrowing(model, HALVES[dtype]).run()


class _Narrowing:
    """Hold the role of every float32 value while a model is rewritten."""

    def __init__(self, model: ir.Model, half: ir.DataType) -> None:
        self.graph, self.half = model.graph, half
        self.opset = model.graph.opset_imports.get("", 1)
        self.roles: dict[ir.Value, Role] = {}
        self.casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self.lost: list[str] = []

    def run(self) -> list[str]:
        for value in self.graph.initializers.values():
            self.assign(value, Role.CONSTANT)
        for value in self.graph.inputs:
            self.assign(value, Role.FEATURE)
        nodes = list(self.graph)
        for node in nodes:
            self.label(node)
        for node in reversed(nodes):
            for value in node.outputs:
                self.settle(value)
        for value in [*self.graph.initializers.values()]:
            self.settle(value)
        for node in nodes:
            self.rewrite(node)
        for index, value in enumerate(self.graph.outputs):
            if self.roles.get(value) in SINGLE:
                self.graph.outputs[index] = self.output(value)
        for value in self.half_values():
            value.type = ir.TensorType(self.half)
            if value.const_value is not None:
                value.const_value = self.narrow(value.name or "", value.const_value)
        rows = f"more than 1 % of the numbers of {', '.join(self.lost[:3])} became zero" if self.lost else ""
        return [rows] if rows else []

    def assign(self, value: ir.Value, role: Role) -> None:
        if value.dtype is ir.DataType.FLOAT and value not in self.roles:
            self.roles[value] = role

    def half_values(self) -> Iterator[ir.Value]:
        return (value for value, role in self.roles.items() if role is Role.FEATURE)

    # ---- what each value is ----

    def label(self, node: ir.Node) -> None:
        """Give a node's float32 outputs their role by its float inputs."""
        roles = [self.roles[v] for v in node.inputs if v in self.roles]
        halves = [v for v in node.inputs if v is not None and v.dtype is self.half]
        table = node.op_type == "Gather" and roles == [Role.CONSTANT] and len(node.inputs[0].shape or ()) > 1  # type: ignore[union-attr]
        if Role.FEATURE in roles or Role.WIDE in roles or table:
            role = Role.FEATURE
        elif Role.PLACE in roles or halves or (not roles and node.op_type in {"Cast", "Range"}):
            role = Role.PLACE
        else:
            role = Role.CONSTANT
        for value in node.outputs:
            narrow = role is Role.PLACE or self.takes_half(node, value)
            self.assign(value, role if narrow else Role.WIDE)

    def takes_half(self, node: ir.Node, output: ir.Value) -> bool:
        """Return whether an operator may give half precision there."""
        names = _allowed(node, self.opset, None, output.index() or 0)
        return names is None or _word(self.half) in names

    def settle(self, value: ir.Value) -> None:
        """Make a constant be float32 where any reader computes places with it, else half."""
        if self.roles.get(value) is Role.CONSTANT:
            wide = [n for n, i in value.uses() if not self.is_half(n, i)]
            self.roles[value] = Role.PLACE if wide else Role.FEATURE

    def is_half(self, node: ir.Node, index: int) -> bool:
        """Return whether a node takes an input in half precision."""
        allowed = _allowed(node, self.opset, index, None)
        if allowed is not None and _word(self.half) not in allowed:
            return False
        made = [self.roles[v] for v in node.outputs if v in self.roles and self.alike(node, index, v)]
        if made:
            return not SINGLE & set(made)
        return any(self.roles.get(v) is Role.FEATURE for v in node.inputs if v is not None)

    def alike(self, node: ir.Node, index: int, output: ir.Value) -> bool:
        """Return whether an operator's input and output are of one type: a norm's statistics have one of their own."""
        given, made = (_formal(node, self.opset, *place) for place in ((index, None), (None, output.index() or 0)))
        return given is None or made is None or given.type_str == made.type_str

    # ---- the rewrite ----

    def rewrite(self, node: ir.Node) -> None:
        """Give a node's inputs the type that it computes in, and its attributes the type that it makes."""
        for index, value in enumerate(node.inputs):
            if value is None or value not in self.roles:
                continue
            wanted = self.half if self.is_half(node, index) else ir.DataType.FLOAT
            held = self.half if self.roles[value] is Role.FEATURE else ir.DataType.FLOAT
            if node.op_type != "Cast" and wanted is not held:
                node.replace_input_with(index, self.cast(value, wanted, node))
        if any(self.roles.get(v) is Role.FEATURE for v in node.outputs):
            for name, attribute in list(node.attributes.items()):
                if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype is ir.DataType.FLOAT:
                    node.attributes[name] = ir.AttrTensor(name, self.narrow(name, attribute.as_tensor()))
                elif name in ("to", "dtype") and attribute.as_int() == ir.DataType.FLOAT.value:
                    node.attributes[name] = ir.AttrInt64(name, self.half.value)

    def cast(self, value: ir.Value, to: ir.DataType, before: ir.Node) -> ir.Value:
        """Return a value in another type: one Cast for each, finite numbers kept finite."""
        if (value, to) not in self.casts:
            source, made = value, list[ir.Node]()
            if to is ir.DataType.FLOAT16 and value.const_value is None and self.overflows(value):
                bounds = [self.bound(sign * LARGEST[to]) for sign in (-1, 1)]
                made.append(ir.node("Clip", [value, *bounds]))
                source = made[0].outputs[0]
                source.type, source.shape = ir.TensorType(ir.DataType.FLOAT), value.shape
            cast = ir.node("Cast", [source], {"to": to.value})
            cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(to), value.shape
            made.append(cast)
            producer = value.producer()
            if producer is None:
                self.graph.insert_before(self.graph[0], made)
            else:
                self.graph.insert_after(producer, made)
            self.casts[value, to] = cast.outputs[0]
        return self.casts[value, to]

    def overflows(self, value: ir.Value) -> bool:
        """Return whether a value is computed with a finite number that stands for minus infinity."""
        todo, seen = [value], set()
        while todo:
            held = todo.pop()
            if held in seen:
                continue
            seen.add(held)
            tensor = ir.convenience.get_const_tensor(held)
            if tensor is not None and tensor.dtype is ir.DataType.FLOAT and tensor.size <= 4096:
                array = np.abs(tensor.numpy())
                if (np.isfinite(array) & (array >= MASK)).any():
                    return True
            node = held.producer()
            todo += [v for v in node.inputs if v is not None] if node is not None else []
        return False

    def bound(self, number: float) -> ir.Value:
        name = f"lnrewrite.{'largest' if number > 0 else 'lowest'}"
        if name not in self.graph.initializers:
            tensor = ir.tensor(np.array(number, np.float32), name=name)
            kind = ir.TensorType(ir.DataType.FLOAT)
            self.graph.register_initializer(ir.Value(name=name, shape=ir.Shape([]), type=kind, const_value=tensor))
        return self.graph.initializers[name]

    def output(self, value: ir.Value) -> ir.Value:
        """Return a float32 graph output as half, under its own name."""
        producer = value.producer()
        assert producer is not None
        made = self.cast(value, self.half, producer)
        name, value.name = value.name, f"{value.name}_float32"
        made.name = name
        return made

    def narrow(self, name: str, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        """Return a tensor in half precision: at once where it is small, when it is written where it is large."""
        if tensor.dtype is not ir.DataType.FLOAT:
            return tensor
        largest, to = LARGEST[self.half], self.half.numpy()
        array = tensor.numpy()
        finite = np.where(np.isfinite(array), np.abs(array), 0)
        if array.size and largest < (worst := float(finite.max())) < MASK:
            why = f"{name} holds {worst:.3g}, and the largest {_word(self.half)} is {largest:.3g}"
            raise LnrewriteError(Code.LN502, "precision", why, "use bf16, or rescale the stream first")
        if np.count_nonzero(finite.clip(max=largest).astype(to)) < 0.99 * np.count_nonzero(finite):
            self.lost.append(name)

        def half() -> ir.TensorProtocol:
            wide = tensor.numpy()
            narrow = np.where(np.isinf(wide), wide, wide.clip(-largest, largest)).astype(to)
            return ir.tensor(narrow, dtype=self.half, name=tensor.name)

        if array.size < 1 << 16:
            return half()
        return ir.LazyTensor(half, dtype=self.half, shape=ir.Shape([int(d) for d in array.shape]), name=tensor.name)


def _word(dtype: ir.DataType) -> str:
    return f"tensor({dtype.name.lower()})"


def _allowed(node: ir.Node, opset: int, given: int | None, made: int | None) -> frozenset[str] | None:
    """Return the types that an operator takes (gives) there, None where no schema says."""
    if node.domain == "" and node.op_type in FLOAT_ONLY:
        return frozenset({_word(ir.DataType.FLOAT)})
    formal = _formal(node, opset, given, made)
    return None if formal is None else frozenset(str(t) for t in formal.types)


def _formal(
    node: ir.Node, opset: int, given: int | None, made: int | None
) -> onnx.defs.OpSchema.FormalParameter | None:
    """Return the formal input (output) of an operator at a place, None where no schema says."""
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return None
    formal, place = (schema.outputs, made) if made is not None else (schema.inputs, given or 0)
    return formal[min(place, len(formal) - 1)] if formal else None
