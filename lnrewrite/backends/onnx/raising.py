"""Write every norm of an ONNX model that detection recognised as one operator, whatever it was spelled in before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from ...detect.graph import OpGraph
from ...detect.match import NormMatch
from ...ir import Kind
from .norms import OPERATORS, SITE, Attributes, cast, resemble, write_norm

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
            _Raise(model.graph, values).one(found, sites.get(output, output))
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
            return f"its gain {gain} is not a vector of {width} constants"
    return ""


class _Raise:
    """Hold what the replacement of one norm needs."""

    def __init__(self, graph: ir.Graph, values: dict[str, ir.Value]) -> None:
        self.graph, self.values = graph, values
        self.made: list[ir.Node] = []

    def one(self, found: NormMatch, site: str) -> None:
        norm, old = found.norm, self.values[found.output]
        x, last = self.values[found.source], old.producer()
        assert last is not None
        result = write_norm(self.graph, self.node, norm, x, self.values.__getitem__, found.output)
        next(n for n in self.made if n.op_type == OPERATORS[norm.kind]).metadata_props[SITE] = site
        if old.dtype is not None and old.dtype != x.dtype:
            result = cast(self.node, result, old.dtype)
        result.shape = old.shape
        self.graph.insert_before(last, self.made)
        ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
        name = old.name
        old.name = f"{name}_unfused"
        result.name = name
        self.values[found.output] = result  # what another norm reads

    def node(
        self, operator: str, inputs: Sequence[ir.Value], like: ir.Value, name: str, held: Attributes | None = None
    ) -> ir.Value:
        """Make a node, which the graph names when it takes it in."""
        made = ir.node(operator, inputs, held)
        resemble(made.outputs[0], like)
        self.made.append(made)
        return made.outputs[0]
