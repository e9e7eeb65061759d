"""Sizes that exporters compute of constants are known where shapes are inferred; norms of unknown sizes are edited."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

import lnrewrite as lnr
from lnrewrite.backends.onnx.integers import MOST, work_out_integers
from lnrewrite.backends.onnx.norms import dtype_of, width_of
from tiers import rows

WIDTH, HEADS = 16, 4


def parsed(body: str, held: dict[str, np.ndarray], opset: int = 18) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> {body}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), name) for name, a in held.items())
    return model


# ---- the TorchScript exporter ----

APART: dict[str, Callable[[Tensor], Tensor]] = {
    "unflatten": lambda t: t.unflatten(-1, (HEADS, -1)),
    "unflatten all": lambda t: t.unflatten(2, (HEADS, WIDTH // HEADS)),
    "view": lambda t: t.view(*t.shape[:-1], HEADS, t.shape[-1] // HEADS),
    "reshape": lambda t: t.reshape(t.size(0), -1, HEADS, WIDTH // HEADS),
}
TOGETHER: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda t: t.flatten(2),
    "flatten the last": lambda t: t.flatten(-2),
    "view": lambda t: t.reshape(*t.shape[:2], -1),
}


class Attention(nn.Module):
    """Attend, with heads that are told apart and put together in one of many ways."""

    def __init__(self, apart: str, together: str) -> None:
        super().__init__()
        self.norm, self.packed, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.apart, self.together = APART[apart], TOGETHER[together]
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.apart(t).transpose(1, 2) for t in self.packed(self.norm(x)).chunk(3, -1))
        found: Tensor = x + self.out(self.together(F.scaled_dot_product_attention(q, k, v).transpose(1, 2)))
        return found


SPELLINGS = [(a, t, free) for a in APART for t in TOGETHER for free in (False, True)]


@pytest.mark.parametrize(("apart", "together", "free"), rows(SPELLINGS, sample=SPELLINGS[::7]))
def test_a_traced_attention_keeps_its_stream(apart: str, together: str, free: bool, tmp_path: Path) -> None:
    """Mod(2, 3), which nothing propagated, hid the rank of what was told apart, and with it the rest of the stream."""
    torch.manual_seed(0)
    module = nn.Sequential(*(Attention(apart, together) for _ in range(2)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))
    axes = {"x": {0: "b", 1: "t"}} if free else None
    how = {"input_names": ["x"], "dynamic_axes": axes, "opset_version": 17, "dynamo": False}
    torch.onnx.export(module.eval(), (torch.randn(2, 5, WIDTH),), tmp_path / "m.onnx", **how)  # type: ignore[arg-type]
    program = lnr.load(tmp_path / "m.onnx")
    assert [b.placement for b in program.network.blocks] == ["pre", "pre"]
    report = lnr.Pipeline.parse("fold-affine").run(program, partial=True).report
    assert (report.edits, report.refusals) == (2, ()) and (report.exact_error or 0) < 1e-6


# ---- integers ----

STEPS = ["Add", "Sub", "Mul", "Mod", "Div", "Max", "Min"]


@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(-3, 9)), min_size=1, max_size=4),
    first=st.lists(st.integers(1, 9), min_size=1, max_size=3),
)
def test_integers_are_what_onnx_runtime_computes(steps: list[tuple[str, int]], first: list[int]) -> None:
    steps = [(op, max(by, 1) if op in ("Mod", "Div") else by) for op, by in steps]  # nothing is divided by nothing
    body = " ".join(f"v{i + 1} = {op} (v{i}, c{i})" for i, (op, _) in enumerate(steps))
    held = {"v0": np.array(first), **{f"c{i}": np.array(by) for i, (_, by) in enumerate(steps)}}
    text = f"g (int64[n] x) => (int64[n] y) {{ {body} y = Add (x, v{len(steps)}) }}"
    model = ir.serde.deserialize_model(parsed(text, held))
    x = {"x": np.zeros(len(first), np.int64)}
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    work_out_integers(model)
    made = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    assert np.array_equal(session.run(None, x)[0], made.run(None, x)[0])
    if all(op in ("Add", "Mul", "Max") and by > 0 for op, by in steps):
        assert [node.op_type for node in model.graph] == ["Add"]


LEFT = {
    "a caller may give another": ("g (float[n] x, int64[1] a) => (float y) { s = Mul (a, c) y = Reshape (x, s) }", [2]),
    "a large table": ("g (float[n] x) => (int64[m] y) { s = Mul (a, c) y = Add (s, s) }", [2] * (MOST + 1)),
    "what would be large": ("g (float[n] x) => (bool[m] y) { s = ConstantOfShape (a) y = Not (s) }", [MOST + 1]),
    "numbers below nothing": ("g (float[n] x) => (float y) { s = Div (a, c) y = Reshape (x, s) }", [-7]),
    "an output": ("g (float[n] x) => (int64[1] s, float[n] y) { s = Mul (a, c) y = Add (x, x) }", [2]),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_as_it_is(name: str) -> None:
    body, values = LEFT[name]
    model = ir.serde.deserialize_model(parsed(body, {"a": np.array(values), "c": np.array([2])}))
    before = [node.op_type for node in model.graph]
    work_out_integers(model)
    assert [node.op_type for node in model.graph] == before


# ---- sizes that stay unknown ----

HIDDEN = "s = Shape (x) e = Shape (s) c = Mod (e, many) to = Slice (s, zero, c) x1 = Reshape (x, to)"
"""Makes a value that has no rank which inference could tell: the length of its shape is computed of an input."""
NORMS = {
    "layer": "z = LayerNormalization (x1, g, b)", "no bias": "z = LayerNormalization (x1, g)",
    "rms": "z = SimplifiedLayerNormalization <axis = -1> (x1, g)",
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_of_unknown_rank_folds(name: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    held = {n: draw.normal(size=s).astype(np.float32) for n, s in {"g": (8,), "b": (8,), "w": (8, 5)}.items()}
    integers = {"many": np.array([1000]), "zero": np.array([0])}
    text = f"g (float[2,3,8] x) => (float y) {{ {HIDDEN} {NORMS[name]} y = MatMul (z, w) }}"
    onnx.save(parsed(text, {**held, **integers}), tmp_path / "m.onnx")
    report = lnr.Pipeline.parse("fold-affine").run(lnr.load(tmp_path / "m.onnx")).report
    assert report.edits == 1 and report.exact_error is not None and report.exact_error < 1e-6


def test_what_nothing_tells_is_said_in_words() -> None:
    value = ir.Value(name="x")
    for ask, what in ((width_of, "width"), (dtype_of, "type")):
        with pytest.raises(LookupError, match=f"x has no known {what}"):
            ask(value)
