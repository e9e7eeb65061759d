"""Take a model apart whose network stands twice, in the branches of an If: a decoder that optimum merged.

One branch reads the cache of an input, the other one begins without; the weights of both stand outside.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

BRANCHES = ("then_branch", "else_branch")


def chosen(model: ir.Model) -> ir.Node | None:
    """Return the If that gives all outputs of a model, and whose branch an input chooses; None where there is none."""
    nodes = [value.producer() for value in model.graph.outputs]
    node = nodes[0] if nodes else None
    if node is None or node.op_type != "If" or any(other is not node for other in nodes):
        return None
    return node if node.inputs[0] in model.graph.inputs else None


def taken_apart(model: ir.Model) -> tuple[ir.Model, ir.Model]:
    """Return the two models that a merged one holds, the one with fewer inputs first."""
    made = [_branch(model.clone(), name) for name in BRANCHES]
    first, second = sorted(made, key=lambda each: len(each.graph.inputs))
    return first, second


def _branch(model: ir.Model, name: str) -> ir.Model:
    """Put one branch in the place of the If, and take away what only the other one reads."""
    graph, node = model.graph, chosen(model)
    assert node is not None
    inner = node.attributes[name].as_graph()
    for held in list(inner.initializers.values()):
        del inner.initializers[held.name or ""]
        graph.initializers.add(held)
    nodes, outputs, names = list(inner), list(inner.outputs), [value.name for value in node.outputs]
    inner.outputs.clear()
    inner.remove(nodes)
    graph.insert_before(node, nodes)
    graph.outputs.clear()
    for other in (node.attributes[each].as_graph() for each in BRANCHES):
        other.outputs.clear()
        other.remove(list(other), safe=True)  # it reads nothing any more
    graph.remove(node, safe=True)
    for value, called in zip(outputs, names, strict=True):
        value.name = called
        graph.outputs.append(value)
    RemoveUnusedNodesPass()(model)
    for value in [v for v in graph.inputs if not v.uses()]:
        graph.inputs.remove(value)
    return model
