"""Run a whole ONNX model in float64: in ONNX Runtime or, where that has no kernel for it, as torch does.

ONNX Runtime's CPU kernels compute neither Conv nor most other operators on images in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir
import torch
from torch import Tensor, fx

from ...pipeline.protocols import Batch
from ..outputs import Outputs, apart
from .double import doubled, widened
from .mirror import mirror
from .session import OnnxModule, runnable

Run = Callable[[Batch], Outputs]
"""Runs a model on a batch and returns its outputs in float64."""
Judge = Callable[[ir.Model], Run | None]
"""Makes of a model what runs it; None where nothing can. It may raise LnrewriteError, as what it makes may."""


def as_written(model: ir.Model) -> Run:
    """Run a model as ONNX Runtime runs it, in the precision that it is written in."""
    return _given(runnable(model))


def in_runtime(model: ir.Model) -> Run:
    """Run a model in float64 in ONNX Runtime."""
    return _given(OnnxModule(doubled(model), "float64").loaded())


def in_torch(model: ir.Model) -> Run | None:
    """Run a model in float64 in torch; None where an operator of it is not known there."""
    model = widened(model, ir.DataType.DOUBLE)
    names = [str(v.name) for v in model.graph.outputs]
    found = mirror(model, names)
    if not found.names.keys() >= set(names):
        return None
    nodes = {node.name: node for node in found.module.graph.nodes}
    found.module.graph.output_node().args = (tuple(nodes[found.names[name]] for name in names),)
    feeding = OnnxModule(model)

    def run(batch: Batch) -> Outputs:
        given = {n: torch.from_numpy(a) for n, a in feeding.feed(*_inputs(batch)).items()}
        with torch.no_grad():
            return [t.double() for t in fx.Interpreter(found.module).run(*given.values())]

    return run


WAYS: tuple[tuple[Judge, bool], ...] = ((in_runtime, True), (in_torch, True), (as_written, False))
"""What a model can be judged by, the best first, and whether that is in float64."""
AGREED = 1e-2
"""How far torch in float64 may be from ONNX Runtime: half precision may be that far off, another meaning is farther."""


def agrees(model: ir.Model, batch: Batch, outputs: Outputs) -> bool:
    """Return whether ONNX Runtime, which has the last word on what operators mean, gives these outputs, but rounded."""
    return apart([outputs], [as_written(model)(batch)]) <= AGREED


def _inputs(batch: Batch) -> tuple[tuple[object, ...], Mapping[str, object]]:
    """Return a batch as inputs by order and by name."""
    return ((), batch) if isinstance(batch, Mapping) else (tuple(batch), {})


def _given(module: OnnxModule) -> Run:
    def run(batch: Batch) -> Outputs:
        args, named = _inputs(batch)
        found: dict[str, Tensor] = module(*args, **named)
        return [t.double() for t in found.values()]

    return run
