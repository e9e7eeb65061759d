"""The inputs and outputs of a part's ONNX model: their names and axes, as servers of such models know them."""

from __future__ import annotations

import onnx_ir as ir

from ..torch.served import Interface, Part, is_past


def name_part(model: ir.Model, part: Part) -> set[str]:
    """Name a captured part's inputs and outputs as it is called, and their free axes by what they count.

    Drops inputs that nothing reads, and returns their names.
    """
    graph = model.graph
    cache = [name for name in part.takes if is_past(name)]
    held = [v for v in graph.inputs if (v.name or "").startswith("past_")]
    for values, names in ((held, cache), (graph.outputs, part.gives)):
        for value, name in zip(values, names, strict=True):
            value.name = name
    unread = [v for v in graph.inputs if not v.uses() and v not in held]
    for value in unread:
        graph.inputs.remove(value)
    known: Interface = {**part.takes, **part.gives}
    for value in (*graph.inputs, *graph.outputs):
        value.shape = ir.Shape(known[str(value.name)])
    return {str(value.name) for value in unread}
