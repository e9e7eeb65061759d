"""Operators are read soundly: what the neutral view says of a call holds for the call, on torch's own sample inputs.

Two claims are checked: what a rule says is computed (by running the neutral operators in numpy), and where an axis of
the input is in the output (by scaling and shifting along it). A call that no rule accounts for claims nothing.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from lnrewrite.backends.torch import ops as aten
from lnrewrite.backends.torch.lift import lift
from lnrewrite.detect.arithmetic import RUN, Unknown, run
from lnrewrite.detect.edges import moved
from lnrewrite.detect.graph import SHAPE, Op, OpGraph
from tiers import rows

NUMBERS = (
    "add", "sub", "rsub", "mul", "div", "maximum", "pow", "neg", "sqrt", "rsqrt", "reciprocal", "abs", "exp", "square",
    "sigmoid", "tanh", "clamp", "clamp_min", "mean", "sum", "var", "std", "var_mean", "linalg.vector_norm", "norm",
    "linalg.norm", "mm", "bmm", "matmul", "addmm", "nn.functional.batch_norm",
)  # fmt: skip
MOVES = (
    "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose",
    "t", "T", "mT", "swapaxes", "movedim", "expand", "expand_as", "narrow", "select", "__getitem__", "index_select",
    "repeat_interleave", "roll", "flip", "fliplr", "constant_pad_nd", "nn.functional.pad", "gather", "chunk", "split",
    "tile", "repeat", "unfold", "diagonal", "rot90", "masked_select", "take_along_dim", "cat", "stack", "clone",
    "contiguous", "double",
)  # fmt: skip
SAMPLES = 24


def traced(info: Any) -> list[fx.GraphModule]:
    """Return the calls of an operator's samples as graphs whose values are known."""
    found = []
    for sample in islice(info.sample_inputs("cpu", torch.float64), SAMPLES):
        leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        tensors = [leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]

        def call(*given: torch.Tensor, leaves: list[Any] = leaves, spec: Any = spec) -> Any:
            held = iter(given)
            filled = [next(held) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            first, args, kwargs = pytree.tree_unflatten(filled, spec)
            return info.op(first, *args, **kwargs)

        try:
            module = make_fx(call, pre_dispatch=True)(*tensors)
            Values(module).run(*tensors)
        except Exception:  # a sample that cannot be traced
            continue
        found.append(module)
    return found


class Values(fx.Interpreter):
    """Run a graph and leave each value with its node."""

    def run_node(self, n: fx.Node) -> Any:
        value = n.meta["val"] = super().run_node(n)
        return value


def infos(name: str) -> list[Any]:
    """Return what torch's own tests know of an operator; to load them takes seconds, so only who asks does."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [info for info in op_db if info.name == name]


@pytest.mark.parametrize("name", rows(NUMBERS, sample=[]))
def test_what_a_rule_says_is_computed(name: str) -> None:
    judged = 0
    for info in infos(name):
        for module in traced(info):
            graph, values = lift(module), {n.name: n.meta.get("val") for n in module.graph.nodes}
            for op in graph:
                want = values[op.name]
                if op.kind not in RUN or not isinstance(want, torch.Tensor) or not want.is_floating_point():
                    continue
                held = {n: np.asarray(values[n].double()) for n in op.data}
                if any(a.size == 0 or (a.ndim == 0 and op.attrs.get("axes")) for a in held.values()):
                    continue
                try:
                    with np.errstate(all="ignore"):
                        got = run([op], held, op.name)
                except Unknown:
                    continue
                judged += 1
                np.testing.assert_allclose(got, np.asarray(want), 1e-9, 1e-12, err_msg=f"{op} of {module.code}")
    assert judged or name in {"bmm", "linalg.norm"}


@pytest.mark.parametrize("name", rows(MOVES, sample=["roll", "nn.functional.pad"]))
def test_an_axis_is_where_a_rule_says(name: str) -> None:
    for info in infos(name):
        for module in traced(info):
            graph, nodes = lift(module), {n.name: n for n in module.graph.nodes}
            for op in graph:
                source = graph[op.data[0]] if op.data else op
                if op.kind in SHAPE | {"gather"} and source is not op and nodes[op.name].op == "call_function":
                    followed(graph, op, nodes[op.name])


def followed(graph: OpGraph, op: Op, node: fx.Node) -> None:
    """Check each claim about an axis of one call, from the input on and from the output back."""
    x = next(n.meta["val"] for n in node.all_input_nodes if graph.alias.get(n.name, n.name) == op.data[0])
    y = node.meta["val"]
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor) or not x.is_floating_point():
        return
    pairs = {(axis, moved(graph, op, axis)) for axis in range(-x.dim(), 0)}
    pairs |= {(moved(graph, op, axis, back=True), axis) for axis in range(-y.dim(), 0)}
    for before, after in pairs:
        if before is None or after is None:
            continue
        said = f"axis {before} of {list(x.shape)} is {after} of {list(y.shape)} behind {node.format_node()}"
        assert x.shape[before] == y.shape[after], said
        by = torch.rand(x.shape[before], dtype=torch.float64) + 0.5
        one, two = (by.reshape(-1, *[1] * (-axis - 1)) for axis in (before, after))
        torch.testing.assert_close(again(node, x * one), y * two, msg=said)
        if op.kind != "pad":
            torch.testing.assert_close(again(node, x + one), y + two, msg=said)


def again(node: fx.Node, first: torch.Tensor) -> Any:
    """Return what a call gives for another first tensor."""
    held = iter([first])

    def value(given: Any) -> Any:
        return next(held, given.meta["val"]) if isinstance(given, fx.Node) else given

    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), value)  # type: ignore[misc]
    return node.target(*args, **kwargs)  # type: ignore[operator]


def test_an_argument_that_no_rule_knows_says_nothing() -> None:
    ops = torch.ops.aten
    x, y = (fx.Graph().placeholder(n) for n in "xy")
    assert aten.neutral(ops.add.Tensor, (x, y), {"alpha": 2})[0] == "add!"
    assert aten.neutral(ops.add.Tensor, (x, y), {"alpha": 1})[0] == "add"
    assert aten.neutral(ops.div.Tensor_mode, (x, y), {"rounding_mode": "floor"})[0] == "div!"
    assert aten.neutral(ops.addmm.default, (x, y, y), {"beta": 2})[0] == "addmm!"
    assert aten.neutral(ops.rsub.Scalar, (x, 1.0, 2), {})[0] == "rsub!"
