"""Peri-LN's boundary as one operator: what is fused, and how the file runs with kernels and without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from click.testing import CliRunner
from torch.nn import functional as F

import lnrewrite as lnr
import zoo
from lnrewrite.backends.onnx.shapes import infer_shapes
from lnrewrite.cli import main
from lnrewrite.export import boundaries
from lnrewrite.kernels import library
from lnrewrite.models.program import Program
from tiers import rows

pytestmark = pytest.mark.usefixtures("onnx_once", "demo_captured_once")


@pytest.fixture(scope="module")
def gemma() -> Program:
    return zoo.program("gemma2", depth=1)


@pytest.fixture(scope="module")
def bert() -> Program:
    return zoo.program("bert", depth=1)


@pytest.fixture
def kernels(built: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have the kernels built."""
    monkeypatch.setenv(library.VARIABLE, str(built()))
    return built()


@pytest.fixture
def no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def runs(path: Path, options: onnxruntime.SessionOptions | None = None) -> onnxruntime.InferenceSession:
    """Open a file as anyone would."""
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def test_every_boundary_of_a_peri_model_is_one_operator(gemma: Program, kernels: Path, tmp_path: Path) -> None:
    path = tmp_path / "gemma.onnx"
    report = gemma.export(path, target="cuda", fuse="custom", optimize="none")
    assert report.norms is not None and report.proof is not None and report.proof["max_rel"] < 2e-5
    found = operators(path)
    assert (found["NormAddNorm"], found["NormAdd"], found["SimplifiedLayerNormalization"]) == (2, 0, 1)
    assert Counter(row.form for row in report.norms) == {"NormAddNorm": 4, "SimplifiedLayerNormalization": 1}
    held = {p.key: p.value for p in onnx.load(path).metadata_props}
    assert held["lnrewrite.operators"] == "NormAddNorm"
    assert any("proved with the kernels" in note for note in report.notes)


def test_the_kernels_run_and_agree(gemma: Program, kernels: Path, tmp_path: Path) -> None:
    path, seen = tmp_path / "gemma.onnx", tmp_path / "seen.onnx"
    gemma.export(path, target="cpu", fuse="custom")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(seen)
    ours = lnr.session(path, threads=1, options=options)
    assert operators(seen)["NormAddNorm"] == 2, "ONNX Runtime runs the kernels, not their definitions"
    feed = {k: v.numpy() for k, v in gemma.example_inputs().items()}
    right = gemma.module()(**gemma.example_inputs()).logits.detach()
    for session in (ours, runs(path)):  # the second has no kernels: the definitions that the file brings along
        (got, *_) = session.run(None, feed)
        assert torch.allclose(torch.from_numpy(got), right, atol=2e-5 * right.abs().max())


def test_a_file_is_proved_by_definitions_and_kernels(gemma: Program, kernels: Path, tmp_path: Path) -> None:
    path = tmp_path / "gemma.onnx"
    gemma.export(path, target="cpu", fuse="custom")
    found = lnr.verify(gemma, lnr.load(str(path)))
    assert found["verdict"] == "within" and found["kernels"]["verdict"] == "within"
    model = onnx.load(path)
    for node in model.graph.node:  # what the kernels compute is no longer what the definition says
        if node.op_type == "NormAddNorm":
            next(a for a in node.attribute if a.name == "layernorm").i = 1
    onnx.save(model, path)
    found = lnr.verify(gemma, lnr.load(str(path)))
    assert found["verdict"] == found["kernels"]["verdict"] == "different"


def test_a_file_that_is_read_is_seen_whole(gemma: Program, no_kernels: None, tmp_path: Path) -> None:
    path, again = tmp_path / "gemma.onnx", tmp_path / "again.onnx"
    report = gemma.export(path, target="cpu", fuse="custom")
    assert any("kernels build" in note for note in report.notes)
    program = lnr.load(str(path))
    assert program.inspect()["placement"] == "peri" and program.kernels is None
    program.save(again)
    assert "lnrewrite.operators" not in {p.key for p in onnx.load(again).metadata_props}
    assert runs(again)


@pytest.mark.parametrize("dtype", rows(["fp16", "bf16"], sample=["fp16"]))
def test_halves(gemma: Program, kernels: Path, dtype: str, tmp_path: Path) -> None:
    report = gemma.export(tmp_path / "m.onnx", target="cuda", dtype=dtype, fuse="custom", optimize="none")
    assert operators(tmp_path / "m.onnx")["NormAddNorm"] == 2
    assert report.proof is not None and report.proof["max_rel"] < (2e-2 if dtype == "fp16" else 1e-1)


def test_output_only_placement_is_half_a_boundary(gemma: Program, kernels: Path, tmp_path: Path) -> None:
    made = lnr.Pipeline.parse("place{to=output}").run(gemma, [gemma.example_inputs()]).program
    made.export(tmp_path / "m.onnx", target="cpu", fuse="custom")
    found = operators(tmp_path / "m.onnx")
    assert (found["NormAdd"], found["NormAddNorm"]) == (1, 1), "the last boundary ends in the final norm"


@pytest.mark.exhaustive
def test_other_placements_have_no_such_boundary(bert: Program, kernels: Path, tmp_path: Path) -> None:
    report = bert.export(tmp_path / "m.onnx", target="cpu", fuse="custom")
    assert not {"NormAdd", "NormAddNorm"} & set(operators(tmp_path / "m.onnx"))
    assert "lnrewrite" not in {o.domain for o in onnx.load(tmp_path / "m.onnx").opset_import}
    assert any("no norm stands right before a residual add" in note for note in report.notes)


TEXT = """<ir_version: 9, opset_import: ["" : 18]>
g (float[a,4] f, float[a,4] x, float[4] y) => (float[a,4] h, float[a,4] z)
<float[4] g = {1.0, 2.0, 3.0, 4.0}, float[4] b = {0.5, 0.5, 0.5, 0.5}>
{ q = LayerNormalization<axis = -1>(x, g) p = LayerNormalization<axis = -1>(f, g, b) h = Add(X, p) z = SECOND }"""
LAST = "LayerNormalization<axis = -1, epsilon = 0.1>(h, g)"


@pytest.mark.parametrize(
    ("x", "second", "made"),
    [
        ("x", LAST, "NormAddNorm"),
        ("x", "SimplifiedLayerNormalization(h, g)", "NormAdd"),
        ("x", "Relu(h)", "NormAdd"),
        ("y", LAST, ""),
        ("b", LAST, ""),
        ("p", LAST, ""),
        ("q", LAST, "NormAddNorm"),
        ("x", f"{LAST} y_ = Add(z, x)", "NormAddNorm"),
    ],
    ids=["both", "another kind", "no norm", "broadcast", "constant", "itself", "two norms", "one behind the other"],
)
def test_what_is_a_boundary(x: str, second: str, made: str, kernels: Path, tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(TEXT.replace("X", x).replace("SECOND", second))
    before = ir.serde.deserialize_model(proto)
    infer_shapes(before)
    (tmp_path / "before.onnx").write_bytes(proto.SerializeToString())
    boundaries.fuse_norm_add_norm(before)
    assert [n.op_type for n in before.graph if n.domain == "lnrewrite"] == ([made] if made else [])
    ir.save(before, tmp_path / "after.onnx")
    feed = {"f": torch.randn(3, 4).numpy(), "x": torch.randn(3, 4).numpy(), "y": torch.randn(4).numpy()}
    right = runs(tmp_path / "before.onnx").run(None, feed)
    for session in (lnr.session(tmp_path / "after.onnx"), runs(tmp_path / "after.onnx")):
        for a, b in zip(session.run(None, feed), right, strict=True):
            assert torch.allclose(torch.from_numpy(a), torch.from_numpy(b), atol=1e-5)


# ---- what a user meets ----


def test_without_kernels_sessions_and_bench_say_what_to_do(gemma: Program, no_kernels: None, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    gemma.export(path, target="cpu", fuse="custom", verify=False)
    with pytest.raises(lnr.LnrewriteError, match="LN530 .*lnrewrite kernels build"):
        lnr.session(path)
    done = CliRunner().invoke(main, ["bench", str(path)])
    assert done.exit_code == 1 and done.output.startswith("error: LN530") and done.output.count("\n") == 1


def test_kernels_without_cuda_do_not_stand_in_on_a_gpu(kernels: Path) -> None:
    with pytest.raises(lnr.LnrewriteError, match="LN530 .*without CUDA.*build --cuda"):
        library.register(onnxruntime.SessionOptions(), "model.onnx", cuda=True)


def test_a_model_of_two_kinds_has_the_commoner_one_fused(kernels: Path, tmp_path: Path) -> None:
    text = TEXT.replace("X", "x").replace("SECOND", LAST).replace("g (float[a,4] f", "g (float[a,4] e, float[a,4] f")
    text = text.replace("h = Add", "r = SimplifiedLayerNormalization(e, g) s = Add(r, f) h = Add")
    model = ir.serde.deserialize_model(
        onnx.parser.parse_model(text.replace("float[a,4] z)", "float[a,4] z, float[a,4] s)"))
    )
    infer_shapes(model)
    for node in model.graph:  # onnx infers nothing of the operator that ONNX Runtime alone has
        for value in node.outputs:
            value.shape = value.shape or model.graph.inputs[0].shape
    rows, notes = boundaries.fuse_norm_add_norm(model)
    assert len(rows) == 2 and notes == ["1 boundaries stay as they are: their norms are not LayerNormalization"]


def test_a_library_that_is_named_and_missing_stops_only_what_needs_it(
    gemma: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(library.VARIABLE, str(tmp_path / "none.so"))
    gemma.export(tmp_path / "m.onnx", target="cpu")
    assert lnr.load(str(tmp_path / "m.onnx")).inspect()["placement"] == "peri"
    assert lnr.session(tmp_path / "m.onnx") and lnr.bench([str(tmp_path / "m.onnx")], rounds=1, runs=1)
    with pytest.raises(lnr.LnrewriteError, match="LN530 LNREWRITE_KERNELS: the file .* does not exist"):
        gemma.export(tmp_path / "m.onnx", target="cpu", fuse="custom")


def test_a_library_may_be_named_by_a_relative_path(
    gemma: Program, kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemma.export(tmp_path / "m.onnx", target="cpu", fuse="custom", verify=False)
    monkeypatch.chdir(kernels.parent)
    monkeypatch.setenv(library.VARIABLE, kernels.name)
    assert lnr.session(tmp_path / "m.onnx")


def test_bench_takes_the_kernels(gemma: Program, kernels: Path, tmp_path: Path) -> None:
    gemma.export(tmp_path / "m.onnx", target="cpu", fuse="custom", verify=False)
    assert lnr.bench([str(tmp_path / "m.onnx")], rounds=1, runs=1)["models"][0]["median_ms"] > 0


def test_the_command_line(tmp_path: Path) -> None:
    target = str(tmp_path / "m.onnx")
    for options, why in (
        (["--target", "generic", "--fuse", "custom"], "give the target cpu or cuda"),
        (["--target", "cpu", "--fuse", "costum"], "did you mean custom?"),
    ):
        done = CliRunner().invoke(main, ["export", "demo:tinygpt", "-o", target, *options])
        assert done.exit_code == 2 and why in done.output
    with pytest.raises(lnr.LnrewriteError, match="LN520"):
        lnr.session("demo:tinygpt")


# ---- torch ----


@pytest.mark.parametrize("layernorm", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_operator_of_torch(dtype: torch.dtype, layernorm: bool) -> None:
    torch.manual_seed(0)
    f, x = torch.randn(2, 3, 40).to(dtype)
    g_out, g_in, b_out, b_in = torch.randn(4, 40).to(dtype)
    h, z = lnr.norm_add_norm(f, x, g_out, g_in, b_out, b_in, eps_out=0.1, eps_in=1e-3, layernorm=layernorm)

    def normed(v: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        v = v.double() - v.double().mean(-1, keepdim=True) * layernorm
        return (v / (v.square().mean(-1, keepdim=True) + eps).sqrt() * gain + bias).to(dtype)

    right = normed(f, g_out, b_out, 0.1) + x
    for got, want in ((h, right), (z, normed(right, g_in, b_in, 1e-3))):
        assert got.dtype is dtype and torch.allclose(got, want, rtol=4 * torch.finfo(dtype).eps, atol=1e-5)


def test_it_learns_and_checks_its_shapes() -> None:
    f, x, g = torch.randn(3, 4), torch.randn(3, 4), torch.ones(4, requires_grad=True)
    sum(v.square().sum() for v in lnr.norm_add_norm(f, x, g, g)).backward()
    assert g.grad is not None and g.grad.abs().max() > 0
    for wrong in ((f, x[:2], g, g), (f, x, g[:3], g), (f, x, g, g, g[:1])):
        with pytest.raises(ValueError, match="f and x need one shape"):
            lnr.norm_add_norm(*wrong)


class Block(torch.nn.Module):
    """A Peri-LN network of one sublayer, its boundary spelled as the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 5)
        self.g = torch.nn.Parameter(torch.rand(3, 8) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = self.up(F.rms_norm(x, (8,), self.g[0], 1e-6))
        _, z = lnr.norm_add_norm(f, x, self.g[1], self.g[2], eps_out=1e-6, eps_in=1e-6)
        return self.head(z)


def test_it_is_exported_as_the_operator_of_onnx(kernels: Path, tmp_path: Path) -> None:
    program = lnr.capture(Block(), kwargs={"x": torch.randn(2, 3, 8)})
    assert program.inspect()["placement"] == "peri"
    program.export(tmp_path / "m.onnx", target="cpu", fuse="custom")
    assert operators(tmp_path / "m.onnx")["NormAddNorm"] == 1


def test_on_a_gpu_it_is_one_operator() -> None:
    """No GPU is needed: only shapes are computed."""
    pytest.importorskip("triton")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        f, g = torch.empty(2, 3, 8, device="cuda"), torch.empty(8, device="cuda")
        seen: list[str] = []

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                seen.append(str(func))
                return func(*args, **(kwargs or {}))

        with Watch():
            h, z = lnr.norm_add_norm(f, f, g, g)
        assert h.shape == z.shape == f.shape and h.device.type == "cuda"
        assert "lnrewrite.norm_add_norm.default" in seen and not any("aten.add" in name for name in seen)
