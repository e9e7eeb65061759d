"""Read queries, keys and values off one product as they lie, whatever a model does to take it apart.

    q, k, v = the columns i_q, i_k, i_v of x W + b, moved about    ->    [q k v] = x W[:, i] + b[i]

for each token, heads side by side: how the columns are moved is found by running what stands between on their numbers.
Biases and weights stay one each; the kernel takes the product itself, and where an operator rotates before it, pieces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ..torch.served import sizes_of
from .norms import CONTRIB, GROUPED
from .packing import cut, sizes, stored_as

ROTARY = "RotaryEmbedding"
MOVES = {"Reshape", "Transpose", "Split", "Slice", "Gather", "GatherND", "Squeeze", "Unsqueeze", "Identity"}
"""What moves numbers about and changes none; input 0 is what they move."""
SIZES = {**sizes_of(2, 3, 4), "batch": 2, "sequence": 3}
Arrays = dict[ir.Value, np.ndarray]
Parts = tuple[ir.Value, ir.Value, ir.Value | None]


def gather_columns(model: ir.Model) -> None:
    """Let the kernels of a decoder read one product each, in place, wherever it has exactly what they read."""
    for node in [n for n in model.graph if (n.domain, n.op_type) == (CONTRIB, GROUPED) and None not in n.inputs[:3]]:
        turns = [_turn(value) for value in node.inputs[:3]]
        ends = [turn.inputs[0] if turn else value for turn, value in zip(turns, node.inputs[:3], strict=True)]
        if (found := read_off(ends)) is None:
            continue
        parts, columns, whole = found
        if all(end is whole for end in ends):
            continue
        made = _packed(model.graph, node, parts, np.concatenate(columns))
        if not any(turns):
            for index, value in enumerate((made, None, None)):
                node.replace_input_with(index, value)
            continue
        pieces = _split(model.graph, turns, made, [len(each) for each in columns])
        for index, (turn, piece) in enumerate(zip(turns, pieces, strict=True)):
            (turn or node).replace_input_with(0 if turn else index, piece)
    RemoveUnusedNodesPass()(model)


def read_off(ends: Sequence[ir.Value | None]) -> tuple[Parts, list[np.ndarray], ir.Value] | None:
    """Return (x, W, b), which columns of x W + b each of some values is, together all of them, and x W + b."""
    wholes = {_moved(end) for end in ends if end is not None}
    if len(wholes) != 1 or (whole := wholes.pop()) is None or (parts := _product(whole)) is None:
        return None
    columns = _columns(whole, ends)
    return None if columns is None else (parts, columns, whole)


def _turn(value: ir.Value | None) -> ir.Node | None:
    """Return the operator that rotates a value that nothing else reads."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == ROTARY and len(node.outputs[0].uses()) == 1 else None


def _moved(value: ir.Value) -> ir.Value | None:
    """Return what a value was before it was moved about."""
    while (node := value.producer()) is not None and node.op_type in MOVES and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def _product(value: ir.Value) -> Parts | None:
    """Return (x, W, b) where a value is x W + b of three axes, W and b constants (None: there is no b)."""
    node, bias = value.producer(), None
    if node is not None and node.op_type == "Add" and not node.domain:
        rest, bias = sorted((v for v in node.inputs if v is not None), key=lambda v: v.const_value is not None)
        node = rest.producer() if len(bias.shape or ()) == 1 and len(rest.uses()) == 1 else None
        if bias.const_value is None:
            return None
    if node is None or node.op_type != "MatMul" or len(value.shape or ()) != 3:
        return None
    x, weight = node.inputs
    plain = x is not None and weight is not None and weight.const_value is not None and len(weight.shape or ()) == 2
    return (x, weight, bias) if plain else None  # type: ignore[return-value]


def _size(dim: int | ir.SymbolicDim) -> int:
    return dim if isinstance(dim, int) else SIZES.get(str(dim), 5)


def _columns(whole: ir.Value, ends: Sequence[ir.Value | None]) -> list[np.ndarray] | None:
    """Return the columns of a product that each end reads, for every token alike; None where they are not all of it."""
    shape = [*map(_size, whole.shape or ())]
    told = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    known: Arrays = {whole: told}
    try:
        found = [_flat(_run(end, known)).reshape(*shape[:2], -1) for end in ends if end is not None]
    except Exception:  # an operator that the reference lacks, or sizes that do not fit
        return None
    columns = [each[0, 0].astype(np.int64) for each in found]
    same = all(np.array_equal(each, told[..., of]) for each, of in zip(found, columns, strict=True))
    return columns if same and np.array_equal(np.sort(np.concatenate(columns)), np.arange(shape[-1])) else None


def _flat(heads: np.ndarray) -> np.ndarray:
    """Return heads [batch, heads, new, size] as they lie in products; others stay."""
    return heads.swapaxes(1, 2) if heads.ndim == 4 else heads


def _run(value: ir.Value, known: Arrays) -> np.ndarray:
    """Compute a value from those that are known, the inputs of the graph empty but for their sizes."""
    if value not in known:
        node = value.producer()
        if value.const_value is not None:
            known[value] = value.const_value.numpy()
        elif node is None:
            known[value] = np.zeros([*map(_size, value.shape or ())], np.int64)
        else:
            feed: Mapping[str, np.ndarray] = {str(v.name): _run(v, known) for v in node.inputs if v is not None}
            made: Any = ReferenceEvaluator(ir.serde.serialize_node(node)).run(None, dict(feed))
            known |= zip(node.outputs, made, strict=True)
    return known[value]


def _packed(graph: ir.Graph, node: ir.Node, parts: Parts, of: np.ndarray) -> ir.Value:
    """Return the product with its columns in this order, before a node."""
    x, weight, bias = parts
    name = f"{weight.name}_packed"
    made = [ir.node("MatMul", [x, stored_as(graph, [weight], name, sizes(weight), lambda held: held[0][:, of])])]
    if bias is not None:
        added = stored_as(graph, [bias], f"{bias.name}_packed", sizes(bias), lambda held: held[0][of])
        made.append(ir.node("Add", [made[0].outputs[0], added]))
    for each in made:
        each.outputs[0].type, each.outputs[0].shape = x.type, ir.Shape([*(x.shape or ())[:-1], len(of)])
    first = next((turn for turn in (_turn(v) for v in node.inputs[:3]) if turn is not None), node)
    graph.insert_before(first, made)
    return made[-1].outputs[0]


def _split(graph: ir.Graph, turns: Sequence[ir.Node | None], whole: ir.Value, widths: list[int]) -> Sequence[ir.Value]:
    """Return the pieces of a packed product, before the first that reads one."""
    made = cut(graph, whole, widths)
    graph.insert_before(next(turn for turn in turns if turn is not None), made)
    return made.outputs
