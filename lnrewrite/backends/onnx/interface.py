"""The inputs and outputs of a decoder's ONNX model: their names and axes, as servers of such models know them."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ..torch.cached import PAST, PRESENT

BATCH, NEW, BEFORE, TOTAL = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"


def name_cache(model: ir.Model, cache: Sequence[str]) -> set[str]:
    """Name a decoder's cache `past_key_values.N.key` and `present.N.key`, and its free axes by what they count.

    Drops inputs that nothing reads, and returns their names.
    """
    graph = model.graph
    held = [v for v in graph.inputs if (v.name or "").startswith("past_")]
    for values, side in ((held, PAST), (graph.outputs[1:], PRESENT)):
        for value, name in zip(values, cache, strict=True):
            value.name = f"{side}.{name}"
    unread = [v for v in graph.inputs if not v.uses() and v not in held]
    for value in unread:
        graph.inputs.remove(value)
    tokens = dict.fromkeys(("input_ids", "position_ids", "logits"), (BATCH, NEW))
    axes = {**tokens, "attention_mask": (BATCH, TOTAL)}
    for value in (*graph.inputs, *graph.outputs):
        shape = value.shape
        assert shape is not None
        if value.name in axes:
            value.shape = ir.Shape([*axes[value.name], *shape[2:]])
        else:
            value.shape = ir.Shape([BATCH, shape[1], BEFORE if value in held else TOTAL, shape[3]])
    return {str(value.name) for value in unread}
