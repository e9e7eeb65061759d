"""Tidy a graph whose attention kernels compute: weights as products read them, and one product for each attention."""

from __future__ import annotations

import onnx_ir as ir

from .columns import gather_columns
from .flattening import keep_tokens_apart
from .packing import pack_heads, turn_weights, unturned_norms
from .whole import attend_whole


def tidy(model: ir.Model, whole: bool = False) -> None:
    """Tidy a graph in place. whole: let one operator compute attention with its products."""
    for step in (keep_tokens_apart, turn_weights, unturned_norms, gather_columns):
        step(model)
    if whole:
        attend_whole(model)
    pack_heads(model)
