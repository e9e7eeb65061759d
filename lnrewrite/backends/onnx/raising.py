"""Write every norm of an ONNX model that detection recognised as one operator, whatever it was spelled in before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from ...detect.graph import OpGraph
from ...detect.match import NormMatch
from ...ir import Kind
from .norms import OPERATORS, SITE, attributes, constant, ones

STANDARD = {
    Kind.BATCH: "BatchNormalization", Kind.INSTANCE: "InstanceNormalization", Kind.GROUP: "GroupNormalization",
    Kind.L2: "LpNormalization",
}  # fmt: skip
"""The operators that norms of other kinds may stand as in a model that is read; none is made."""


def raise_norms(
    model: ir.Model, graph: OpGraph, norms: Mapping[str, NormMatch], sites: Mapping[str, str]
) -> dict[str, str]:
    """Replace norms, by output value, with LayerNormalization or SimplifiedLayerNormalization over the last axis.

    `sites` names each norm for people; the name is kept in the node's metadata. Statistics are float32 inside the
    operators. Returns why a norm was left as it is, by the name of its output; one that stands as its own standard
    operator is left without a word.
    """
    values = dict(ir.convenience.create_value_mapping(model.graph))
    left: dict[str, str] = {}
    for output, found in norms.items():
        node = values[output].producer()
        if node is not None and len(found.members) == 1 and node.op_type in OPERATORS.values():
            node.metadata_props.setdefault(SITE, sites.get(output, output))
        elif node is not None and node.op_type == STANDARD.get(found.norm.kind) and len(found.members) == 1:
            left[output] = ""
        elif why := _beyond(found, graph):
            left[output] = why
        else:
            _Raise(model.graph, graph, values).one(found, sites.get(output, output))
    return left


def _beyond(found: NormMatch, graph: OpGraph) -> str:
    """Return why no operator computes a norm; empty where one does."""
    norm, width = found.norm, graph.width(found.source, found.axis)
    if norm.kind not in OPERATORS:
        return f"no operator computes a norm of kind {norm.kind}"
    if found.axis != -1:
        return "it runs over another axis than the last"
    for gain in (norm.gamma, norm.beta):
        if gain and not graph.is_channel_vector(gain, width):
            return f"its gain {gain} is no vector of {width} constants"
    return ""


class _Raise:
    """Hold what the replacement of one norm needs."""

    def __init__(self, graph: ir.Graph, view: OpGraph, values: dict[str, ir.Value]) -> None:
        self.graph, self.view, self.values = graph, view, values

    def one(self, found: NormMatch, site: str) -> None:
        norm, old = found.norm, self.values[found.output]
        x, last = self.values[found.source], old.producer()
        assert last is not None and x.dtype is not None
        self.made: list[ir.Node] = []
        scale = self.vector(norm.gamma, x, norm.plus_one) if norm.gamma else ones(self.graph, x)
        inputs = [x, scale]
        if norm.beta and norm.kind is Kind.LAYER:
            inputs.append(self.vector(norm.beta, x, False))
        node = self.node(OPERATORS[norm.kind], inputs, x, attributes(norm.eps))
        node.metadata_props[SITE] = site
        result = node.outputs[0]
        if norm.beta and norm.kind is Kind.RMS:
            result = self.node("Add", [result, self.vector(norm.beta, x, False)], x).outputs[0]
        if old.dtype != x.dtype:
            result = self.node("Cast", [result], x, {"to": old.dtype}).outputs[0]
        result.shape = old.shape
        if old.dtype is not None:
            result.type = ir.TensorType(old.dtype)
        self.graph.insert_before(last, self.made)
        ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
        name = old.name
        old.name = f"{name}_unfused"
        result.name = name
        self.values[found.output] = result  # what another norm reads

    def node(self, name: str, inputs: list[ir.Value], like: ir.Value, held: Any = None) -> ir.Node:
        made = ir.node(name, inputs, held or {})
        assert like.dtype is not None
        made.outputs[0].type, made.outputs[0].shape = ir.TensorType(like.dtype), like.shape
        self.made.append(made)
        return made

    def vector(self, name: str, x: ir.Value, plus_one: bool) -> ir.Value:
        """Return a constant vector [width] in the dtype of `x`, computed in the graph where it has another form."""
        value = self.values[name]
        if plus_one:
            assert value.dtype is not None
            one = constant(self.graph, f"{name}.one", np.ones(1, value.dtype.numpy()))
            value = self.node("Add", [value, one], value).outputs[0]
        if value.shape is not None and len(value.shape) != 1:
            flat = constant(self.graph, "lnrewrite.flat", np.array([-1]))
            value = self.node("Reshape", [value, flat], value).outputs[0]
            value.shape = ir.Shape([self.view.width(name)])
        if value.dtype != x.dtype:
            value = self.node("Cast", [value], value, {"to": x.dtype}).outputs[0]
            assert x.dtype is not None
            value.type = ir.TensorType(x.dtype)
        return value
