"""The one operator that each norm is in ONNX: what raising, translation and edits write, and targets choose a form of.

    LayerNormalization(x, scale[, bias])      SimplifiedLayerNormalization(x, scale), which is RMSNorm

Both stand in the default domain, run over the last axis with float32 statistics, and have one dtype throughout. ONNX
Runtime runs them at every opset.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...ir import Kind

OPERATORS = {Kind.LAYER: "LayerNormalization", Kind.RMS: "SimplifiedLayerNormalization"}
SITE = "lnrewrite.site"
"""The key of a norm's site in its node's metadata."""
ONES = "lnrewrite.ones"
"""How the names begin of the gains that the operators demand where the norm itself has none."""


def attributes(eps: float) -> dict[str, int | float]:
    """Return the attributes of a norm's operator."""
    return {"axis": -1, "epsilon": eps, "stash_type": 1}


def ones(graph: ir.Graph, x: ir.Value) -> ir.Value:
    """Return the gain of ones [width] in the dtype of `x` [..., width], made where the graph has none yet."""
    return _filled(graph, x, ONES, 1)


def zeros(graph: ir.Graph, x: ir.Value) -> ir.Value:
    """Return the bias of zeros [width] in the dtype of `x` [..., width], made where the graph has none yet."""
    return _filled(graph, x, "lnrewrite.zeros", 0)


def _filled(graph: ir.Graph, x: ir.Value, name: str, number: int) -> ir.Value:
    assert x.shape is not None and x.dtype is not None
    width = int(str(x.shape[-1]))
    return constant(graph, f"{name}.{width}.{x.dtype.name.lower()}", np.full(width, number, x.dtype.numpy()))


def constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """Return the initializer of that name, made where the graph has none yet."""
    if name not in graph.initializers:
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        graph.register_initializer(value)
    return graph.initializers[name]
