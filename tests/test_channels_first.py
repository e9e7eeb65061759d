"""Norms over channels that come first, whose gain and bias are stored as formulas take them: [C], [C, 1, 1] ..."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

import lnrewrite as lnr
from lnrewrite.backends.onnx.file import whole
from lnrewrite.pipeline.sounding import Unproved, Witness
from tiers import rows

WIDTH = 16
STORED = [(WIDTH,), (WIDTH, 1, 1), (1, WIDTH, 1, 1)]
WRITERS = ["", "dynamo", "traced"]
PASSES = ["fold-affine{final=true}", "layernorm-to-rmsnorm", "place{to=post}"]


class First(nn.Module):
    """Norm over the second axis by a formula, with a gain and a bias of a shape."""

    def __init__(self, stored: tuple[int, ...]) -> None:
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.rand(stored) + 0.5), nn.Parameter(torch.randn(stored))
        self.behind = (1, 1) if len(stored) == 1 else ()

    def forward(self, x: Tensor) -> Tensor:
        off = x - x.mean(1, keepdim=True)
        normed = off / torch.sqrt(off.pow(2).mean(1, keepdim=True) + 1e-6)
        gain, bias = (v.reshape(*v.shape, *self.behind) if self.behind else v for v in (self.gain, self.bias))
        return gain * normed + bias


class Net(nn.Module):
    """Hold a stem, a block and a head of convolutions; what reads a norm pads nothing."""

    def __init__(self, stored: tuple[int, ...]) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, WIDTH, 2, 2), nn.Conv2d(WIDTH, 5, 2, 2)
        self.block = nn.Sequential(First(stored), nn.Conv2d(WIDTH, 24, 1), nn.GELU(), nn.Conv2d(24, WIDTH, 1))
        self.final = First(stored)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        found: Tensor = self.head(self.final(x + self.block(x)))
        return found


def opened(stored: tuple[int, ...], writer: str, path: Path) -> Any:
    torch.manual_seed(0)
    module, x = Net(stored).eval(), torch.randn(2, 3, 8, 8)
    if not writer:
        return lnr.capture(module, (x,))
    how: dict[str, Any] = {"opset_version": 17} if writer == "traced" else {}
    torch.onnx.export(module, (x,), path, dynamo=writer == "dynamo", verbose=False, **how)
    return lnr.load(path)


CASES = list(product(STORED, WRITERS, PASSES))


@pytest.mark.parametrize(("stored", "writer", "text"), rows(CASES, sample=CASES[::4]))
def test_passes_take_vectors_however_they_are_stored(
    stored: tuple[int, ...], writer: str, text: str, tmp_path: Path
) -> None:
    program = opened(stored, writer, tmp_path / "m.onnx")
    result = lnr.Pipeline.parse(text).run(program)
    assert result.report.edits and not result.report.refusals
    if "place" not in text:
        evidence = program.evidence(0)
        assert evidence.wide and result.report.exact_error < 2e-7  # two roundings of what is stored in float32
    else:
        assert result.report.measured is not None and (result.report.measured.relative_error or 1) < 0.1


def test_a_mapped_file_that_is_looked_at_is_read(tmp_path: Path) -> None:
    """What the traceback of an error still holds does not keep a model from being run."""
    tensor = ir.tensor(np.arange(6, dtype=np.float32), name="w")
    x = ir.Value(name="x", shape=ir.Shape([6]), type=ir.TensorType(ir.DataType.FLOAT))
    weight = ir.Value(name="w", shape=ir.Shape([6]), type=ir.TensorType(ir.DataType.FLOAT), const_value=tensor)
    node = ir.node("Add", [x, weight])
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[weight], opset_imports={"": 18}, name="g")
    ir.save(ir.Model(graph, ir_version=8), tmp_path / "m.onnx", external_data="m.data", size_threshold_bytes=0)
    model = ir.load(tmp_path / "m.onnx")
    held = model.graph.initializers["w"].const_value
    assert isinstance(held, ir.ExternalTensor)
    view = held.numpy()
    for _ in range(2):
        found = whole(model).graph.initializers["w"].const_value
        assert found is not None and found.numpy().tolist() == view.tolist() == list(range(6))


class Failing:
    """Stand in for a program that a library's error, or a bare assertion, keeps from being tried."""

    def __init__(self, fault: Exception) -> None:
        self.fault = fault

    def evidence(self, seed: int) -> object:
        return self

    def away(self, evidence: object) -> Any:
        raise self.fault


@pytest.mark.parametrize("fault", [BufferError("pointers exist"), AssertionError()])
def test_what_cannot_be_tried_is_refused_in_words(fault: Exception) -> None:
    witness, program = Witness(0, False), Failing(fault)
    witness.call(program)  # type: ignore[arg-type]
    with pytest.raises(Unproved, match="LN404 the passes: running the result fails with .*(exist|self.fault)'?;"):
        witness.hear(program, "the passes")  # type: ignore[arg-type]
