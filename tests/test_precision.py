"""Half precision: what is half, what stays float32, and what cannot be written."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_ir.passes import common

from lnrewrite.errors import LnrewriteError
from lnrewrite.export.precision import lower_precision

FLOAT, HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16


def model_of(body: str, inputs: str = "float[n,4] x", output: str = "float[n,4] y", **weights: np.ndarray) -> ir.Model:
    text = f'<ir_version: 8, opset_import: ["" : 18]> g ({inputs}) => ({output}) {{ {body} }}'
    proto = onnx.parser.parse_model(text)
    for name, array in weights.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array.astype("float32"), name))
    model = ir.from_proto(proto)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.ShapeInferencePass()(model)
    return model


def lowered(model: ir.Model, dtype: str = "fp16") -> tuple[dict[str, ir.DataType | None], list[str]]:
    """Lower a model, check that its types fit together, and return the types by name."""
    notes = lower_precision(model, dtype)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    return {n: v.dtype for n, v in ir.convenience.create_value_mapping(model.graph).items()}, notes


def count(model: ir.Model, op: str) -> int:
    return sum(node.op_type == op for node in model.graph)


EYE = np.eye(4)


@pytest.mark.parametrize(("dtype", "kind"), [("fp16", HALF), ("bf16", ir.DataType.BFLOAT16)])
def test_features_and_weights_become_half(dtype: str, kind: ir.DataType) -> None:
    model = model_of("h = MatMul (x, w) y = Relu (h)", w=EYE)
    types, notes = lowered(model, dtype)
    assert {types[n] for n in "xwhy"} == {kind} and not notes and count(model, "Cast") == 0


def test_positions_stay_float32_until_they_meet_features() -> None:
    body = "p = Cast <to = 1> (i) a = Mul (p, f) c = Cos (a) y = Mul (x, c)"
    model = model_of(body, "float[n,4] x, int64[n,1] i", f=np.array([0.1, 0.2, 0.3, 1e-7]))
    types, _ = lowered(model)
    assert {types[n] for n in "pacf"} == {FLOAT} and types["y"] == HALF and count(model, "Cast") == 2


def test_a_table_of_rows_is_half_and_a_constant_goes_with_its_readers() -> None:
    body = "e = Gather (w, i) t = Transpose (v) h = MatMul (e, t) y = Relu (h)"
    model = model_of(body, "int64[n] i", w=EYE, v=EYE)
    types, _ = lowered(model)
    assert {types[n] for n in "wvetHy".lower()} == {HALF}


def test_a_constant_read_both_ways_is_cast_once() -> None:
    body = "p = Cast <to = 1> (i) a = Mul (p, f) c = Cos (a) z = Mul (x, f) u = Mul (z, c) y = Mul (u, c)"
    model = model_of(body, "float[n,4] x, int64[n,1] i", f=np.array([0.1, 0.2, 0.3, 0.4]))
    types, _ = lowered(model)
    assert types["f"] == FLOAT and count(model, "Cast") == 3


def test_masks_stay_finite() -> None:
    body = "b = Cast <to = 1> (m) c = Mul (b, low) y = Add (x, c)"
    model = model_of(body, "float[n,4] x, bool[n,4] m", low=np.array([-3.4e38]))
    types, _ = lowered(model)
    assert types["c"] == FLOAT and count(model, "Clip") == 1
    assert lowered(model_of("c = Where (m, zero, low) y = Add (x, c)", "float[n,4] x, bool[n,4] m", zero=np.zeros(1), low=np.array([-3.4e38])))[0]["low"] == HALF  # fmt: skip  # noqa: E501
    infinite = model_of("c = Where (m, zero, low) y = Add (x, c)", "float[n,4] x, bool[n,4] m", zero=np.zeros(1), low=np.array([-np.inf]))  # fmt: skip  # noqa: E501
    lowered(infinite)
    held = infinite.graph.initializers["low"].const_value
    assert held is not None and np.isneginf(held.numpy()).all()


def test_an_operator_without_half_computes_in_float32_between_casts() -> None:
    """Conv takes bfloat16 from opset 22 on: what follows it is bfloat16 all the same."""
    body, ends = "c = Conv (x, w) h = Relu (c) y = Mul (h, h)", ("float[n,4,8] x", "float[n,4,8] y")
    model = model_of(body, *ends, w=np.ones((4, 4, 1)))
    types, _ = lowered(model, "bf16")
    assert types["c"] == FLOAT and types["h"] == types["y"] == types["x"] == ir.DataType.BFLOAT16


def test_a_weight_beyond_the_range_is_refused_by_name() -> None:
    with pytest.raises(LnrewriteError) as error:
        lower_precision(model_of("y = MatMul (x, w)", w=EYE * 1e6), "fp16")
    assert error.value.code == "LN502" and "w holds 1e+06" in error.value.why
    assert lowered(model_of("y = MatMul (x, w)", w=EYE * 1e6), "bf16")[0]["w"] == ir.DataType.BFLOAT16


def test_numbers_that_vanish_are_told() -> None:
    _, notes = lowered(model_of("y = MatMul (x, w)", w=EYE * 1e-9))
    assert len(notes) == 1 and "w" in notes[0]


def test_islands_of_a_half_model_and_a_second_time_change_nothing() -> None:
    body = "a = Cast <to = 1> (x) b = Mul (a, a) c = Cast <to = 10> (b) y = Relu (c)"
    model = model_of(body, "float16[n,4] x", "float16[n,4] y")
    types, _ = lowered(model)
    assert types["a"] == types["b"] == FLOAT and types["c"] == HALF and count(model, "Cast") == 2
    model = model_of("h = MatMul (x, w) y = Relu (h)", w=EYE)
    lowered(model)
    before = ir.to_proto(model).SerializeToString()
    lowered(model)
    assert ir.to_proto(model).SerializeToString() == before
