"""ONNX files as others write them: what they hold is read, written and proved, or left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import lnrewrite as lnr
import zoo
from tiers import rows

WIDTH = 16
Node = onnx.NodeProto


def made(
    nodes: list[Node], shape: list[Any], arrays: dict[str, Any], opset: int = 18, domain: str = ""
) -> onnx.ModelProto:
    """Return a model from x to y whose weights are these arrays."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", shape), ("y", None)))
    held = [numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], held)
    imports = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def written_rms(x: str, gain: str, y: str) -> list[Node]:
    """Return an RMSNorm in primitives."""
    return [
        helper.make_node("Mul", [x, x], [f"{y}.square"]),
        helper.make_node("ReduceMean", [f"{y}.square", "last"], [f"{y}.mean"]),
        helper.make_node("Add", [f"{y}.mean", "eps"], [f"{y}.safe"]),
        helper.make_node("Sqrt", [f"{y}.safe"], [f"{y}.root"]),
        helper.make_node("Div", [x, f"{y}.root"], [f"{y}.u"]),
        helper.make_node("Mul", [f"{y}.u", gain], [y]),
    ]


def norm_of_norm() -> onnx.ModelProto:
    nodes = [*written_rms("x", "g1", "a"), *written_rms("a", "g2", "y")]
    arrays = {"g1": weights(WIDTH), "g2": weights(WIDTH), "eps": np.float32(1e-5), "last": np.array([-1])}
    return made(nodes, ["b", "s", WIDTH], arrays)


def rank_unknown() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["maps"]),
        helper.make_node("GroupNormalization", ["maps", "g", "b"], ["n"], num_groups=2, epsilon=1e-5),
        helper.make_node("Transpose", ["n"], ["t"], perm=[0, 2, 3, 1]),
        helper.make_node("MatMul", ["t", "w"], ["y"]),
    ]
    arrays = {"g": weights(8), "b": weights(8), "w": weights(8, 8), "shape": np.array([-1, 8, 4, 4])}
    return made(nodes, ["b", 8, 4, 4], arrays, 21)


def sizes_of_minus_one() -> onnx.ModelProto:
    return made([helper.make_node("MatMul", ["x", "w"], ["y"])], [-1, -1, WIDTH], {"w": weights(WIDTH, WIDTH)})


def over_two_axes() -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Add", ["x", "m"], ["a"]),
        helper.make_node("LayerNormalization", ["a", "g", "b"], ["n"], axis=1),
        helper.make_node("Add", ["a", "n"], ["y"]),
    ]
    return made(nodes, ["b", 5, WIDTH], {"w": weights(WIDTH, WIDTH), "g": weights(5, WIDTH), "b": weights(5, WIDTH)})


def statistics_read() -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Add", ["x", "m"], ["a"]),
        helper.make_node("LayerNormalization", ["a", "g", "b"], ["n", "mean", "inverse"], axis=-1),
        helper.make_node("Add", ["n", "mean"], ["y"]),
    ]
    return made(nodes, ["b", 5, WIDTH], {"w": weights(WIDTH, WIDTH), "g": weights(WIDTH), "b": weights(WIDTH)})


def mean_variance() -> onnx.ModelProto:
    nodes = [helper.make_node("MeanVarianceNormalization", ["x"], ["n"]), helper.make_node("Relu", ["n"], ["y"])]
    return made(nodes, ["b", 5, 4, 4], {})


MADE: dict[str, Callable[[], onnx.ModelProto]] = {
    f.__name__: f
    for f in (norm_of_norm, rank_unknown, sizes_of_minus_one, over_two_axes, statistics_read, mean_variance)
}
HOW: list[tuple[str, dict[str, Any]]] = [
    (name, how)
    for name in MADE
    for how in ({"target": "cpu"}, {"target": "cuda"}, {"target": "cuda", "dtype": "fp16"}, {"target": "generic"})
]


@pytest.mark.parametrize(("name", "how"), rows(HOW, sample=HOW[2::8]), ids=str)
def test_it_is_looked_at_and_exported(name: str, how: dict[str, Any], tmp_path: Path) -> None:
    onnx.save(MADE[name](), tmp_path / "m.onnx")
    program = lnr.load(str(tmp_path / "m.onnx"))
    assert program.inspect()["format"] == "onnx"
    report = program.export(tmp_path / "out.onnx", **how)
    assert report.proof is not None and report.proof["verdict"] in ("equal", "within")


def test_a_norm_of_a_norm_is_two_operators_and_nothing_else(tmp_path: Path) -> None:
    onnx.save(norm_of_norm(), tmp_path / "m.onnx")
    lnr.load(str(tmp_path / "m.onnx")).export(tmp_path / "out.onnx", target="cpu")
    assert [n.op_type for n in onnx.load(tmp_path / "out.onnx").graph.node] == ["SimplifiedLayerNormalization"] * 2


def test_an_operator_that_nothing_knows_can_be_looked_at(tmp_path: Path) -> None:
    nodes = [
        *written_rms("x", "g", "n"), helper.make_node("Fancy", ["n"], ["f"], domain="acme"),
        helper.make_node("MatMul", ["f", "w"], ["m"]), helper.make_node("Add", ["x", "m"], ["y"]),
    ]  # fmt: skip
    arrays = {"g": weights(WIDTH), "w": weights(WIDTH, WIDTH), "eps": np.float32(1e-5), "last": np.array([-1])}
    onnx.save(made(nodes, ["b", "s", WIDTH], arrays, domain="acme"), tmp_path / "m.onnx")
    program = lnr.load(str(tmp_path / "m.onnx"))
    seen = program.inspect()
    assert seen["norms"]["total"] == 1 and any("not checked numerically" in note for note in seen["notes"])
    with pytest.raises(lnr.LnrewriteError, match="LN403 .*acme:Fancy"):
        program.export(tmp_path / "out.onnx", target="cpu")
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("dtype", rows(["fp16", "bf16"], sample=["fp16"]))
def test_a_file_that_is_held_in_half_is_rewritten_and_exported(dtype: str, tmp_path: Path) -> None:
    zoo.program("llama", depth=1).export(tmp_path / "m.onnx", target="cuda", dtype=dtype)
    program = lnr.load(str(tmp_path / "m.onnx"))
    result = lnr.Pipeline.parse("place{to=peri}").run(program).program
    result.save(tmp_path / "peri.onnx")
    assert lnr.load(str(tmp_path / "peri.onnx")).inspect()["placement"] == "peri"
    report = program.export(tmp_path / "again.onnx", target="cuda", dtype=dtype)
    assert report.proof is not None and report.proof["verdict"] in ("equal", "within")


def test_half_precision_where_types_are_not_known(tmp_path: Path) -> None:
    """GroupNormalization, behind which nothing is inferred, and DequantizeLinear of opset 18, which gives float32."""
    node = helper.make_node
    grouped = [
        node("GroupNormalization", ["x", "scale", "bias"], ["n"], num_groups=2),
        node("Transpose", ["n"], ["t"], perm=[0, 2, 1]),
        node("MatMul", ["t", "w"], ["m"]),
        node("Add", ["m", "t"], ["y"]),
    ]
    quantized = [
        node("LayerNormalization", ["x", "g"], ["n"], axis=-1),
        node("QuantizeLinear", ["n", "step", "zero"], ["q"]),
        node("DequantizeLinear", ["q", "step", "zero"], ["d"]),
        node("MatMul", ["d", "w"], ["m"]),
        node("Add", ["x", "m"], ["y"]),
    ]
    w, g = weights(WIDTH, WIDTH), weights(WIDTH)
    step, zero = np.float32(0.05), np.int8(0)
    cases = (
        (grouped, ["b", WIDTH, "s"], {"scale": np.ones(2, np.float32), "bias": np.zeros(2, np.float32), "w": w}),
        (quantized, ["b", "s", WIDTH], {"g": g, "w": w, "step": step, "zero": zero}),
    )
    for number, (nodes, shape, arrays) in enumerate(cases):
        onnx.save(made(nodes, shape, arrays), path := tmp_path / f"{number}.onnx")
        report = lnr.load(path).export(out := tmp_path / f"{number}.half.onnx", target="cuda", dtype="fp16")
        assert report.proved is not None
        assert onnx.load(out).graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT16


def test_what_no_inputs_can_cure(tmp_path: Path) -> None:
    """An operator that ONNX Runtime lacks, or an opset, is named at once, without its sources or advice on inputs."""
    node = helper.make_node
    nodes = [node("LayerNormalization", ["x", "g"], ["n"], axis=-1), node("Fancy", ["n"], ["y"], domain="acme")]
    plain = [node("LayerNormalization", ["x", "g"], ["y"], axis=-1)]
    for name, model in (
        ("acme", made(nodes, ["b", "s", WIDTH], {"g": weights(WIDTH)}, domain="acme")),
        ("opset", made(plain, ["b", "s", WIDTH], {"g": weights(WIDTH)}, opset=28)),
    ):
        onnx.save(model, path := tmp_path / f"{name}.onnx")
        with pytest.raises(lnr.LnrewriteError, match=name) as refused:
            lnr.load(path).export(tmp_path / "out.onnx", target="cpu")
        assert "--input" not in str(refused.value) and "onnxruntime_src" not in str(refused.value)
