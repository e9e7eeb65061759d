"""Every spelling of a norm that exporters write, in both widths of float, at every rank: read, raised, and equal."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes.common import RemoveUnusedNodesPass

from lnrewrite.backends.onnx.lift import lift
from lnrewrite.backends.onnx.raising import raise_norms
from lnrewrite.detect.norms import find_norms
from lnrewrite.ir import Kind
from sheets import HALF, SINGLE, WIDTH, Sheet, finished, given, named, run

EPS = 1e-5


def gain() -> np.ndarray:
    return 1 + 0.3 * np.random.default_rng(1).normal(size=WIDTH)


def bias() -> np.ndarray:
    return 0.2 * np.random.default_rng(2).normal(size=WIDTH)


def mean(s: Sheet, x: ir.Value) -> ir.Value:
    return s("ReduceMean", x, np.array([-1]), keepdims=1)


def rms(inverse: Callable[[Sheet, ir.Value, ir.Value], ir.Value], square: str = "Pow", eps: float = EPS) -> Callable:  # type: ignore[type-arg]
    """Spell an RMSNorm: `inverse` applies the root, `square` squares."""

    def write(s: Sheet, x: ir.Value) -> ir.Value:
        x = s.up(x)
        squared = s("Pow", x, np.array(2.0)) if square == "Pow" else s("Mul", x, x)
        y = s.down(inverse(s, x, s("Add", mean(s, squared), np.array(eps))))
        return s("Mul", gain(), y)

    return write


def _plus_one(s: Sheet, x: ir.Value) -> ir.Value:
    x = s.up(x)
    y = s("Mul", x, s("Reciprocal", s("Sqrt", s("Add", mean(s, s("Mul", x, x)), np.array(EPS)))))
    return s.down(s("Mul", y, s("Add", np.array([1.0]), gain() - 1)))


def _weightless(s: Sheet, x: ir.Value) -> ir.Value:
    x = s.up(x)
    return s.down(s("Div", x, s("Sqrt", s("Add", mean(s, s("Mul", x, x)), np.array(EPS)))))


def _positive_axis(s: Sheet, x: ir.Value) -> ir.Value:
    rank = len(x.shape or ())
    x = s.up(x)
    squares = s("ReduceMean", s("Mul", x, x), np.array([rank - 1]), keepdims=1)
    return s("Mul", s.down(s("Div", x, s("Sqrt", s("Add", squares, np.array(EPS))))), gain())


def _cast_eps(s: Sheet, x: ir.Value) -> ir.Value:
    """Spell an eps that is stored in half precision and cast."""
    x = s.up(x)
    stored = s("Cast", s("Constant", value=ir.tensor(np.array(2.0**-10, np.float16))), to=SINGLE.value)
    eps = s("CastLike", stored, x)
    eps.type, eps.shape = ir.TensorType(SINGLE), ir.Shape([])
    return s("Mul", s.down(s("Div", x, s("Sqrt", s("Add", mean(s, s("Mul", x, x)), eps)))), gain())


def _by_sum(s: Sheet, x: ir.Value) -> ir.Value:
    x = s.up(x)
    squares = s("Mul", s("ReduceSumSquare", x, np.array([-1]), keepdims=1), np.array(1 / WIDTH))
    return s("Mul", s.down(s("Div", x, s("Sqrt", s("Add", squares, np.array(EPS))))), gain())


def layer(square: str = "Pow", root: str = "Div", affine: str = "both", again: bool = False) -> Callable:  # type: ignore[type-arg]
    """Spell a LayerNorm: `again` computes the centred value twice."""

    def write(s: Sheet, x: ir.Value) -> ir.Value:
        x = s.up(x)
        centred = s("Sub", x, mean(s, x))
        other = s("Sub", x, mean(s, x)) if again else centred
        squared = s("Pow", other, np.array(2.0)) if square == "Pow" else s("Mul", other, other)
        deviation = s("Sqrt", s("Add", mean(s, squared), np.array(EPS)))
        y = s("Div", centred, deviation) if root == "Div" else s("Mul", centred, s("Reciprocal", deviation))
        y = s.down(y)
        y = s("Mul", y, gain()) if affine != "none" else y
        return s("Add", y, bias()) if affine == "both" else y

    return write


def _moments(s: Sheet, x: ir.Value) -> ir.Value:
    """Spell the variance E[x^2] - E[x]^2."""
    x = s.up(x)
    m = mean(s, x)
    variance = s("Sub", mean(s, s("Mul", x, x)), s("Mul", m, m))
    y = s("Div", s("Sub", x, m), s("Sqrt", s("Add", variance, np.array(EPS))))
    return s("Add", s("Mul", s.down(y), gain()), bias())


SPELLINGS = {
    "rms_pow_reciprocal": rms(lambda s, x, v: s("Mul", x, s("Reciprocal", s("Sqrt", v)))),
    "rms_reciprocal_first": rms(lambda s, x, v: s("Mul", s("Reciprocal", s("Sqrt", v)), x)),
    "rms_one_over": rms(lambda s, x, v: s("Mul", x, s("Div", np.array(1.0), s("Sqrt", v)))),
    "rms_divided": rms(lambda s, x, v: s("Div", x, s("Sqrt", v))),
    "rms_mul_for_pow": rms(lambda s, x, v: s("Div", x, s("Sqrt", v)), square="Mul"),
    "rms_power_minus_half": rms(lambda s, x, v: s("Mul", x, s("Pow", v, np.array(-0.5)))),
    "rms_large_eps": rms(lambda s, x, v: s("Div", x, s("Sqrt", v)), eps=1e-3),
    "rms_cast_eps": _cast_eps,
    "rms_positive_axis": _positive_axis,
    "rms_weightless": _weightless,
    "rms_plus_one": _plus_one,
    "rms_sum_of_squares": _by_sum,
    "layer_div": layer(),
    "layer_reciprocal": layer(root="Reciprocal"),
    "layer_mul": layer(square="Mul"),
    "layer_no_bias": layer(affine="gain"),
    "layer_bare": layer(affine="none"),
    "layer_centred_twice": layer(again=True),
    "layer_moments": _moments,
    "layer_of_rms": lambda s, x: s(
        "SimplifiedLayerNormalization", s("Sub", x, mean(s, x)), gain(), axis=-1, epsilon=EPS
    ),
    "layer_operator": lambda s, x: s("LayerNormalization", x, gain(), bias(), axis=-1, epsilon=EPS),
    "layer_operator_no_bias": lambda s, x: s("LayerNormalization", x, gain(), axis=-1, epsilon=EPS),
    "rms_operator": lambda s, x: s("RMSNormalization", x, gain(), axis=-1, epsilon=EPS),
    "rms_simplified": lambda s, x: s("SimplifiedLayerNormalization", x, gain(), axis=-1, epsilon=EPS),
}


def model_of(spelling: str, dtype: ir.DataType, rank: int, add: str) -> ir.Model:
    """Build x + skip -> norm: `add` says who else reads the sum, or how the skip is shaped."""
    s, shape = Sheet(dtype), named(rank)
    skip_shape = ir.Shape([1, *shape[1:]]) if add == "broadcast" else shape
    x, skip = given("x", shape, dtype), given("skip", skip_shape, dtype)
    total = s("Add", x, skip)
    total.shape, total.type = shape, ir.TensorType(dtype)
    outputs = [SPELLINGS[spelling](s, total)]
    if add == "shared":
        outputs.append(s("Relu", total))
    if add == "output":
        outputs.append(total)
    for value in outputs:
        value.type, value.shape = ir.TensorType(dtype), shape
    return finished(s, [x, skip], outputs, 23)


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=["fp32", "fp16"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_one_operator_with_the_same_numbers(spelling: str, dtype: ir.DataType, rank: int) -> None:
    for add in ("alone", "shared", "output", "broadcast"):
        model = model_of(spelling, dtype, rank, add)
        raised = model.clone()
        graph = lift(raised)
        norms, refusals = find_norms(graph)
        assert len(norms) == 1 and not refusals
        left = raise_norms(raised, graph, norms, {})
        RemoveUnusedNodesPass()(raised)
        names = [n.op_type for n in raised.graph]
        kept = {"Add", "Relu", "LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization", "Cast"}
        assert not left and set(names) <= kept
        assert sum("Normalization" in n for n in names) == 1
        for scale in (1.0, 100.0):
            before, after = run(model, scale), run(raised, scale)
            bound = 2e-5 if dtype is SINGLE else 4e-3
            assert all(np.abs(a - b).max() <= bound * np.abs(a).max() for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("axis, rows", [(-1, True), (2, True), (1, False)])
def test_a_length_of_one_is_an_l2_norm(axis: int, rows: bool) -> None:
    s, shape = Sheet(SINGLE), named(3)
    x = given("x", shape, SINGLE)
    y = s("LpNormalization", s("Relu", x), axis=axis, p=2)
    y.type, y.shape = ir.TensorType(SINGLE), shape
    norms, _ = find_norms(lift(finished(s, [x], [y], 23)))
    assert [(norm.norm.kind, norm.axis == -1) for norm in norms.values()] == [(Kind.L2, rows)]


TOLD = [name for name in SPELLINGS if name not in ("rms_weightless", "layer_bare", "layer_of_rms")]
"""Behind a mean that was taken off, nothing tells the width."""


@pytest.mark.parametrize("spelling", TOLD)
def test_a_gain_tells_the_width(spelling: str) -> None:
    """Behind a reshape to sizes that nobody knows, a norm is as wide as its gain; without a gain nothing tells it."""
    for known in (True, False):
        s, shape = Sheet(SINGLE), named(3)
        x, sizes = given("x", shape, SINGLE), given("sizes", ir.Shape([3]), ir.DataType.INT64)
        y = s("Add", s("Reshape", s("Relu", x), sizes), np.ones((1, 1, 1)))
        y = SPELLINGS[spelling](s, y) if known else layer(affine="none")(s, y)
        y.type = ir.TensorType(SINGLE)
        graph = lift(finished(s, [x, sizes], [y], 23))
        norms, refusals = find_norms(graph)
        assert (len(norms), len(refusals)) == ((1, 0) if known else (0, 1))
        assert all(graph.width(norm.source) == WIDTH for norm in norms.values())


def test_what_is_no_norm_tells_nothing() -> None:
    """A column of numbers that is multiplied by a vector stays a column, and a mean over other axes says nothing."""
    for axes, gain_shape in (([-1], (1, WIDTH)), ([1], (WIDTH,)), ([-1], (1,))):
        s = Sheet(SINGLE)
        x, sizes = given("x", named(3), SINGLE), given("sizes", ir.Shape([3]), ir.DataType.INT64)
        y = s("Reshape", x, sizes)
        out = s("Mul", s("Sub", y, s("ReduceMean", y, np.array(axes), keepdims=1)), np.ones(gain_shape))
        out.type = ir.TensorType(SINGLE)
        model = finished(s, [x, sizes], [out], 23)
        lift(model)
        assert y.shape is not None and not isinstance(y.shape[-1], int)
