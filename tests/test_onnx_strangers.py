"""Files of strangers: constants behind Identity, nodes without names, data of functions, links of the hub's cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import lnrewrite as lnr

EYE = np.eye(4, dtype=np.float32)


def written(path: Path, body: str, held: dict[str, np.ndarray] | None = None) -> Path:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18, "my" : 1, "com.microsoft" : 1]> {body}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in (held or {}).items())
    onnx.save(model, path)
    return path


def of_zeros(path: Path) -> torch.Tensor:
    found: torch.Tensor = lnr.load(path).module()(x=torch.zeros(2, 4))["y"]
    return found


def test_data_of_a_function_lie_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a function's constant holds in a file is read from the model's folder, whatever lies in the current one."""
    path = written(tmp_path / "m.onnx", "g (float[n,4] x) => (float[n,4] y) { y = my.F (x) }")
    held = numpy_helper.from_array(np.ones(4, np.float32), "c")
    (tmp_path / "w.bin").write_bytes(held.raw_data)
    held.ClearField("raw_data")
    held.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", "w.bin"), ("offset", "0"), ("length", "16")):
        held.external_data.add(key=key, value=value)
    nodes = [onnx.helper.make_node("Constant", [], ["c"], value=held), onnx.helper.make_node("Add", ["a", "c"], ["b"])]
    model = onnx.load(path)
    versions = [onnx.helper.make_opsetid("", 18)]
    model.functions.append(onnx.helper.make_function("my", "F", ["a"], ["b"], nodes, versions))
    path.write_bytes(model.SerializeToString())
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "w.bin").write_bytes(np.full(4, 77, np.float32).tobytes())
    monkeypatch.chdir(elsewhere)
    assert of_zeros(path).eq(1).all()


def test_a_model_that_the_hubs_cache_links(tmp_path: Path) -> None:
    """A model and its data are links into one folder, under other names there; links that lead elsewhere are told."""
    (blobs := tmp_path / "blobs").mkdir()
    (folder := tmp_path / "snapshots").mkdir()
    path = written(folder / "m.onnx", "g (float[n,4] x) => (float[n,4] y) { y = Add (x, w) }", {"w": EYE[:1] * 0 + 1})
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="m.data", size_threshold=0)
    for name, blob in (("m.onnx", "aaa"), ("m.data", "bbb")):
        (folder / name).rename(blobs / blob)
        (folder / name).symlink_to(blobs / blob)
    assert of_zeros(path).eq(1).all()
    (blobs / "bbb").rename(tmp_path / "bbb")
    (folder / "m.data").unlink()
    (folder / "m.data").symlink_to(tmp_path / "bbb")
    with pytest.raises(lnr.LnrewriteError, match="LN031"):
        lnr.load(path)


NORM = """m = ReduceMean (x, axes) d = Sub (x, m) s = Pow (d, two) v = ReduceMean (s, axes) e = Add (v, eps)
r = Sqrt (e) z = Div (d, r) f = MatMul (z, w) y = Add (x, f)"""
HELD = {"axes": np.array([-1]), "two": np.float32(2), "eps": np.float32(1e-5), "w": EYE}


@pytest.mark.parametrize("name", [*HELD, ""])
def test_constants_behind_identity(name: str, tmp_path: Path) -> None:
    body = f"{name} = Identity (held_{name}) {NORM}" if name else NORM
    given = {f"held_{key}" if key == name else key: np.asarray(value) for key, value in HELD.items()}
    path = written(tmp_path / "m.onnx", f"g (float[n,4] x) => (float[n,4] y) {{ {body} }}", given)
    assert lnr.load(path).inspect()["norms"]["kinds"] == {"layer": 1}


SUMS = {
    "Gemm": "h{i} = MatMul (z{i}, w{i}) f{i} = Relu (h{i}) x{o} = Gemm (f{i}, m, x{i})",
    "Scatter": 'f{i} = MatMul (z{i}, w{i}) x{o} = ScatterElements <reduction = "add", axis = 0> (x{i}, at, f{i})',
}


@pytest.mark.parametrize("spelling", SUMS)
def test_sums_of_nodes_without_names(spelling: str, tmp_path: Path) -> None:
    """Two of them are two blocks, and what is written is a model."""
    blocks = [f"z{i} = LayerNormalization (x{i}, g) {SUMS[spelling].format(i=i, o=i + 1)}" for i in range(2)]
    body = "g (float[3,4] x0) => (float[3,4] x2) { " + " ".join(blocks) + " }"
    at = np.arange(3).repeat(4).reshape(3, 4)
    path = written(
        tmp_path / "m.onnx", body, {"g": np.full(4, 2, np.float32), "w0": EYE, "w1": EYE, "m": EYE, "at": at}
    )
    result = lnr.Pipeline.parse("fold-affine").run(lnr.load(path))
    assert len(result.program.inspect()["streams"][0]["blocks"]) == 2 and result.report.edits
    result.program.save(tmp_path / "again.onnx")
    onnx.checker.check_model(tmp_path / "again.onnx")


def test_a_computed_gate_beside_a_subgraph(tmp_path: Path) -> None:
    """What a gate is worth is worked out although a branch that it does not need reads the states."""
    body = """g (float[n,4] x, bool c) => (float[n,4] y, float[n,4] p) {
        t = Tanh (w) z = LayerNormalization (x, g) h = MatMul (z, m) f = Mul (h, t) y = Add (x, f)
        p = If (c) <then_branch = a () => (float[n,4] q) { q = Identity (h) },
                    else_branch = b () => (float[n,4] r) { r = Neg (h) }> }"""
    held = {"w": np.full(4, 0.3, np.float32), "g": np.full(4, 2, np.float32), "m": EYE}
    path = written(tmp_path / "m.onnx", body, held)
    result = lnr.Pipeline.preset("inference").run(lnr.load(path), partial=True)
    assert lnr.verify(lnr.load(path), result.program)["verdict"] in ("equal", "within")


def test_einsum_among_what_is_worked_out(tmp_path: Path) -> None:
    body = """g (float[n,4] x) => (float[n,4] y) { z = LayerNormalization (x, g) t = Tanh (z)
        f = Einsum <equation = "nd, de -> ne"> (t, m) h = Mul (f, w) y = Add (x, h) }"""
    held = {"w": np.full(4, 0.3, np.float32), "g": np.full(4, 2, np.float32), "m": EYE}
    program = lnr.load(written(tmp_path / "m.onnx", body, held))
    assert program.inspect()["placement"] == "pre"


LABELS = "g (float[n,4] x) => (int64[n] y) { z = MatMul (x, w) y = ArgMax <axis = -1, keepdims = 0> (z) }"
TWO = "g (float[n,4] x) => (float[n,4] y, float[n,4] far) { y = MatMul (x, w) far = Mul (x, big) }"


@pytest.mark.parametrize("body", [LABELS, TWO])
def test_verify_hides_no_output(body: str, tmp_path: Path) -> None:
    """Labels are compared, and a small output beside a large one."""
    programs = []
    for name, weight in (("a", EYE), ("b", EYE[::-1].copy())):
        programs.append(lnr.load(written(tmp_path / f"{name}.onnx", body, {"w": weight, "big": 1e12 * EYE[0]})))
    assert lnr.verify(programs[0], programs[0])["verdict"] == "equal"
    assert lnr.verify(*programs)["verdict"] == "different"


def test_sparse_weights_are_told(tmp_path: Path) -> None:
    model = onnx.load(written(tmp_path / "m.onnx", "g (float[n,4] x) => (float[n,4] y) { y = MatMul (x, w) }"))
    values, indices = (
        numpy_helper.from_array(np.ones(1, np.float32), "w"),
        numpy_helper.from_array(np.zeros(1, np.int64)),
    )
    model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, indices, [4, 4]))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(lnr.LnrewriteError, match="LN030.*sparse"):
        lnr.load(tmp_path / "m.onnx")


PRODUCT = """g (float[n,s,4] x) => (float[n,s,4] y) { z = LayerNormalization (x, g)
    f = com.microsoft.FusedMatMul <transB = 1, alpha = 0.5> (z, w) h = Relu (f) y = Add (x, h) }"""
BERT = """g (int32[n,s] ids) => (float[n,s,4] y) {
    x, mask = com.microsoft.EmbedLayerNormalization (ids, , w, p, , g, b)
    f = com.microsoft.Attention <num_heads = 2> (x, qkv, bias, mask)
    h = MatMul (f, w) t = Add (h, x) y = LayerNormalization (t, g, b) }"""


@pytest.mark.parametrize(("body", "placement"), [(PRODUCT, "pre"), (BERT, "post")])
def test_sizes_behind_operators_of_onnx_runtime(body: str, placement: str, tmp_path: Path) -> None:
    """Files that declare no sizes inside are seen, and edited, as those that do."""
    ones = {"g": np.full(4, 2, np.float32), "b": np.ones(4, np.float32)}
    more = {"w": EYE, "p": EYE.repeat(16, 0), "qkv": np.tile(EYE, 3), "bias": np.zeros(12, np.float32)}
    program = lnr.load(
        written(tmp_path / "m.onnx", body, {k: v for k, v in {**ones, **more}.items() if f" {k}" in body})
    )
    assert program.inspect()["placement"] == placement
    made = lnr.Pipeline.parse("place{to=peri}").run(program).program
    assert made.inspect()["placement"] == "peri"
