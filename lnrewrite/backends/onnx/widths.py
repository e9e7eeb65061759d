"""Tell sizes where onnx's own inference does not: how wide a normalized value is, by the gain behind it.

    x [.., ?] -> (x - mean(x)) / sqrt(var(x) + eps) -> * gain [N]    ->    x [.., N]

A reshape to a computed shape leaves sizes open. What is reduced over its last axis, kept as one, and multiplied by N
numbers after nothing but arithmetic of its own is as wide as they are: of one number a norm leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from .norms import CONTRIB, GROUPED

OWN = {"Sub", "Div", "Mul", "Cast"}
OPERATORS = {"LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization"}
REDUCED = {"ReduceMean", "ReduceSumSquare", "ReduceL2"}
STEPS = 6
"""How many steps lie between a norm's input and its gain, at most."""


def told_by_gains(graph: ir.Graph) -> bool:
    """Write the widths that gains tell into the shapes of what is normalized; return whether there were any."""
    found = False
    for node in graph:
        x = _normalized(node)
        if x is None or x.shape is None or not len(x.shape) or isinstance(x.shape[-1], int) or not _last(node, x):
            continue
        whole = node.op_type in OPERATORS and node.inputs[1] is not None
        widths = set(_vector(node.inputs[1]) if whole else _gains(x, STEPS))
        if len(widths) == 1:
            x.shape = ir.Shape([*list(x.shape)[:-1], widths.pop()])
            found = True
    return found


def told_by_reshapes(graph: ir.Graph) -> bool:
    """Write ranks, and the sizes that a Concat of them holds, into what reshapes give; return whether there were any.

    onnx's own inference says nothing of a Reshape to a computed shape before opset 14.
    """
    found = False
    for node in graph:
        if node.op_type != "Reshape" or node.domain or node.outputs[0].shape is not None or node.inputs[1] is None:
            continue
        length = list(node.inputs[1].shape or ())
        parts = node.inputs[1].producer()
        sizes: list[int | None] = [None] * (length[0] if len(length) == 1 and isinstance(length[0], int) else 0)
        if parts is not None and parts.op_type == "Concat":
            held = [_sizes(value) for value in parts.inputs]
            sizes = [size for each in held for size in each] if all(held) else sizes
        if sizes:
            node.outputs[0].shape = ir.Shape([size if size and size > 0 else None for size in sizes])
            found = True
    return found


def told_by_shapes(graph: ir.Graph) -> bool:
    """Write the shape of x into what a Reshape to Shape(x) gives; return whether there were any less known."""
    found = False
    for node in graph:
        sizes = node.inputs[1] if (node.domain, node.op_type) == ("", "Reshape") else None
        parts = sizes.producer() if sizes is not None else None
        if parts is None or (parts.domain, parts.op_type) != ("", "Shape") or parts.inputs[0] is None:
            continue
        if parts.attributes.get_int("start", 0) or "end" in parts.attributes:  # of some axes
            continue
        shape, given = parts.inputs[0].shape, node.outputs[0].shape
        if shape is not None and 0 not in shape and (given is None or _open(shape) < _open(given)):
            node.outputs[0].shape = ir.Shape(list(shape))
            found = True
    return found


def _open(shape: ir.Shape) -> int:
    """Return how many sizes of a shape are neither known nor named."""
    return sum(shape.is_unknown_dim(i) for i in range(len(shape)))


def told_by_sublayers(graph: ir.Graph) -> bool:
    """Write the shapes of ONNX Runtime's operators for embeddings and attention of a BERT; return if there were any."""
    found = False
    for node in graph:
        if node.domain != CONTRIB or node.op_type not in ("Attention", "EmbedLayerNormalization"):
            continue
        embeds = node.op_type != "Attention"
        x, weight = node.inputs[0], node.inputs[2 if embeds else 1]
        if node.outputs[0].shape is not None or x is None or x.shape is None or weight is None or not weight.shape:
            continue
        held, sizes = weight.shape[-1], node.attributes.get_ints("qkv_hidden_sizes", ())
        width = held if isinstance(held, int) else None
        if not embeds and width is not None:
            width = sizes[2] if len(sizes) == 3 else width // 3
        node.outputs[0].shape = ir.Shape([*(x.shape if embeds else x.shape[:-1]), width])
        node.outputs[0].type = node.outputs[0].type or weight.type
        found = True
    return found


def told_by_products(graph: ir.Graph) -> bool:
    """Write the shapes of ONNX Runtime's FusedMatMul, which transposes its factors; return whether there were any."""
    found = False
    for node in graph:
        batched = any(node.attributes.get_int(name, 0) for name in ("transBatchA", "transBatchB"))
        if node.op_type != "FusedMatMul" or node.outputs[0].shape is not None or batched:
            continue
        shapes = [list(v.shape) if v is not None and v.shape is not None else [] for v in node.inputs[:2]]
        if len(shapes) < 2 or len(shapes[1]) not in (2, len(shapes[0])) or len(shapes[0]) < 2:
            continue
        a, b = shapes
        rows, columns = (node.attributes.get_int(name, 0) for name in ("transA", "transB"))
        node.outputs[0].shape = ir.Shape([*a[:-2], a[-1 if rows else -2], b[-2 if columns else -1]])
        node.outputs[0].type = node.outputs[0].type or node.inputs[0].type  # type: ignore[union-attr]
        found = True
    return found


def told_by_heads(graph: ir.Graph) -> bool:
    """Write the shapes of grouped attention on packed queries, keys and values; return whether there were any."""
    found = False
    for node in graph:
        if node.op_type != GROUPED or node.outputs[0].shape is not None or node.inputs[1] is not None:
            continue
        packed, heads = node.inputs[0], node.attributes.get_int("num_heads", 0)
        width = packed.shape[-1] if packed is not None and packed.shape is not None and len(packed.shape) else None
        if packed is not None and packed.shape is not None and isinstance(width, int):
            size = width // max(1, heads + 2 * node.attributes.get_int("kv_num_heads", heads))
            node.outputs[0].shape = ir.Shape([*list(packed.shape)[:-1], heads * size])
            node.outputs[0].type = node.outputs[0].type or packed.type
            found = True
    return found


def _sizes(value: ir.Value | None) -> list[int | None]:
    """Return the sizes that a piece of a computed shape holds, None for one that is not known; none for any number."""
    held = ir.convenience.get_const_tensor(value) if value is not None else None
    if held is not None:
        return [int(size) for size in held.numpy().reshape(-1)]
    length = list(value.shape) if value is not None and value.shape is not None else []
    return [None] * length[0] if len(length) == 1 and isinstance(length[0], int) else []


def _normalized(node: ir.Node) -> ir.Value | None:
    """Return what a norm's operator reads, or what a reduction is over or over the squares of."""
    if node.op_type in OPERATORS and len(node.inputs) > 1:
        return node.inputs[0]
    return _unsquared(node.inputs[0]) if node.op_type in REDUCED and node.inputs else None


def _unsquared(x: ir.Value | None) -> ir.Value | None:
    """Return what a value is the square of, else the value."""
    node = x.producer() if x is not None else None
    squares = node is not None and (node.op_type == "Pow" or node.op_type == "Mul" and node.inputs[0] is node.inputs[1])
    return node.inputs[0] if node is not None and squares else x


def _last(node: ir.Node, x: ir.Value) -> bool:
    """Return whether statistics are over the last axis alone, and a reduction keeps it."""
    axes = list(node.attributes.get_ints("axes", ()))
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        held = ir.convenience.get_const_tensor(node.inputs[1])
        axes = [] if held is None else [int(axis) for axis in held.numpy().reshape(-1)]
    rank = len(x.shape or ())
    if node.op_type in OPERATORS:
        return node.attributes.get_int("axis", -1) in (-1, rank - 1)
    return [axis % rank for axis in axes] == [rank - 1] and node.attributes.get_int("keepdims", 1) == 1


def _gains(value: ir.Value, steps: int) -> Iterator[int]:
    """Yield how many numbers the vectors have that a value is multiplied by, through arithmetic of its own."""
    for user, place in value.uses():
        if user.op_type not in OWN or user.domain or not steps or place and user.op_type == "Div":
            continue
        other = next((v for i, v in enumerate(user.inputs) if i != place), None)
        vector = list(_vector(other)) if user.op_type == "Mul" else []
        yield from vector or _gains(user.outputs[0], steps - 1)


def _vector(value: ir.Value | None) -> Iterator[int]:
    """Yield how many numbers a vector of several has."""
    sizes = list(value.shape) if value is not None and value.shape is not None else []
    if len(sizes) == 1 and isinstance(sizes[0], int) and sizes[0] > 1:
        yield sizes[0]
