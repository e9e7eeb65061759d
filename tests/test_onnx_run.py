"""Running ONNX: in float64 where ONNX Runtime can, in float32 where it cannot, and saying which."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import lnrewrite as lnr
from lnrewrite.backends.onnx.session import OnnxModule


def module_of(body: str, ends: str = "(float[n,8] x) => (float[n,8] y)", opset: int = 20) -> OnnxModule:
    text = f'<ir_version: 9, opset_import: ["" : {opset}, "com.microsoft" : 1]> g {ends} {{ {body} }}'
    return OnnxModule(ir.from_proto(onnx.parser.parse_model(text)))


X = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("y = Erf (x)", torch.special.erf(X)),
        ("y = Gelu (x)", torch.nn.functional.gelu(X)),
        ("y = Softmax (x)", X.softmax(-1)),
        ("y = Tanh (x)", X.tanh()),
        ("h = Cast <to = 1> (x) y = Exp (h)", X.exp()),
    ],
)
def test_float64_is_float64(body: str, wanted: torch.Tensor) -> None:
    exact = module_of(body).in_float64()
    assert exact.precision == "float64"
    assert (exact(x=X)["y"] - wanted).abs().max() <= 1e-13 * wanted.abs().max()
    assert (module_of(body)(x=X)["y"] - wanted).abs().max() <= 1e-6 * wanted.abs().max()


def test_erf_is_right_everywhere() -> None:
    x = torch.linspace(-9, 9, 720, dtype=torch.float64).reshape(-1, 8)
    wanted = torch.tensor([math.erf(v) for v in x.flatten().tolist()], dtype=torch.float64).reshape(x.shape)
    assert (module_of("y = Erf (x)").in_float64()(x=x)["y"] - wanted).abs().max() < 2e-14


def test_what_has_no_float64_kernel_runs_in_float32_and_says_so(tmp_path: Path) -> None:
    """Inputs of both widths do; verify gives the width that was used."""
    body = "b = Constant <value_floats = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]> () y = com.microsoft.BiasGelu (x, b)"
    module = module_of(body)
    assert module.in_float64().precision == "float32"
    ir.save(module.model, tmp_path / "m.onnx")
    program = lnr.load(str(tmp_path / "m.onnx"))
    found = lnr.verify(program, program)
    assert (found["verdict"], found["dtype"]) == ("equal", "float32") and len(found["shapes_tried"]) > 1


def test_values_inside_can_be_watched() -> None:
    module = module_of("h = Neg (x) y = Relu (h)")
    found = module.watch(["h", "y"], x=X)
    assert set(found) == {"h", "y"} and torch.equal(found["h"], -X.float())
    assert set(module(X)) == {"y"}


@pytest.mark.parametrize("inputs", [{}, {"x": X, "z": X}, {"x": X[0]}, {"x": np.zeros((3, 9))}])
def test_wrong_inputs(inputs: dict[str, object]) -> None:
    with pytest.raises(lnr.LnrewriteError) as error:
        module_of("y = Relu (x)")(**inputs)
    assert error.value.code == "LN022"


def test_bfloat16_goes_in_and_out_as_float32() -> None:
    body, ends = "h = Cast <to = 1> (x) k = Neg (h) y = Cast <to = 16> (k)", "(bfloat16[n,8] x) => (bfloat16[n,8] y)"
    module = module_of(body, ends)
    assert torch.equal(module(x=X)["y"], -X.bfloat16().float())
