"""Make a module of torch of an ONNX graph, as far as its operators are known, with its weights for parameters."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import getitem

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import InlinePass
from torch import Tensor, fx, nn
from torch.fx.node import Argument

from ..torch.module import CapturedModule, Signature
from .lift import FLOATS
from .norms import ONES, ZEROS
from .ops import STANDARD
from .session import TORCH
from .torch_table import RESULTS, attributes, taken

GRAPHS = {ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS}
SPELLED = "lnrewrite.spelled"
"""The domain of operators that are put into a graph as what ONNX says that they are."""
PRODUCTS = {"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "FusedMatMul"}
MOVES = {
    "Transpose", "Cast", "Reshape", "Identity", "Squeeze", "Unsqueeze", "Flatten", "Gather", "Slice", "Split", "Expand",
}  # fmt: skip
"""Operators that hand a weight on as it is, or a part of it."""


@dataclass(frozen=True)
class Mirror:
    """Hold an ONNX model as torch runs it: `names` are its values' nodes, `weights` the parameters' initializers.

    `missing` are the operators that were needed and are not known; what comes behind one has no name.
    """

    module: CapturedModule
    names: Mapping[str, str]
    weights: Mapping[str, str]
    missing: tuple[str, ...]


def mirror(model: ir.Model, ends: Collection[str]) -> Mirror:
    """Return what of a model some of its values take, its inputs as it has them, as a module of torch."""
    model = model.clone()
    spell_out(model)
    return _Mirror(model, ends).made()


def spell_out(model: ir.Model) -> None:
    """Put in the place of operators that the table lacks, in the main graph, what ONNX defines them by."""
    opset = model.graph.opset_imports.get("", 1)
    for turn in range(3):  # a definition uses operators that have one, too
        for index, node in enumerate(model.graph):
            found = _definition(node, opset) if node.domain in STANDARD and taken(node, opset) is None else None
            if found is not None:
                node.domain, node.op_type, node.overload = found.domain, found.name, f"{turn}.{index}"
                found.overload = node.overload
                model.functions[found.identifier()] = found
        InlinePass()(model)


def _definition(node: ir.Node, opset: int) -> ir.Function | None:
    """Return a node's operator as a function, None where ONNX does not define it so; the node is given its defaults."""
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    if any(a.type in GRAPHS for a in node.attributes.values()):
        return None
    for name, held in schema.attributes.items():
        if name not in node.attributes and held.default_value.type:
            node.attributes[name] = ir.serde.deserialize_attribute(held.default_value)
    function = onnx.FunctionProto()
    function.CopyFrom(schema.function_body)
    if not function.node and all(v is None or v.type is not None for v in node.inputs):
        types = [_type(v).SerializeToString() for v in node.inputs]
        written = ir.serde.serialize_node(node).SerializeToString()
        function.ParseFromString(schema.get_context_dependent_function(written, types))  # type: ignore[attr-defined]
    del function.output[len(node.outputs) :]
    made = {name for n in function.node for name in n.output}
    if not function.node or not made.issuperset(function.output):
        return None
    function.domain = SPELLED
    for held in function.opset_import:  # the table takes what they use at every opset, or not at all
        held.version = opset
    return ir.serde.deserialize_function(function)


def _type(value: ir.Value | None) -> onnx.TypeProto:
    found = onnx.TypeProto()
    if value is not None and value.type is not None:
        ir.serde.serialize_type_into(found, value.type)
        if value.shape is not None:
            ir.serde.serialize_shape_into(found, value.shape)
    return found


class _Mirror:
    """Hold the state of building one module."""

    def __init__(self, model: ir.Model, ends: Collection[str]) -> None:
        self.graph, self.opset = model.graph, model.graph.opset_imports.get("", 1)
        self.nodes = _before(self.graph, ends)
        self.inside, self.fx = set(self.nodes), fx.Graph()
        self.known: dict[ir.Value, fx.Node] = {}
        self.held: dict[str, Tensor] = {}
        self.missing: dict[str, None] = {}
        self.constants = set(self.graph.initializers.values())
        for node in self.nodes:
            if all(v is None or v in self.constants for v in node.inputs):
                self.constants.update(node.outputs)
        self.weights = {v: f"weight_{i}" for i, v in enumerate(self.graph.initializers.values()) if self.is_weight(v)}
        self.made_of_weights = set(self.weights)
        for node in self.nodes:
            if node.outputs[0] in self.constants and self.made_of_weights.intersection(node.inputs):
                self.made_of_weights.update(node.outputs)

    def made(self) -> Mirror:
        inputs = [v for v in self.graph.inputs if v.const_value is None]
        for value in inputs:
            made = self.fx.placeholder(_plain(value))
            if value.dtype in TORCH:
                self.known[value] = made
            else:
                self.missing[f"inputs of type {value.dtype}"] = None
        for node in self.nodes:
            if node.outputs[0] not in self.made_of_weights:
                self.node(node, self.known)
        self.fx.output(())
        module = CapturedModule(self.held, self.fx, "CapturedModule")
        names = tuple(str(v.name) for v in inputs)
        module.meta["lnrewrite"] = Signature(names, names, (), {})
        known = {str(v.name): n.name for v, n in self.known.items() if n.op != "get_attr"}
        weights = {held: str(v.name) for v, held in self.weights.items()}
        return Mirror(module, known, weights, tuple(self.missing))

    def node(self, node: ir.Node, known: dict[ir.Value, fx.Node]) -> None:
        """Add what one node computes, where its operator and its inputs are known."""
        if node.op_type == "Constant":
            if (constant := ir.convenience.get_const_tensor(node.outputs[0])) is not None:
                self.hold(node.outputs[0], constant, known)
            return
        found = taken(node, self.opset)
        options = None if found is None else self.options(node, attributes(found))
        if found is None or options is None:
            self.missing[node.op_type if node.domain in STANDARD else f"{node.domain}.{node.op_type}"] = None
            return
        fresh: dict[ir.Value, fx.Node] = {}
        given = [None if v is None else self.operand(v, known, fresh) for v in node.inputs]
        if any(g is None and v is not None for g, v in zip(given, node.inputs, strict=True)):
            return
        while given and given[-1] is None:
            given.pop()
        made = self.fx.create_node("call_function", found, tuple(given), options, _plain(node.outputs[0]))
        if node.op_type not in RESULTS:
            known[node.outputs[0]] = made
            return
        for index, value in enumerate(node.outputs):
            known[value] = self.fx.create_node("call_function", getitem, (made, index), {}, _plain(value))

    def operand(
        self, value: ir.Value, known: dict[ir.Value, fx.Node], fresh: dict[ir.Value, fx.Node]
    ) -> fx.Node | None:
        """Return what computes a value, None behind an unknown node; what is made of weights is made for each reader.

        A weight is so read where what is made of it is, which tells whether it is one part's alone.
        """
        if value in self.made_of_weights and value not in self.weights:
            producer = value.producer()
            if value not in fresh and value not in known and producer is not None:
                self.node(producer, fresh)
            return fresh.get(value, known.get(value))
        if value not in self.known and value.const_value is not None:
            self.hold(value, value.const_value, self.known)
        return self.known.get(value)

    def options(self, node: ir.Node, taken: Collection[str]) -> dict[str, Argument] | None:
        """Return a node's attributes as the function takes them; None where torch has no such type."""
        found: dict[str, Argument] = {n: a.value for n, a in node.attributes.items() if n in taken}
        if "to" in found:
            found["to"] = TORCH.get(ir.DataType(node.attributes["to"].as_int()))
        if isinstance(tensor := found.get("value"), ir.TensorProtocol):
            found.update(value=tensor.numpy().reshape(-1)[0].item(), dtype=TORCH.get(tensor.dtype))
        more = {"opset": self.opset, "results": len(node.outputs)}
        found.update({n: v for n, v in more.items() if n in taken})
        return None if None in found.values() else found

    def hold(self, value: ir.Value, tensor: ir.TensorProtocol, known: dict[ir.Value, fx.Node]) -> None:
        """Hold a constant: as a parameter where it is a weight."""
        if tensor.dtype not in TORCH:
            self.missing[f"constants of type {tensor.dtype}"] = None
            return
        data, dtype = bytearray(tensor.tobytes()), TORCH[tensor.dtype]
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        found = flat.reshape(tuple(tensor.shape.numpy()))
        name = self.weights.get(value, f"held_{len(self.held)}")
        self.held[name] = nn.Parameter(found, requires_grad=False) if value in self.weights else found
        known[value] = self.fx.get_attr(name)

    def is_weight(self, value: ir.Value) -> bool:
        """Return whether an initializer is a linear map's weight, or a vector of one number for each channel.

        No number that stands alone is one, no constant that stands for a norm's gain where it has none, and nothing
        that other parts of the model read than what is asked for.
        """
        sizes = [d for d in value.shape or () if d != 1]
        made = str(value.name).startswith((ONES, ZEROS))
        if value.dtype not in FLOATS or not sizes or made or not self.is_inside(value):
            return False
        return self.serves(value, len(sizes) == 1)

    def is_inside(self, value: ir.Value) -> bool:
        """Return whether nothing but what is asked for reads a constant, or what is made of it."""
        if value.is_graph_output() or not {node for node, _ in value.uses()} <= self.inside:
            return False
        made = [v for node, _ in value.uses() for v in node.outputs if v in self.constants]
        return all(self.is_inside(v) for v in made)

    def serves(self, value: ir.Value, vector: bool) -> bool:
        """Return whether a value, or what it becomes, is multiplied with data or, of a vector, meets them at all."""
        for node, index in value.uses():
            constant = node.outputs[0] in self.constants
            if (node.op_type in MOVES and index == 0) or (node.op_type == "Add" and constant):  # 1 + gain
                if any(self.serves(v, vector) for v in node.outputs):
                    return True
            elif vector and node.op_type == "BatchNormalization" and index > 2:  # its statistics
                continue
            elif not constant and (vector or node.op_type in PRODUCTS):
                return True
        return False


def _before(graph: ir.Graph, ends: Collection[str]) -> list[ir.Node]:
    """Return the nodes that some values take, in their order."""
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    todo, found = [values[n].producer() for n in ends if n in values], set[ir.Node]()
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [v.producer() for v in node.inputs if v is not None]
    return [node for node in graph if node in found]


def _plain(value: ir.Value) -> str:
    """Return a name for a value that torch.fx keeps as it is."""
    return re.sub(r"\W", "_", f"v_{value.name}").lower()
