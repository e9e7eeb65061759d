"""Lift a captured torch graph into the neutral view that detection looks at."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container

import torch
from torch import fx

from ...compat.torch import OpOverload, sizes_of
from ...detect.graph import Op, Operand, OpGraph, unchanged
from .ops import Neutral, neutral

aten = torch.ops.aten
SPREADS: dict[object, OpOverload] = {
    aten.var_mean.default: aten.var.default, aten.var_mean.dim: aten.var.dim,
    aten.var_mean.correction: aten.var.correction,
    aten.std_mean.default: aten.std.default, aten.std_mean.dim: aten.std.dim,
    aten.std_mean.correction: aten.std.correction,
}  # fmt: skip
NORMS = {"layer_norm", "batch_norm", "group_norm"}


def lift(module: fx.GraphModule) -> OpGraph:
    """Return the neutral view of a captured module's graph: node names are kept, no-ops become aliases."""
    ops: dict[str, Op] = {}
    alias: dict[str, str] = {}
    outputs: tuple[str, ...] = ()
    parameters: dict[str, str] = {}
    names = parameter_names(module)
    fixed: set[str] = set()

    def operand(value: object) -> Operand:
        if isinstance(value, fx.Node):
            name = alias.get(value.name, value.name)
            return name if name in ops else None
        return value if isinstance(value, (int, float)) else None

    for node in module.graph.nodes:
        value = node.meta.get("val")
        if _fixed(node, fixed):
            fixed.add(node.name)
        if node.op == "output":
            flat = [operand(n) for n in node.all_input_nodes]
            outputs = tuple(n for n in flat if isinstance(n, str))
        elif node.op == "placeholder" and isinstance(value, torch.Tensor):
            ops[node.name] = Op(node.name, "input", (), {}, sizes_of(value), _dtype(value))
        elif node.op == "get_attr" and isinstance(value, torch.Tensor):
            target = names.get(str(node.target), str(node.target))
            first = parameters.setdefault(target, node.name)
            if first != node.name:
                alias[node.name] = first
            else:
                ops[node.name] = Op(node.name, "param", (), {"param": target}, sizes_of(value), _dtype(value))
        elif node.target in SPREADS and all(user.target is operator.getitem for user in node.users):
            continue  # each statistic reads what is reduced, and nothing reads them together
        elif node.op == "call_function" and isinstance(value, (torch.Tensor, tuple, list)):
            op = _call(node, operand)
            source = op.inputs[0] if op.inputs else None
            if isinstance(source, str) and _is_alias(op, ops[source]):
                alias[node.name] = source
            else:
                ops[node.name] = op
    return OpGraph(ops, alias, outputs, frozenset(fixed))


def _fixed(node: fx.Node, fixed: Container[str]) -> bool:
    """Return whether stored floating point numbers alone decide what a node gives."""
    value = node.meta.get("val")
    if node.op == "get_attr" or not node.all_input_nodes:
        return (
            node.op != "placeholder"
            and isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and not _drawn(node)
        )
    return node.op == "call_function" and all(n.name in fixed for n in node.all_input_nodes) and not _drawn(node)


def _drawn(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def parameter_names(module: torch.nn.Module) -> dict[str, str]:
    """Map every name of a parameter or buffer to the first name of that tensor: tied parameters have several."""
    first: dict[int, str] = {}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors}


def _call(node: fx.Node, operand: Callable[[object], Operand]) -> Op:
    value = node.meta["val"]
    is_item = node.target is operator.getitem
    kind, inputs, attrs = _item(node) if is_item else neutral(node.target, node.args, dict(node.kwargs))
    flat: list[Operand] = []
    for item in inputs:
        flat += [operand(i) for i in item] if isinstance(item, (list, tuple)) else [operand(item)]
    if kind in NORMS and isinstance(value, (tuple, list)):
        value = value[0]
    if kind == "cast" and not value.is_floating_point() and _is_float(inputs[0]):
        kind = "truncate"
    if isinstance(value, torch.Tensor):
        return Op(node.name, kind, tuple(flat), attrs, sizes_of(value), _dtype(value))
    return Op(node.name, kind, tuple(flat), attrs)


def _is_float(value: object) -> bool:
    return isinstance(value, fx.Node) and bool(value.meta["val"].is_floating_point())


def _item(node: fx.Node) -> Neutral:
    """Describe one of an operator's several results; var_mean's and std_mean's two are each a statistic of its own."""
    source, item = node.args
    if isinstance(source, fx.Node) and source.target in SPREADS:
        kind, inputs, attrs = neutral(SPREADS[source.target], source.args, dict(source.kwargs))
        return "mean" if item else kind, inputs, attrs
    return "getitem", (source,), {"item": item}


def _is_alias(op: Op, source: Op) -> bool:
    if op.kind == "alias" or (op.kind == "getitem" and op.attrs["item"] == 0 and source.kind in NORMS):
        return True
    return unchanged(op, source)


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
