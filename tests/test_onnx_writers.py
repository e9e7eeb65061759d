"""ONNX files of other writers: looked at, rewritten and exported rightly, or refused in words, and never a crash."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import lnrewrite as lnr
from tiers import rows
from zoo.norms import randomise

WIDTH, HEADS, BLOCKS = 24, 2, 4


class Root(nn.Module):
    """An RMSNorm in words that every exporter has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Net(nn.Module):
    """Attention and an MLP in turns, pre or post, of any batch and length."""

    def __init__(self, norm: type[nn.Module], post: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm() for _ in range(BLOCKS + 1))
        self.maps = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(BLOCKS))
        self.out = nn.ModuleList(nn.Linear(WIDTH * (1 if i % 2 == 0 else 3), WIDTH) for i in range(BLOCKS))
        self.first, self.head, self.post = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 7), post

    def branch(self, i: int, x: Tensor) -> Tensor:
        y = self.maps[i](x)
        if i % 2:
            return self.out[i](torch.relu(y))
        q, k, v = (t.reshape(x.shape[0], -1, HEADS, WIDTH // HEADS).transpose(1, 2) for t in y.chunk(3, -1))
        weights = torch.softmax(q @ k.transpose(2, 3) * 0.3, -1)
        return self.out[i]((weights @ v).transpose(1, 2).reshape(x.shape[0], -1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i in range(BLOCKS):
            x = self.norms[i](x + self.branch(i, x)) if self.post else x + self.branch(i, self.norms[i](x))
        return self.head(x if self.post else self.norms[-1](x))


def traced(path: Path, opset: int, norm: Any = lambda: nn.LayerNorm(WIDTH), post: bool = False, **how: Any) -> None:
    """Write a net as torch's exporter by tracing does."""
    torch.manual_seed(0)
    axes = {"x": {0: "b", 1: "s"}, "y": {0: "b", 1: "s"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            randomise(Net(norm, post)).eval(), (torch.randn(2, 5, WIDTH),), str(path), dynamo=False,
            opset_version=opset, input_names=["x"], output_names=["y"], dynamic_axes=axes, **how,
        )  # fmt: skip


def optimised(path: Path, level: str) -> None:
    """Write what ONNX Runtime runs: its own operators, shapes folded."""
    traced(path, 14)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.optimized_model_filepath, options.log_severity_level = str(path), 4
    onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])


def dynamic(path: Path) -> None:
    """Write 8-bit products."""
    from onnxruntime.quantization import quantize_dynamic

    traced(source := path.with_suffix(".float.onnx"), 14)
    quantize_dynamic(str(source), str(path))


def half(path: Path) -> None:
    """Write a net in half precision between inputs and outputs of float32."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    traced(path, 14)
    onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=True), path)


def like_paddle(path: Path) -> None:
    """Write weights as Constant nodes behind Identity, free sizes as -1, and names that are paths."""
    traced(path, 11)
    model = onnx.load(path)
    held = list(model.graph.initializer)
    del model.graph.initializer[:]
    for tensor in reversed(held):
        constant = helper.make_node("Constant", [], [f"{tensor.name}/raw"], value=copy.deepcopy(tensor))
        same = helper.make_node("Identity", [f"{tensor.name}/raw"], [tensor.name])
        model.graph.node.insert(0, same)
        model.graph.node.insert(0, constant)
    for dim in model.graph.input[0].type.tensor_type.shape.dim[:2]:
        dim.dim_value = -1
    onnx.save(model, path)


def like_tf2onnx(path: Path) -> None:
    """Write norms as Keras has them, (x s + (b - m s)), and products of [-1, width]."""
    draw = np.random.default_rng(0)
    held = {"rows": np.array([-1, WIDTH]), "eps": np.float32(1e-3)}
    nodes, x, node = [], "x", helper.make_node
    for i in range(BLOCKS):
        n = f"model/block_{i}"
        scale = 1 / np.sqrt(WIDTH)
        held |= {f"{n}/{k}": draw.normal(size=WIDTH).astype(np.float32) for k in ("gamma", "beta", "bias")}
        held[f"{n}/kernel"] = (scale * draw.normal(size=(WIDTH, WIDTH))).astype(np.float32)
        nodes += [
            node("ReduceMean", [x], [f"{n}/mean"], axes=[-1], keepdims=1), node("Sub", [x, f"{n}/mean"], [f"{n}/sub"]),
            node("Mul", [f"{n}/sub", f"{n}/sub"], [f"{n}/SquaredDifference"]),
            node("ReduceMean", [f"{n}/SquaredDifference"], [f"{n}/variance"], axes=[-1], keepdims=1),
            node("Add", [f"{n}/variance", "eps"], [f"{n}/add"]), node("Sqrt", [f"{n}/add"], [f"{n}/sqrt"]),
            node("Reciprocal", [f"{n}/sqrt"], [f"{n}/Rsqrt"]), node("Mul", [f"{n}/Rsqrt", f"{n}/gamma"], [f"{n}/s"]),
            node("Mul", [x, f"{n}/s"], [f"{n}/xs"]), node("Mul", [f"{n}/mean", f"{n}/s"], [f"{n}/ms"]),
            node("Sub", [f"{n}/beta", f"{n}/ms"], [f"{n}/shift"]), node("Add", [f"{n}/xs", f"{n}/shift"], [f"{n}/ln"]),
            node("Reshape", [f"{n}/ln", "rows"], [f"{n}/flat"]),
            node("MatMul", [f"{n}/flat", f"{n}/kernel"], [f"{n}/m"]),
            node("Add", [f"{n}/m", f"{n}/bias"], [f"{n}/dense"]), node("Relu", [f"{n}/dense"], [f"{n}/act"]),
            node("Shape", [x], [f"{n}/shape"]), node("Reshape", [f"{n}/act", f"{n}/shape"], [f"{n}/Tensordot"]),
            node("Add", [x, f"{n}/Tensordot"], [y := "y" if i == BLOCKS - 1 else f"{n}/out:0"]),
        ]  # fmt: skip
        x = y
    shape = ["unk__1", "unk__2", WIDTH]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    arrays = [numpy_helper.from_array(np.asarray(a), n) for n, a in held.items()]
    graph = helper.make_graph(nodes, "tf2onnx", ends[:1], ends[1:], arrays)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7), path)


def simplified(path: Path, tool: str) -> None:
    """Write what a tool that simplifies makes, where it is installed."""
    module = pytest.importorskip(tool)
    traced(path, 14)
    model = onnx.load(path)
    onnx.save(module.slim(model) if tool == "onnxslim" else module.simplify(model)[0], path)


Write = Callable[[Path], None]
RIGHT: dict[str, tuple[Write, str, int, int]] = {
    **{f"opset {n}": (lambda path, n=n: traced(path, n), "pre", 5, 4) for n in (11, 12, 13, 14, 15, 16, 17)},
    "initializers are inputs": (
        lambda path: traced(path, 12, keep_initializers_as_inputs=True, do_constant_folding=False), "pre", 5, 4
    ),
    "root": (lambda path: traced(path, 13, Root), "pre", 5, 4),
    "post": (lambda path: traced(path, 14, post=True), "post", 4, 0),
    "basic": (lambda path: optimised(path, "ORT_ENABLE_BASIC"), "pre", 5, 4),
    "extended": (lambda path: optimised(path, "ORT_ENABLE_EXTENDED"), "pre", 5, 4),
    "paddle": (like_paddle, "pre", 5, 4),
    "half": (half, "pre", 5, 4),
    "onnxslim": (lambda path: simplified(path, "onnxslim"), "pre", 5, 4),
    "onnxsim": (lambda path: simplified(path, "onnxsim"), "pre", 5, 4),
}  # fmt: skip
"""Who writes a file, and what is in it: its placement, how many norms, and how many gains can be folded."""


def outputs(path: Path) -> np.ndarray:
    """Run a file at a size that it was not traced at."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    run = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).normal(size=(3, 7, WIDTH)).astype(np.float32)
    return np.asarray(run.run(None, {run.get_inputs()[0].name: x})[0])


@pytest.mark.parametrize("name", rows(RIGHT, sample=["opset 11", "extended"]))
def test_it_is_read_rewritten_and_exported(name: str, tmp_path: Path) -> None:
    """Norms and placement are found, gains are folded, and each norm of the export is one operator."""
    write, placement, norms, folds = RIGHT[name]
    write(path := tmp_path / "m.onnx")
    seen = lnr.load(path).inspect()
    assert (seen["placement"], seen["norms"]["total"]) == (placement, norms)
    wanted, bound = outputs(path), 5e-3 if name == "half" else 1e-5
    report = lnr.rewrite_file(path, "fold-affine", tmp_path / "folded.onnx", partial=True)
    assert sum(step.edits for step in report.steps) == folds
    report = lnr.load(path).export(tmp_path / "cpu.onnx", target="cpu")
    assert [row.form for row in report.norms or ()].count("decomposed") == 0
    for out in ("folded", "cpu"):
        assert np.abs(outputs(tmp_path / f"{out}.onnx") - wanted).max() <= bound * np.abs(wanted).max()


LEFT: dict[str, tuple[Write, str]] = {
    "tf2onnx": (like_tf2onnx, "LN205"),
    "opset 9": (lambda path: traced(path, 9), "LN027"),
}
"""Files that are left alone in part or refused, and the word that says so."""


@pytest.mark.parametrize("name", rows(LEFT, sample=["tf2onnx"]))
def test_what_is_not_done_is_said(name: str, tmp_path: Path) -> None:
    write, word = LEFT[name]
    write(path := tmp_path / "m.onnx")
    try:
        report = lnr.load(path).export(tmp_path / "cpu.onnx", target="cpu")
    except lnr.LnrewriteError as error:
        assert word in f"{error}"
        assert not (tmp_path / "cpu.onnx").exists()
    else:
        assert any(word in row.why for row in report.norms or ())
        wanted = outputs(path)
        assert np.abs(outputs(tmp_path / "cpu.onnx") - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_products_in_8_bits_keep_their_gains(tmp_path: Path) -> None:
    """Folding into weights that are quantized is refused, and the export is right."""
    dynamic(path := tmp_path / "m.onnx")
    report = lnr.rewrite_file(path, "fold-affine", tmp_path / "folded.onnx", partial=True)
    assert not sum(step.edits for step in report.steps)
    assert any("dynamicquantizelinear" in row.why for row in report.refusals)
    lnr.load(path).export(tmp_path / "cpu.onnx", target="cpu")
    wanted = outputs(path)
    assert np.abs(outputs(tmp_path / "cpu.onnx") - wanted).max() <= 2e-2 * np.abs(wanted).max()
