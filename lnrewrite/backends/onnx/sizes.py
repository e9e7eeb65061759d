"""Tell how much a model holds, and refuse one that would hold more than its weights and inputs account for."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import onnx
import onnx_ir as ir
from onnx import helper

from ...errors import Code, LnrewriteError
from ..holding import Step, allowed, check_held
from .integers import MOST
from .lift import captured
from .shapes import infer_shapes


def initializers(model: ir.Model) -> Iterator[ir.Value]:
    """Yield the values that a model stores, in its subgraphs and functions too."""
    for graph in model.graphs():
        yield from graph.initializers.values()


def bytes_of(model: ir.Model) -> int:
    """Return how many bytes a model's weights take."""
    return sum(v.const_value.nbytes for v in initializers(model) if v.const_value is not None)


def check_sizes(model: ir.Model) -> None:
    """Raise LnrewriteError LN039 for a value of more numbers than a model of so many bytes of weights computes."""
    most = allowed(bytes_of(model))
    for node in model.graph:
        for value in node.outputs:
            if (count := _count(value)) > most:
                why = f"{value.name} has {count} numbers, more than the {most} allowed for weights of this size"
                raise LnrewriteError(Code.LN039, "the model", why, "export it with smaller, or named, dimensions")


def check_constants(model: ir.Model, what: str) -> None:
    """Raise LnrewriteError LN039 where a model makes too much of its constants alone, whatever sizes it declares.

    what: the model, in the error; its nodes must be in topological order.
    """
    inferred = _of_constants(model)
    infer_shapes(inferred)
    counts = {str(v.name): _count(v) for node in inferred.graph for v in node.outputs}
    if sum(counts.values()) <= allowed(0):  # as most are, whatever is held at once
        return
    steps = [
        Step(
            tuple(str(v.name) for v in (*node.inputs, *captured(node)) if v is not None),
            tuple((str(v.name), counts.get(str(v.name), 0)) for v in node.outputs),
        )
        for node in model.graph
    ]
    check_held(steps, bytes_of(model), what)


def _of_constants(model: ir.Model) -> ir.Model:
    """Return a model of the nodes that read no input: stored values are inputs of it, but for those of few numbers."""
    known, read, nodes = set[ir.Value](), dict[ir.Value, None](), list[onnx.NodeProto]()
    for node in model.graph:
        others = {v for v in (*node.inputs, *captured(node)) if v is not None} - known
        stored = [v for v in others if not v.is_graph_input() and ir.convenience.get_const_tensor(v) is not None]
        if node.op_type == "Constant" or len(stored) < len(others):
            continue
        known.update(node.outputs)
        read.update(dict.fromkeys(stored))
        nodes.append(ir.serde.serialize_node(node))
    given, held = [], []
    for value in read:
        tensor = ir.convenience.get_const_tensor(value)
        assert tensor is not None
        if tensor.size <= MOST:
            held.append(ir.serde.serialize_tensor(tensor))
            held[-1].name = str(value.name)
        else:
            given.append(helper.make_tensor_value_info(str(value.name), tensor.dtype, tensor.shape.numpy()))
    versions = [helper.make_opsetid(domain, version) for domain, version in model.graph.opset_imports.items()]
    graph = helper.make_graph(nodes, "constants", given, [], held)
    return ir.serde.deserialize_model(helper.make_model(graph, opset_imports=versions))


def _count(value: ir.Value) -> int:
    """Return how many numbers a value has at least: those of the sizes that are known."""
    return prod(d for d in value.shape or () if isinstance(d, int))
