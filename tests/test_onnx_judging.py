"""What ONNX Runtime has no kernel in float64 for is judged in float64 by torch, and else with room for float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper

import lnrewrite as lnr
from lnrewrite.backends.onnx.judging import agrees, in_torch
from lnrewrite.comparison.proving import FLOOR, NARROW
from lnrewrite.models.onnx_program import OnnxProgram
from tiers import rows

WIDTH = 16
STEMS = {
    "Conv": "s = Conv <strides = [2, 2]> (x, stem)",
    "padded Conv": 's = Conv <auto_pad = "SAME_UPPER"> (x, stem)',
    "AveragePool": "c = Conv (x, stem) s = AveragePool <kernel_shape = [2, 2]> (c)",
    "MaxPool": "c = Conv (x, stem) s = MaxPool <kernel_shape = [3, 3], strides = [2, 2]> (c)",
    "BatchNormalization": "c = Conv (x, stem) s = BatchNormalization (c, one, bias, bias, one)",
    "Gelu": "c = Conv (x, stem) r = Div (c, root) e = Erf (r) i = Mul (c, e) s = Add (c, i)",
}
UNKNOWN = {
    "Resize": 'c = Conv (x, stem) s = Resize <mode = "linear"> (c, , scales)',
    "ConvTranspose": "s = ConvTranspose (x, back)",
}
"""Stems with an operator that torch's table lacks."""
BODY = """{stem} t = Transpose <perm = [0, 2, 3, 1]> (s)
z = LayerNormalization (t, g, b) h = MatMul (z, up) a = Relu (h) f = MatMul (a, down) k = Add (t, f)
z2 = LayerNormalization (k, g, b) y = MatMul (z2, head)"""


def opened(stem: str, path: Path) -> OnnxProgram:
    """Return a net of one block behind a stem."""
    draw = np.random.default_rng(0)
    sizes = {"stem": (WIDTH, 3, 2, 2), "back": (3, WIDTH, 2, 2), "up": (WIDTH, 24), "down": (24, WIDTH)}
    held = {n: draw.normal(size=s) for n, s in {**sizes, "head": (WIDTH, 5), "g": (WIDTH,), "b": (WIDTH,)}.items()}
    held |= {"one": np.ones(WIDTH), "bias": np.zeros(WIDTH), "root": np.array(2**0.5), "scales": np.array([1, 1, 2, 2])}
    body = BODY.format(stem=stem)
    text = f'<ir_version: 8, opset_import: ["" : 17]> g (float[2,3,8,8] x) => (float[b,h,w,5] y) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(a.astype(np.float32), n) for n, a in held.items())
    onnx.save(model, path)
    found = lnr.load(path)
    assert isinstance(found, OnnxProgram)
    return found


@pytest.mark.parametrize("name", rows(STEMS, sample=["padded Conv", "MaxPool"]))
def test_images_are_judged_in_float64(name: str, tmp_path: Path) -> None:
    program = opened(STEMS[name], tmp_path / "m.onnx")
    evidence = program.evidence(0)
    assert evidence is not None and evidence.wide and program.away(evidence).error == 0
    report = lnr.Pipeline.parse("fold-affine{final=true}").run(program).report
    assert report.edits == 2 and report.exact_error is not None and report.exact_error < FLOOR


@pytest.mark.parametrize("name", rows(UNKNOWN, sample=["Resize"]))
def test_what_torch_does_not_know_is_judged_with_room_for_float32(name: str, tmp_path: Path) -> None:
    program = opened(UNKNOWN[name], tmp_path / "m.onnx")
    evidence = program.evidence(0)
    assert evidence is not None and not evidence.wide and in_torch(program.model) is None
    report = lnr.Pipeline.parse("fold-affine{final=true}").run(program).report
    assert report.edits == 2 and report.exact_error is not None and 0 < report.exact_error < NARROW


@pytest.mark.parametrize(("stem", "moved"), [(STEMS["Conv"], 1e-5), (UNKNOWN["Resize"], 1e-4)])
def test_either_judge_sees_what_is_wrong(stem: str, moved: float, tmp_path: Path) -> None:
    """A gain that is a little off is no rounding."""
    program = opened(stem, tmp_path / "m.onnx")
    evidence = program.evidence(0)
    assert evidence is not None
    gain = program.model.graph.initializers["g"]
    assert gain.const_value is not None
    array = gain.const_value.numpy().copy()
    assert not program.away(evidence).unexplained
    array[3] *= 1 + moved
    gain.const_value = ir.tensor(array, name="g")
    assert program.away(evidence).unexplained > 0


def test_the_judge_is_asked_whether_it_means_the_same(tmp_path: Path) -> None:
    program = opened(STEMS["Conv"], tmp_path / "m.onnx")
    batch = {"x": torch.randn(2, 3, 8, 8)}
    run = in_torch(program.model)
    assert run is not None
    found = run(batch)
    assert found[0].dtype is torch.float64
    assert agrees(program.model, batch, found) and not agrees(program.model, batch, [1.1 * t for t in found])
