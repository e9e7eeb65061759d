"""Make an exported program functional: re-traced only where an operator of it writes in place.

torch.export gives a graph that may mutate and alias. `run_decompositions` makes it functional by tracing all of it
once more, which is half the cost of a capture; most graphs mutate nothing, and then it only spells some copies and
views in other words. `respell` writes those words itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.export import ExportedProgram

from ...compat.torch import OpOverload, operator_name, schema_of
from .sized import SIZED
from .sums import SUMS, Spelled, node_of

aten = torch.ops.aten
Spelling = Callable[[fx.Node], Spelled]
"""Return the target, arguments and keywords of the operator that a node means; None where it is its first argument."""

# Operators that return a view of their first argument and are read under their own names.
VIEWS = {
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "transpose", "t", "permute", "slice",
    "select", "split", "split_with_sizes", "unbind", "detach", "alias", "diagonal", "unfold",
}  # fmt: skip
PYTHONS = {"_operator", "builtins", "math", "torch"}
"""Where functions are from that compute sizes and take items. Higher-order operators hold graphs, and those by which
torch.vmap enters and leaves a dimension change the state of torch: nothing reads what they return.
"""


def functional(program: ExportedProgram) -> ExportedProgram:
    """Return a program whose graph writes nothing in place: the same one where that holds already."""
    return program if all(map(_is_functional, program.graph.nodes)) else program.run_decompositions({})


def _is_functional(node: fx.Node) -> bool:
    """Return whether a node mutates nothing, and aliases only as `VIEWS` and `SPELLINGS` account for."""
    if node.op != "call_function":
        return True
    target = node.target
    schema = schema_of(target)
    if not isinstance(target, OpOverload) or schema is None:
        return getattr(target, "__module__", None) in PYTHONS
    if target is aten.dropout.default:
        return node.args[2:] == (False,)
    if target is aten.batch_norm.default:
        return node.args[5:6] == (False,)
    if schema.is_mutable or torch.Tag.maybe_aliasing_or_mutating in target.tags:
        return False
    aliases = any(a.alias_info is not None for a in schema.arguments)
    return not aliases or target in SPELLINGS or operator_name(target) in VIEWS


def respell(graph: fx.Graph) -> None:
    """Replace operators that mean another one at the shapes at hand by that one, and drop what nothing reads."""
    for node in graph.nodes:
        if node.op == "call_function" and (spelling := SPELLINGS.get(node.target)):
            spelled = spelling(node)
            if spelled is None:
                node.replace_all_uses_with(node.args[0], propagate_meta=False)  # type: ignore[arg-type]
            else:
                node.target, node.args, node.kwargs = spelled
    graph.eliminate_dead_code(lambda node: node.op == "get_attr" or node.is_impure())  # unused parameters stay


def _cast(node: fx.Node) -> Spelled:
    """x.to(dtype or device): a copy, or x itself where it is there already."""
    x = node_of(node.args[0])
    held, value = x.meta["val"], node.meta["val"]
    if (held.dtype, held.device) == (value.dtype, value.device):
        return None
    moved = {} if held.device == value.device else {"device": value.device}
    return aten._to_copy.default, (x,), {"dtype": value.dtype, **moved}


def _copy(node: fx.Node) -> Spelled:
    return aten.clone.default, node.args[:1], {}


def _chunk(node: fx.Node) -> Spelled:
    """chunk(x, n, dim): a split into parts of the first part's size, where that is a number."""
    dim = node.args[2] if len(node.args) > 2 else 0
    size = node.meta["val"][0].shape[dim]
    return (aten.split.Tensor, (node.args[0], size, dim), {}) if isinstance(size, int) else (node.target, node.args, {})


def _reversed(node: fx.Node) -> Spelled:
    x = node_of(node.args[0])
    return aten.permute.default, (x, list(range(x.meta["val"].dim()))[::-1]), {}


def _turned(node: fx.Node) -> Spelled:
    return aten.transpose.int, (node.args[0], -2, -1), {}


SPELLINGS: dict[fx.node.Target, Spelling] = {
    **SUMS,
    **SIZED,
    **dict.fromkeys((aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other), _cast),
    **dict.fromkeys((aten.contiguous.default, aten.lift_fresh_copy.default), _copy),
    aten.chunk.default: _chunk,
    aten.numpy_T.default: _reversed,
    aten.mT.default: _turned,
    aten.swapaxes.default: lambda n: (aten.transpose.int, n.args, n.kwargs),
    aten.swapdims.default: lambda n: (aten.transpose.int, n.args, n.kwargs),
}
