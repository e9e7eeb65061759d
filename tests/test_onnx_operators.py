"""ONNX operators are read soundly: what the neutral view says of a node holds on the cases that ONNX makes of it.

The two claims of test_operators.py: what a rule says is computed, and where an axis of the input is in the output.
Integer inputs of a case (axes, shapes, indices) are stored numbers here, as exporters write them, and inputs too.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from lnrewrite.backends.onnx.lift import lift
from lnrewrite.backends.onnx.ops import ALIAS, FIRST, RESHAPE, RULES, SAME
from lnrewrite.backends.onnx.session import OnnxModule
from lnrewrite.detect.arithmetic import RUN, Unknown, run
from lnrewrite.detect.edges import moved
from lnrewrite.detect.graph import SHAPE, OpGraph
from lnrewrite.errors import LnrewriteError
from tiers import rows

OPERATORS = sorted({*SAME, *FIRST, *RESHAPE, *RULES, *ALIAS, "Split", "Tile", "ScatterND", "GatherElements", "Where"})
Arrays = dict[str, np.ndarray]
NEWEST = (13, 25)
"""IR and operator set that ONNX Runtime takes: ONNX's cases are of its own newest, which the runtime may not know."""


@cache
def cases(operator: str) -> list[Any]:
    """Return the cases that ONNX makes of an operator, and of those that are functions of it; loading takes seconds."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [c for c in collect_testcases(None) if operator in {n.op_type for n in c.model.graph.node}]


def models(operator: str) -> list[tuple[str, ir.Model, Arrays]]:
    """Return models that ONNX Runtime runs, and their inputs; with integer inputs stored, and as they are."""
    found = []
    for case in cases(operator):
        names = [v.name for v in case.model.graph.input]
        given = dict(zip(names, case.data_sets[0][0], strict=False))
        if not all(isinstance(v, np.ndarray) and v.dtype.kind in "fiub" for v in given.values()):
            continue
        for stored in (True, False):
            try:
                model = ir.serde.deserialize_model(case.model)
                model.ir_version = min(model.ir_version, NEWEST[0])
                model.opset_imports[""] = min(model.opset_imports[""], NEWEST[1])
                kept = {n: v for n, v in given.items() if not stored or v.dtype.kind == "f"}
                for name in given.keys() - kept.keys():
                    value = next(v for v in model.graph.inputs if v.name == name)
                    model.graph.inputs.remove(value)
                    value.const_value = ir.tensor(given[name], name=name)
                    model.graph.register_initializer(value)
                OnnxModule(model)(**tensors(kept))
            except (LnrewriteError, TypeError, ValueError, RuntimeError):  # what ONNX Runtime, or numpy, does not know
                continue
            found.append((case.name, model, kept))
    return found


def tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


def computed(model: ir.Model, given: Arrays) -> Arrays:
    """Return every value of a model's graph."""
    names = [v.name for node in model.graph for v in node.outputs if v.name]
    made = OnnxModule(model).watch([n for n in names if n], **tensors(given))
    stored = {v.name: v.const_value.numpy() for v in model.graph.initializers.values() if v.const_value is not None}
    return {**{str(k): v for k, v in stored.items()}, **given, **{n: v.numpy() for n, v in made.items()}}


@pytest.mark.parametrize("operator", rows(OPERATORS, sample=[]))
def test_what_is_said_of_a_node_holds(operator: str) -> None:
    judged = 0
    for case, model, given in models(operator):
        graph = lift(model)
        try:
            values = computed(model, given)
        except LnrewriteError:  # a value that cannot be an output
            continue
        for op in graph:
            if op.kind in RUN and op.name in values and values[op.name].dtype.kind == "f":
                judged += same(graph, op.name, values, case)
            elif op.kind in SHAPE | {"gather"} and op.data and op.data[0] in given and len(model.graph) == 1:
                judged += followed(graph, op.name, model, given, case)
    assert judged or operator in SILENT


SILENT = {
    "Attention", "Conv", "ConvTranspose", "Dropout", "Elu", "GroupNormalization", "InstanceNormalization",
    "LayerNormalization", "LeakyRelu", "LpNormalization", "OneHot", "RMSNormalization", "Relu", "ScatterElements",
    "ScatterND",
    "SimplifiedLayerNormalization", "Tile",
}  # fmt: skip
"""Operators of which nothing is said, or no case is run."""


def same(graph: OpGraph, name: str, values: Mapping[str, np.ndarray], case: str) -> bool:
    """Check that the neutral operator computes what the node does; return whether it says anything."""
    held = {n: np.asarray(values[n], dtype=np.float64) for n in graph[name].data}
    if any(a.size == 0 for a in held.values()):
        return False
    try:
        with np.errstate(all="ignore"):
            got = run([graph[name]], held, name)
    except Unknown:
        return False
    want = values[name]
    if np.size(got) == want.size == 1:  # constants of one number are numbers, whatever their rank
        got = np.reshape(got, want.shape)
    if graph[name].kind == "expand":  # left to what reads it
        got = np.broadcast_to(got, want.shape)
    assert np.shape(got) == want.shape, f"{graph[name]} of {case}"
    close = 1e-2 if want.dtype == np.float16 else 1e-4
    np.testing.assert_allclose(got, want, close, close / 10, err_msg=f"{graph[name]} of {case}")
    return True


def followed(graph: OpGraph, name: str, model: ir.Model, given: Arrays, case: str) -> bool:
    """Check each claim about an axis; return whether there is any."""
    op, source = graph[name], graph[name].data[0]
    x, y = given[source], OnnxModule(model)(**tensors(given))[name].numpy()
    pairs = {(axis, moved(graph, op, axis)) for axis in range(-x.ndim, 0)}
    pairs |= {(moved(graph, op, axis, back=True), axis) for axis in range(-y.ndim, 0)}
    claims = [(a, b) for a, b in pairs if a is not None and b is not None and x.dtype.kind == "f"]
    for before, after in claims:
        said = f"axis {before} of {x.shape} is {after} of {y.shape}: {op} of {case}"
        assert x.shape[before] == y.shape[after], said
        by = np.random.default_rng(0).uniform(0.5, 1.5, x.shape[before]).astype(x.dtype)
        one, two = (by.reshape(-1, *[1] * (-axis - 1)) for axis in (before, after))
        got = OnnxModule(model)(**tensors({**given, source: x * one}))[name].numpy()
        np.testing.assert_allclose(got, y * two, 1e-5, 1e-6, err_msg=said)
        if op.kind != "pad":
            got = OnnxModule(model)(**tensors({**given, source: x + one}))[name].numpy()
            np.testing.assert_allclose(got, y + two, 1e-5, 1e-6, err_msg=said)
    return bool(claims)
