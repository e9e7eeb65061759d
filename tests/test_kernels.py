"""The kernels of the boundary: every level of CPU instructions, and Triton's interpreter, against float64; building."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner

import lnrewrite as lnr
from lnrewrite.cli import main
from lnrewrite.kernels import building
from tiers import rows

SIZES = (1, 7, 64, 768, 1000, 8193)
TYPES = {"float": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ULP = {"float": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="session", params=rows(["best", "v3", "base"], sample=["best"]))
def library(request: pytest.FixtureRequest, built: Callable[[str], Path]) -> Path:
    """Build the library with all levels of instructions compiled as one of them (`best`: as they are)."""
    return built(request.param)


def model(dtype: str, norm: str, biases: bool, both: bool, op: str = "") -> bytes:
    """Write a model of one operator between casts from and to float, which numpy has, or of what it stands for."""
    names = ["f", "x", "g_out", *(["g_in"] if both else [])] + [n for n in ("b_out", "b_in")[: 1 + both] if biases]
    outs = ["h", "z"][: 1 + both]
    casts = "\n".join(f"{n}_ = Cast<to={onnx.TensorProto.DataType.Value(dtype.upper())}>({n})" for n in names)
    given = ", ".join(f"{n}_" for n in names)
    inner = ", ".join(f"{n}_" for n in outs)
    if op:
        body = op
    else:
        eps = "eps_out=1e-6, eps_in=1e-6" if both else "eps_out=1e-6"
        name = "NormAddNorm" if both else "NormAdd"
        body = f"{inner} = lnrewrite.{name}<{eps}, layernorm={int(norm == 'layer')}>({given})"
    back = "\n".join(f"{n} = Cast<to=1>({n}_)" for n in outs)
    shapes = ", ".join(f"float[{'a,b,c' if n in 'fx' else 'c'}] {n}" for n in names)
    results = ", ".join(f"float[a,b,c] {n}" for n in outs)
    head = '<ir_version: 9, opset_import: ["" : 18, "lnrewrite" : 1]>'
    text = f"{head} g ({shapes}) => ({results}) {{ {casts} {body} {back} }}"
    return onnx.parser.parse_model(text).SerializeToString()


def unfused(norm: str, biases: bool) -> str:
    name = "LayerNormalization" if norm == "layer" else "SimplifiedLayerNormalization"
    b_out, b_in = (", b_out_", ", b_in_") if biases else ("", "")
    return f"p_ = {name}<epsilon=1e-6>(f_, g_out_{b_out}) h_ = Add(p_, x_) z_ = {name}<epsilon=1e-6>(h_, g_in_{b_in})"


def session(content: bytes, library: Path, threads: int = 2) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def drawn(width: int, dtype: str, biases: bool, both: bool, rows: tuple[int, int] = (3, 5)) -> Arrays:
    random = np.random.default_rng(width)
    found = {n: random.standard_normal((*rows, width)) for n in "fx"}
    found |= {f"g_{e}": 1 + 0.3 * random.standard_normal(width) for e in ("out", "in")[: 1 + both]}
    found |= {f"b_{e}": random.standard_normal(width) for e in ("out", "in")[: 1 + both] if biases}
    return {n: v.astype(TYPES[dtype]).astype(np.float32) for n, v in found.items()}


def exact(a: Arrays, dtype: str, norm: str) -> list[np.ndarray]:
    """Compute the boundary in float64, rounded where the unfused operators round."""
    wide = {n: v.astype(np.float64) for n, v in a.items()}

    def rounded(v: np.ndarray) -> np.ndarray:
        return v.astype(TYPES[dtype]).astype(np.float64)

    def normed(v: np.ndarray, end: str) -> np.ndarray:
        v = v - v.mean(-1, keepdims=True) if norm == "layer" else v
        v = v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-6) * wide[f"g_{end}"]
        return rounded(v + wide.get(f"b_{end}", 0.0))

    h = rounded(normed(wide["f"], "out") + wide["x"])
    return [h, normed(h, "in")] if "g_in" in wide else [h]


@pytest.mark.parametrize("both", [True, False], ids=["both norms", "one norm"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("dtype", TYPES)
def test_kernels_match_float64(library: Path, dtype: str, norm: str, both: bool) -> None:
    for biases in (True, False):
        runs = session(model(dtype, norm, biases, both), library)
        for width in SIZES:
            given = drawn(width, dtype, biases, both)
            for got, right in zip(runs.run(None, given), exact(given, dtype, norm), strict=True):
                scale = np.abs(right).max() + 1e-6
                assert np.abs(got - right).max() <= 3 * ULP[dtype] * scale, (biases, width)
                if dtype != "float" and width >= 64:  # rounded where the operators round: nearly all bits are the same
                    assert (got != right).mean() < 0.02, (biases, width)


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_nan_and_infinity_go_where_the_operators_take_them(library: Path, dtype: str, norm: str) -> None:
    biases = norm == "layer"  # ONNX Runtime's RMSNorm has none
    ours = session(model(dtype, norm, biases, True), library)
    theirs = session(model(dtype, norm, biases, True, op=unfused(norm, biases)), library)
    bad = [np.nan, np.inf, -np.inf, 3e38, 6e4, 1e-40, 6e-8]
    for index, (value, where) in enumerate(itertools.product(bad, ("f", "x", "g_out", "g_in"))):
        given = drawn(70, "float", biases, True)
        given[where][..., index % 70] = value
        with np.errstate(over="ignore"):
            given = {n: v.astype(TYPES[dtype]).astype(np.float32) for n, v in given.items()}
        for got, right in zip(ours.run(None, given), theirs.run(None, given), strict=True):
            assert (np.isnan(got) == np.isnan(right)).all(), (value, where)
            assert (np.isinf(got) * np.sign(got) == np.isinf(right) * np.sign(right))[~np.isnan(got)].all()
            there = np.isfinite(right)
            largest = np.where(there, np.abs(right), 0).max(-1, keepdims=True) + 1e-6
            assert (np.abs(got - right) <= 8 * ULP[dtype] * largest)[there].all(), (value, where)


def test_halves_convert_as_numpy_does_for_every_value(library: Path) -> None:
    every = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    every = every[np.isfinite(every)].reshape(1, -1, 64)
    given = {"f": np.zeros_like(every), "x": every, "g_out": np.ones(64, np.float32)}  # norm(0) = 0: h is x
    (h,) = session(model("float16", "rms", False, False), library).run(None, given)
    assert np.array_equal(h, every)


def test_threads_change_no_bit(library: Path) -> None:
    given = drawn(1000, "float", True, True, rows=(4, 75))
    content = model("float", "layer", True, True)
    one, four = (session(content, library, threads).run(None, given) for threads in (1, 4))
    assert all(np.array_equal(a, b) for a, b in zip(one, four, strict=True))


def test_what_does_not_fit_is_refused(library: Path) -> None:
    runs = session(model("float", "rms", False, True), library)
    for name, size, message in (("x", (3, 4, 8), "x needs the shape"), ("g_in", 9, "gains and biases need")):
        given = drawn(8, "float", False, True) | {name: np.ones(size, np.float32)}
        options = onnxruntime.RunOptions()
        options.log_severity_level = 4
        with pytest.raises(Exception, match=message):
            runs.run(None, given, options)
    empty = {n: v[:0] if n in "fx" else v for n, v in drawn(8, "float", False, True).items()}
    assert [v.shape for v in runs.run(None, empty)] == [(0, 5, 8)] * 2


# ---- building ----


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LNREWRITE_KERNELS", raising=False)
    yield tmp_path / "lnrewrite"


def test_the_command_builds_where_sessions_look(cache: Path) -> None:
    done = CliRunner().invoke(main, ["kernels", "build", "--no-cuda", "--json"])
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)
    assert Path(row["library"]).parent == cache and row["nvcc"] is None
    assert [p.name for p in cache.iterdir()] == [building.place().name], "nothing else is left behind"


@pytest.mark.parametrize(
    ("compiler", "why"),
    [("no-such-compiler", "no-such-compiler of CXX is found"), ("broken", "cpu_rows.cc: error: not today")],
)
def test_a_compiler_that_lacks_or_fails(cache: Path, compiler: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = cache.parent / "broken"
    broken.write_text("#!/bin/sh\necho 'cpu_rows.cc: error: not today' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken) if compiler == "broken" else compiler)
    done = CliRunner().invoke(main, ["kernels", "build"])
    assert done.exit_code == 1 and done.output.startswith("error: LN531") and why in done.output
    assert not cache.exists() or not list(cache.iterdir())


def test_cuda_that_is_asked_for_needs_nvcc(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(cache))
    done = CliRunner().invoke(main, ["kernels", "build", "--cuda"])
    assert done.exit_code == 1 and "LN531 nvcc: it is not found" in done.output


def test_a_file_in_the_way(cache: Path) -> None:
    cache.write_text("no folder")
    done = CliRunner().invoke(main, ["kernels", "build", "--no-cuda"])
    assert done.exit_code == 1 and done.output.startswith("error: LN025") and done.output.count("\n") == 1


def test_a_library_that_does_not_load(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.onnx").write_bytes(model("float", "rms", False, True))
    (tmp_path / "broken.so").write_text("not a library")
    with pytest.raises(lnr.LnrewriteError, match="LN530.*lnrewrite kernels build"):
        lnr.session(tmp_path / "model.onnx")
    monkeypatch.setenv("LNREWRITE_KERNELS", str(tmp_path / "broken.so"))
    with pytest.raises(lnr.LnrewriteError, match="LN530.*does not load"):
        lnr.session(tmp_path / "model.onnx")
    monkeypatch.setenv("LNREWRITE_KERNELS", str(tmp_path / "none.so"))
    with pytest.raises(lnr.LnrewriteError, match="LN530.*does not exist"):
        lnr.session(tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.exhaustive
def test_cuda_compiles_without_warnings(tmp_path: Path) -> None:
    built = building.build(tmp_path / "kernels.so", cuda=True, strict=True)
    assert built.nvcc is not None and built.library.is_file()
    assert building.ARCHITECTURES == (80, 90)
    runs = session(model("float", "rms", False, True), built.library)  # it loads and runs where there is no GPU
    assert len(runs.run(None, drawn(8, "float", False, True))) == 2


INTERPRETED = """
import itertools, torch
from lnrewrite.kernels.triton_rows import launch, rows

for dtype, layer, biases, width in itertools.product(
    (torch.float32, torch.float16, torch.bfloat16), (True, False), (True, False), (1, 7, 64, 768, 1000, 8193)
):
    torch.manual_seed(width)
    f, x = torch.randn(2, 3, 1, width).to(dtype)
    g, b = (1 + 0.3 * torch.randn(2, width)).to(dtype), torch.randn(2, width).to(dtype) if biases else (None, None)
    rounded = lambda v: v.to(dtype).double()

    def normed(v, gain, bias):
        v = v - v.mean(-1, keepdim=True) if layer else v
        v = v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain.double()
        return rounded(v if bias is None else v + bias.double())

    h = rounded(normed(f.double(), g[0], b[0]) + x.double())
    right = h, normed(h, g[1], b[1])
    for got, want in zip(launch(rows, f, x, *g, *b, 1e-6, 1e-6, layer), right):
        wrong = (got.double() - want).abs().max()
        assert wrong <= 3 * torch.finfo(dtype).eps * (want.abs().max() + 1e-6), (dtype, layer, biases, width, wrong)
        assert dtype != torch.float16 or width < 64 or (got.double() != want).double().mean() < 0.02
print("same")
"""


@pytest.mark.exhaustive
def test_triton_matches_float64_in_its_interpreter() -> None:
    """bfloat16 to 3 units in the last place: the interpreter cuts off what a GPU rounds."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=environment)
    assert done.stdout == "same\n", done.stderr
