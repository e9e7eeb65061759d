"""Exports with weights in few bits: products are quantized, all else is proved first, and the loss is the file's."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
from torch import nn

import lnrewrite as lnr
import zoo
from commands import fails, ok
from lnrewrite.backends.onnx.file import read
from lnrewrite.backends.onnx.session import runnable
from lnrewrite.comparison.verifying import measured
from lnrewrite.export import writer
from lnrewrite.export.quantizing import COUNTED, DRAWS, KINDS
from lnrewrite.ir import Exactness
from lnrewrite.models.decoder import decoder
from test_serving import PROMPT, checkpoint

__all__ = ["checkpoint"]
FORMS = [("int4", "cpu", "fp32"), ("int4", "cuda", "fp16"), ("int8", "cpu", "fp32")]


def counts(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


@pytest.mark.parametrize(("kind", "target", "dtype"), FORMS)
def test_loss(tmp_path: Path, kind: str, target: str, dtype: str) -> None:
    """Each product with weights is quantized, norms and attention stay, and the file loses what the report says."""
    held, handlers = decoder(zoo.build("llama", head=True)[0]), list(logging.root.handlers)
    report = held.export(path := tmp_path / "small.onnx", target=target, dtype=dtype, quantize=kind)
    held.export(plain := tmp_path / "plain.onnx", target=target, dtype=dtype)
    assert logging.root.handlers == handlers, "the quantizer's logs go on where lnrewrite's are asked for"
    made, before = counts(path), counts(plain)
    assert made[COUNTED[kind]] == before["MatMul"] == 11 and not made["MatMul"]
    kept = {op: n for op, n in before.items() if "Norm" in op or "Attention" in op}
    assert kept == {op: made[op] for op in kept}
    assert path.stat().st_size < 0.6 * plain.stat().st_size
    batches = [batch for seed in range(DRAWS) for batch in held.trials(seed)]
    loss = measured(held, runnable(read(path, "small")), batches, held_out=True)
    assert report.measured is not None and report.measured.relative_error == pytest.approx(
        loss.relative_error, rel=1e-3
    )
    assert 1e-4 < (loss.relative_error or 0) < 0.3 and (loss.kl or 0) > 0
    assert report.exactness is Exactness.CALIBRATED and report.proved is None
    assert any("first that differs" in note or "generates the same" in note for note in report.notes)
    assert any(f"11 products by {COUNTED[kind]}, 0 more" in note for note in report.notes)


@pytest.mark.parametrize("kind", KINDS)
def test_command(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    """The command writes a folder that generates; a folder of ONNX files is quantized too."""
    ok("export", checkpoint, "-o", plain := tmp_path / "plain", "--target", "cpu")
    for source, folder in ((checkpoint, tmp_path / "small"), (plain, tmp_path / "again")):
        told = json.loads(ok("export", source, "-o", folder, "--target", "cpu", f"--{kind}", "--json").stdout)
        assert told["drift"]["data"] == "synthetic" and told["drift"]["kl"] > 0
        row = json.loads(ok("generate", folder, PROMPT, "--max-new-tokens", 4, "--engine", "session", "--json").stdout)
        assert len(row["tokens"]) == 4


def test_without_a_cache(tmp_path: Path) -> None:
    """Linear layers whose weights stand transposed are products too; of those with a bias, Gemm stays as it is."""
    program = lnr.capture(zoo.build("bert")[0], kwargs=zoo.build("bert")[1])
    report = program.export(path := tmp_path / "bert.onnx", target="cpu", quantize="int4")
    assert counts(path)["MatMulNBits"] == 12
    assert any("12 products by MatMulNBits, 1 more" in note for note in report.notes), report.notes


@pytest.mark.exhaustive
def test_parts(tmp_path: Path) -> None:
    """Every part of an encoder and its decoder is quantized; how far they generate alike is told, not judged."""
    report = lnr.export_model(
        zoo.build("t5", 1, head=True)[0], folder := tmp_path / "t5", target="cpu", quantize="int4"
    )
    assert all(counts(path)["MatMulNBits"] for path in folder.glob("*.onnx"))
    assert report.measured is not None
    assert any("differs" in note or "generates the same" in note for note in report.notes)


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets and types without such operators, models without such products; and what was wrong before."""
    for more in (("tensorrt", "--int4"), ("cuda", "--int8"), ("cpu", "--int8", "--dtype", "fp16")):
        assert (
            "give"
            in fails("LN003", 2, "export", "demo:tinygpt", "-o", tmp_path / "x.onnx", "--target", *more)["remedy"]
        )
    fails("LN003", 2, "export", "demo:tinygpt", "-o", tmp_path / "x.onnx", "--target", "cpu", "--int4", "--int8")
    none: Any = lnr.capture(nn.Sequential(nn.LayerNorm(8), nn.GELU()), args=(zoo.torch.randn(2, 3, 8),))
    with pytest.raises(lnr.LnrewriteError, match="LN502.*no product"):
        none.export(tmp_path / "x.onnx", target="cpu", quantize="int4")
    with pytest.raises(lnr.LnrewriteError, match="LN003"):
        none.export(tmp_path / "x.onnx", target="cpu", quantize="int3")
    monkeypatch.setattr(writer, "wrong", lambda *_: "it is wrong")
    with pytest.raises(lnr.LnrewriteError, match="LN403.*before it is quantized"):
        lnr.load("demo:tinygpt").export(tmp_path / "x.onnx", target="cpu", optimize="none", quantize="int4")
    assert not list(tmp_path.iterdir())
