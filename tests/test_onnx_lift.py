"""What fused, quantised and old operators mean in the picture."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import pytest

from lnrewrite.backends.onnx.lift import lift
from lnrewrite.backends.onnx.ops import meant
from lnrewrite.backends.onnx.spelled import respell
from lnrewrite.detect.detection import detect
from lnrewrite.ir import Network, Side

WIDTH = 16


def model_of(body: str, opset: int = 18, **weights: tuple[int, ...]) -> ir.Model:
    """Build a model from x [batch, length, 16] to y; `weights` are random initializers by name and shape."""
    rng = np.random.default_rng(0)
    text = f"""<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]>
    g (float[batch,length,{WIDTH}] x) => (float[batch,length,{WIDTH}] y) {{ {body} }}"""
    proto = onnx.parser.parse_model(text)
    for name, shape in weights.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape).astype("float32"), name))
    return ir.from_proto(proto)


def seen(body: str, opset: int = 18, **weights: tuple[int, ...]) -> Network:
    return detect(lift(model_of(body, opset, **weights))).network


MLP = "h = MatMul (u, a_w) r = Relu (h) f = MatMul (r, b_w)"
SIZES = {"a_w": (WIDTH, 24), "b_w": (24, WIDTH), "n_g": (WIDTH,), "n_b": (WIDTH,)}


def test_a_product_and_the_bias_added_to_it_are_one_linear_map() -> None:
    body = "u = LayerNormalization <axis = -1> (x, n_g, n_b) h = MatMul (u, a_w) k = Add (c_b, h) r = Relu (k) "
    body += "f = MatMul (r, b_w) y = Add (x, f)"
    (block,) = seen(body, **SIZES, c_b=(24,)).blocks
    assert block.placement == "pre"
    assert [(r.param, r.axis, r.bias) for r in block.readers] == [("a_w", 0, "c_b")]
    assert [(w.param, w.axis, w.bias) for w in block.writers] == [("b_w", 1, None)]


def test_a_product_that_something_else_reads_keeps_its_bias_apart() -> None:
    body = "u = LayerNormalization <axis = -1> (x, n_g, n_b) h = MatMul (u, a_w) k = Add (h, c_b) r = Mul (k, h) "
    body += "f = MatMul (r, b_w) y = Add (x, f)"
    (block,) = seen(body, **SIZES, c_b=(24,)).blocks
    assert [(r.param, r.bias) for r in block.readers] == [("a_w", None)]


@pytest.mark.parametrize(("turned", "axis"), [(0, 0), (1, 1)])
def test_gemm_reads_along_the_axis_that_it_contracts(turned: int, axis: int) -> None:
    body = f"""s = Constant <value_ints = [-1, {WIDTH}]> () x2 = Reshape (x, s)
    u = LayerNormalization <axis = -1> (x2, n_g, n_b) h = Gemm <transB = {turned}> (u, a_w) r = Relu (h)
    f = MatMul (r, b_w) t = Add (x2, f) z = Shape (x) y = Reshape (t, z)"""
    sizes = {**SIZES, "a_w": (24, WIDTH) if turned else (WIDTH, 24)}
    (block,) = seen(body, **sizes).blocks
    assert [(r.param, r.axis) for r in block.readers] == [("a_w", axis)]


def test_a_sum_of_sizes_is_no_reader() -> None:
    body = f"u = LayerNormalization <axis = -1> (x, n_g, n_b) {MLP} y = Add (x, f) z = Shape (x) w = Size (u)"
    (block,) = seen(body, **SIZES).blocks
    assert not block.barriers and not block.sites[0].taps


def test_old_opsets_have_their_axes_in_attributes() -> None:
    body = f"""two = Constant <value_float = 2.0> () m = ReduceMean <axes = [-1]> (x) d = Sub (x, m) q = Pow (d, two)
    v = ReduceMean <axes = [-1]> (q) e = Constant <value_float = 0.00001> () ve = Add (v, e) s = Sqrt (ve)
    c = Div (d, s) g = Mul (c, n_g) u = Add (g, n_b) {MLP} y = Add (x, f)"""
    (block,) = seen(body, 12, **SIZES).blocks
    (site,) = block.sites
    assert (site.norm.kind, site.norm.eps, site.norm.gamma, site.norm.beta) == ("layer", 1e-5, "n_g", "n_b")


def test_shapes_are_found_behind_operators_that_onnx_does_not_know() -> None:
    body = """u = SimplifiedLayerNormalization <axis = -1, epsilon = 0.001> (x, n_g) h = MatMul (u, a_w)
    r = com.microsoft.FastGelu (h) f = MatMul (r, b_w) t = Add (x, f)
    u2 = SimplifiedLayerNormalization <axis = -1, epsilon = 0.001> (t, n_g) h2 = MatMul (u2, a_w)
    r2 = com.microsoft.QuickGelu (h2) f2 = MatMul (r2, b_w) y = Add (t, f2)"""
    network = seen(body, **SIZES)
    assert [b.placement for b in network.blocks] == ["pre", "pre"]
    assert all(b.sites[0].norm.eps == 1e-3 and b.sites[0].norm.kind == "rms" for b in network.blocks)
    assert all(r.shared for b in network.blocks for r in b.readers)


def test_group_query_attention_is_an_attention_block() -> None:
    body = """u = SimplifiedLayerNormalization <axis = -1> (x, n_g) q = MatMul (u, q_w) k = MatMul (u, k_w)
    v = MatMul (u, v_w) lens = Constant <value_ints = [3, 3]> () total = Constant <value_int = 4> ()
    o = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2> (q, k, v, , , lens, total)
    f = MatMul (o, o_w) y = Add (x, f)"""
    half = (WIDTH, WIDTH // 2)
    weights = {"q_w": (WIDTH, WIDTH), "k_w": half, "v_w": half, "o_w": (WIDTH, WIDTH), "n_g": (WIDTH,)}
    (block,) = seen(body, **weights).blocks
    assert (block.kind, block.placement) == ("attention", "pre")
    assert [r.param for r in block.readers] == ["q_w", "k_w", "v_w"]
    assert [w.param for w in block.writers] == ["o_w"]


def test_quantised_readers_are_taps_that_a_pass_refuses_by_name() -> None:
    body = """u = LayerNormalization <axis = -1> (x, n_g, n_b)
    h = com.microsoft.MatMulNBits <K = 16, N = 24, bits = 4, block_size = 16> (u, packed, scales) r = Relu (h)
    f = MatMul (r, b_w) y = Add (x, f)"""
    (block,) = seen(body, **SIZES, packed=(24, 1, 8), scales=(24,)).blocks
    assert block.sites[0].taps == ("linear",) and not block.readers
    body = """u = LayerNormalization <axis = -1> (x, n_g, n_b) w = DequantizeLinear (packed, scale) h = MatMul (u, w)
    r = Relu (h) f = MatMul (r, b_w) y = Add (x, f)"""
    (block,) = seen(body, **SIZES, packed=(WIDTH, 24), scale=(1,)).blocks
    assert block.sites[0].taps == ("matmul",) and not block.readers


def test_a_subgraph_reads_what_it_captures() -> None:
    body = f"""u = LayerNormalization <axis = -1> (x, n_g, n_b) {MLP} t = Add (x, f)
    yes = Constant <value = bool {{1}}> ()
    y = If (yes) <then_branch = one () => (float[batch,length,{WIDTH}] p) {{ p = Relu (t) }},
                  else_branch = two () => (float[batch,length,{WIDTH}] q) {{ q = Identity (t) }}>"""
    graph = lift(model_of(body, **SIZES))
    assert "t" in graph["y"].data


def test_a_rounded_constant_is_the_number_that_was_meant() -> None:
    assert meant(np.float32(1e-5)) == 1e-5
    assert meant(np.float32(1 / 768)) == 1 / 768
    assert meant(np.float16(0.1)) == 0.1
    assert meant(np.float32(0.3)) == 0.3
    assert meant(np.float32(2.0)) == 2.0


NORMED = "u = LayerNormalization <axis = -1> (x, n_g, n_b)"
SPELLED = {
    "a difference": f"{NORMED} {MLP} y = Sub (x, f)",
    "a difference from the branch": f"{NORMED} {MLP} y = Sub (f, x)",
    "states side by side": f"""{NORMED} {MLP} k = Constant <value_ints = [0]> () one = Unsqueeze (x, k)
        two = Unsqueeze (f, k) s = Concat <axis = 0> (one, two) y = ReduceSum <keepdims = 0> (s, k)""",
    "what is added to its elements": f"""{NORMED} {MLP} sizes = Shape (x) at = ConstantOfShape (sizes)
        i = Cast <to = 7> (at) y = ScatterElements <axis = 1, reduction = "add"> (x, i, f)""",
    "the state as a bias": f"""{NORMED} h = MatMul (u, a_w) r = Relu (h) k = Constant <value_ints = [-1, 24]> ()
        w = Constant <value_ints = [-1, {WIDTH}]> () flat = Reshape (r, k) state = Reshape (x, w)
        o = Gemm <beta = 0.5> (flat, b_w, state) sizes = Shape (x) y = Reshape (o, sizes)""",
}


@pytest.mark.parametrize("name", SPELLED)
def test_what_adds_to_a_state_is_spelled_as_an_add(name: str) -> None:
    model = model_of(SPELLED[name], **SIZES)
    x = np.random.default_rng(1).normal(size=(2, 3, WIDTH)).astype("float32")
    before = onnx.reference.ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x})[0]
    respell(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    np.testing.assert_allclose(onnx.reference.ReferenceEvaluator(proto).run(None, {"x": x})[0], before, rtol=1e-5)
    (block,) = detect(lift(model)).network.blocks
    assert (block.placement, [r.param for r in block.readers]) == ("pre", ["a_w"])
    barrier = block.barrier(Side.WRITTEN)
    assert [w.param for w in block.writers] == ["b_w"] or (barrier and barrier.op == "scatter_add")


def test_a_gain_before_a_size_of_its_own_stands_behind_the_norm() -> None:
    body = f"""t = MatMul (x, v) g = Mul (x, t) m = Mul (g, x) q = Mul (x, x) k = Constant <value_ints = [-1]> ()
        a = ReduceMean (q, k) e = Constant <value_float = 0.1> () b = Add (a, e) s = Sqrt (b) u = Div (m, s)
        {MLP} y = Add (x, f)"""
    model = model_of(body, **SIZES, v=(WIDTH, 1))
    respell(model)
    (block,) = detect(lift(model)).network.blocks
    assert (block.placement, block.sites[0].norm.kind) == ("pre", "rms")


def test_rows_are_looked_up_by_any_gather() -> None:
    body = f"""i = Cast <to = 7> (x) k = Constant <value_ints = [-1]> () c = ReduceMax <keepdims = 0> (i, k)
        p = Unsqueeze (c, k) t = GatherND (table, p) u = LayerNormalization <axis = -1> (t, n_g, n_b) {MLP}
        y = Add (t, f)"""
    (stream,) = seen(body, **SIZES, table=(9, WIDTH)).streams
    assert [(s.param, s.table) for s in stream.sources] == [("table", True)]
