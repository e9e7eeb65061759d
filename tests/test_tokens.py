"""Decoders' graphs made plain: tokens are not flattened, and the kernel reads one product; numbers stay."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lnrewrite.backends.onnx.columns import gather_columns
from lnrewrite.backends.onnx.flattening import keep_tokens_apart
from lnrewrite.backends.onnx.packing import pack_heads
from lnrewrite.backends.onnx.shapes import infer_shapes

BATCH, NEW = "batch_size", "sequence_length"
WIDTH, HEADS, SIZE = 12, 2, 8
node = helper.make_node


def model_of(nodes: list[onnx.NodeProto], arrays: dict[str, np.ndarray], outputs: list[str]) -> ir.Model:
    """Return a model of x and of a decoder's cache, its shapes inferred."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [BATCH, NEW, WIDTH])
    cache = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [BATCH, HEADS, "past_sequence_length", SIZE])
        for n in ("k0", "v0")
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs]
    held = [numpy_helper.from_array(a, n) for n, a in arrays.items()]
    graph = helper.make_graph(nodes, "g", [x, *cache], ends, held)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    made = ir.from_proto(helper.make_model(graph, opset_imports=imports, ir_version=9))
    infer_shapes(made)
    return made


def run(model: ir.Model) -> list[np.ndarray]:
    draw = np.random.default_rng(1)
    feed = {"x": draw.normal(size=(2, 3, WIDTH)).astype(np.float32)}
    feed |= {n: np.zeros((2, HEADS, 0, SIZE), np.float32) for n in ("k0", "v0")}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    taken = {value.name for value in session.get_inputs()}
    return [np.asarray(each) for each in session.run(None, {n: a for n, a in feed.items() if n in taken})]


def same(one: list[np.ndarray], two: list[np.ndarray]) -> bool:
    return all(np.abs(a - b).max() <= 1e-5 * np.abs(a).max() for a, b in zip(one, two, strict=True))


def counts(model: ir.Model) -> Counter[str]:
    return Counter(n.op_type for n in model.graph)


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


BETWEEN = {
    "gemm": (["Gemm", "Relu"], 0),
    "turned": (["Gemm of W^T", "LayerNormalization"], 0),
    "over tokens": (["Gemm", "Softmax"], 2),
    "scaled": (["Gemm times 2"], 2),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_tokens_stay_apart_where_each_is_treated_alone(name: str) -> None:
    """A Gemm of flattened tokens is a product and a sum of three axes; what mixes tokens keeps its reshapes."""
    steps, reshapes = BETWEEN[name]
    calls = {
        "Gemm": node("Gemm", ["a", "w", "b"], ["c"]), "Gemm of W^T": node("Gemm", ["a", "w", "b"], ["c"], transB=1),
        "Gemm times 2": node("Gemm", ["a", "w", "b"], ["y2"], alpha=2.0), "Relu": node("Relu", ["c"], ["y2"]),
        "Softmax": node("Softmax", ["c"], ["y2"], axis=0),
        "LayerNormalization": node("LayerNormalization", ["c", "g", "b"], ["y2"], axis=-1),
    }  # fmt: skip
    nodes = [
        node("Reshape", ["x", "rows"], ["a"]), *(calls[step] for step in steps),
        node("Shape", ["x"], ["shape"]), node("Reshape", ["y2", "shape"], ["y"]), node("Neg", ["y"], ["z"]),
    ]  # fmt: skip
    arrays = {"rows": np.array([-1, WIDTH]), "w": weights(WIDTH, WIDTH), "b": weights(WIDTH), "g": weights(WIDTH)}
    model = model_of(nodes, arrays, ["z"])
    wanted = run(model)
    keep_tokens_apart(model)
    assert counts(model)["Reshape"] == reshapes and counts(model)["Gemm"] == bool(reshapes)
    assert same(wanted, run(model))


PACKED = HEADS * 3 * SIZE
TAKEN_APART = {
    "sliced": (
        [node("Slice", ["p", f"s{i}", f"s{i + 1}", "last"], [f"f{i}"]) for i in range(3)],
        {f"s{i}": np.array([i * PACKED // 3]) for i in range(4)} | {"last": np.array([-1])}, 1,
    ),
    "of each head": (
        [
            node("Reshape", ["p", "heads"], ["h"]), node("Split", ["h"], ["q4", "k4", "v4"], axis=3, num_outputs=3),
            *(node("Reshape", [f"{n}4", "flat"], [f"f{i}"]) for i, n in enumerate("qkv")),
        ],
        {"heads": np.array([0, 0, HEADS, 3 * SIZE]), "flat": np.array([0, 0, HEADS * SIZE])}, 1,
    ),
    "turned": (
        [
            node("Reshape", ["p", "heads"], ["h"]), node("Transpose", ["h"], ["t"], perm=[3, 0, 1, 2, 4]),
            node("Split", ["t"], ["q5", "k5", "v5"], axis=0, num_outputs=3),
            *(node("Reshape", [f"{n}5", "flat"], [f"f{i}"]) for i, n in enumerate("qkv")),
        ],
        {"heads": np.array([0, 0, HEADS, 3, SIZE]), "flat": np.array([-1, 3, HEADS * SIZE])}, 1,
    ),
    "twice": (
        [
            node("Slice", ["p", "s0", "s1", "last"], ["f0"]), node("Slice", ["p", "s1", "s2", "last"], ["f1"]),
            node("Identity", ["f1"], ["f2"]),
        ],
        {f"s{i}": np.array([i * PACKED // 3]) for i in range(3)} | {"last": np.array([-1])}, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("name", TAKEN_APART)
def test_the_kernel_reads_one_product(name: str, rotated: bool) -> None:
    """Columns are put in the kernel's order, in weight and bias; where some are read twice, all stays."""
    moves, arrays, done = TAKEN_APART[name]
    ends = ["f0", "f1", "f2"]
    turns = [
        node("RotaryEmbedding", [f"f{i}", "places", "cos", "sin"], [f"r{i}"], domain="com.microsoft") for i in (0, 1)
    ]
    ends = ["r0", "r1", "f2"] if rotated else ends
    kernel = node(
        "GroupQueryAttention", [*ends, "k0", "v0", "lengths", "total"], ["y", "k1", "v1"], domain="com.microsoft",
        num_heads=HEADS, kv_num_heads=HEADS, scale=0.3,
    )  # fmt: skip
    nodes = [node("MatMul", ["x", "w"], ["m"]), node("Add", ["m", "b"], ["p"]), *moves, *turns * rotated, kernel]
    held = {"w": weights(WIDTH, PACKED), "b": weights(PACKED), "lengths": np.full(2, 2, np.int32)}
    angles = np.outer(np.arange(4), np.arange(1, SIZE // 2 + 1)).astype(np.float32)
    held |= {"total": np.array(3, np.int32), "cos": np.cos(angles), "sin": np.sin(angles)}
    held["places"] = np.tile(np.arange(3), (2, 1))
    model = model_of(nodes, held | arrays, ["y", "k1", "v1"])
    wanted = run(model)
    gather_columns(model)
    made = counts(model)
    assert (made["MatMul"], made["Add"]) == (1, 1)
    assert (made["Reshape"] + made["Slice"] + made["Transpose"] == 0) is bool(done)
    assert made["Split"] == (done if rotated else 0)
    assert same(wanted, run(model))


def test_what_queries_are_multiplied_by_is_the_kernels_scale() -> None:
    ends = [node("MatMul", ["x", f"w{i}"], [f"m{i}"]) for i in range(3)]
    kernel = node(
        "GroupQueryAttention", ["q", "m1", "m2", "k0", "v0", "lengths", "total"], ["y", "k1", "v1"],
        domain="com.microsoft", num_heads=HEADS, kv_num_heads=HEADS, scale=0.5,
    )  # fmt: skip
    held = {f"w{i}": weights(WIDTH + i, HEADS * SIZE)[:WIDTH] for i in range(3)}
    held |= {"by": np.float32(0.7), "lengths": np.full(2, 2, np.int32), "total": np.array(3, np.int32)}
    model = model_of([*ends, node("Mul", ["m0", "by"], ["q"]), kernel], held, ["y", "k1", "v1"])
    wanted = run(model)
    pack_heads(model)
    assert counts(model) == {"MatMul": 1, "GroupQueryAttention": 1}
    assert same(wanted, run(model))
