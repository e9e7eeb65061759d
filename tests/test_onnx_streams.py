"""One model, two ways in: lifted from torch and from its ONNX export it is the same picture; edits agree too."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils._pytree import tree_leaves

import lnrewrite as lnr
import zoo
from lnrewrite.backends.onnx.lift import lift
from lnrewrite.detect.detection import detect
from lnrewrite.ir import text
from lnrewrite.models.onnx_program import OnnxProgram
from tiers import rows

FAMILIES = (
    "gpt2", "bert", "llama", "opt", "gpt_neox", "vit", "phi3", "qwen3", "olmo2", "cohere", "modernbert", "gemma2",
    "glm4",
)  # fmt: skip


FORMS = [*((f, 18) for f in FAMILIES), *((f, 23) for f in FAMILIES[:3])]


@pytest.mark.parametrize(("family", "opset"), rows(FORMS, sample=(("bert", 23),)))
def test_the_onnx_export_gives_the_same_stream_text(family: str, opset: int) -> None:
    program = zoo.program(family, depth=1)
    picture = text.render(detect(lift(program.to_onnx(opset))).network)
    assert _folded(picture) == _folded(text.render(program.network))


def _folded(picture: str) -> str:
    """Forget the form of gains: 1 + w is a constant in ONNX."""
    return picture.replace("gamma=1+@", "gamma=@").replace("_plus_one", "")


CONVERTED = ("gpt2", "norm over axis 1", "llama", "bert", "gemma2")


@pytest.mark.parametrize("family", rows(CONVERTED, sample=CONVERTED[1:2]))
def test_conversions_on_either_side_agree(family: str, tmp_path: Path) -> None:
    program, inputs = zoo.captured(family, depth=1)
    program.export(tmp_path / "m.onnx", target="cuda", optimize="none")
    onnx = lnr.load(str(tmp_path / "m.onnx"))
    batches = [{k: v.roll(i, -1) for k, v in inputs.items()} for i in range(4)]
    for to in ("pre", "post", "peri", "output"):
        pipeline = lnr.Pipeline.parse(f"place{{to={to} fit=constants}}")
        one, two = pipeline.run(program, batches), pipeline.run(onnx, batches)
        assert one.report.placement_after == two.report.placement_after == to
        a, b = (tree_leaves(p.program.module()(**batches[0]))[0] for p in (one, two))
        assert (a - b).abs().max() <= 1e-5 * a.abs().max()
    two.program.save(tmp_path / "output.onnx")
    again = lnr.load(str(tmp_path / "output.onnx"))
    assert again.inspect()["placement"] == "output"
    assert again.model.metadata_props["lnrewrite.pipeline"] == "place{to=output fit=constants}"


EXACT = {
    "fold": "canonicalize,fold-affine{final=true}",
    "to RMSNorm": "absorb-scales,layernorm-to-rmsnorm",
    "rescale": "rescale-stream{by=0.25}",
    "quantize": str(lnr.Pipeline.preset("quantize")),
}


@pytest.mark.parametrize(
    "family", rows([*CONVERTED[:3], "bloom", "opt", "cohere", "dinov2", "vit", "granite"], sample=[])
)
def test_exact_passes_give_the_same_on_either_side(family: str, tmp_path: Path) -> None:
    """Edits are computed in float64 and stored in float32, whose rounding is all that may differ."""
    program = zoo.program(family, depth=1)
    program.export(tmp_path / "m.onnx")
    onnx = lnr.load(str(tmp_path / "m.onnx"))
    for name, steps in EXACT.items():
        pipeline = lnr.Pipeline.parse(steps)
        one, two = pipeline.run(program, partial=True), pipeline.run(onnx, partial=True)
        assert one.report.edits == two.report.edits, name
        assert [(r.code, r.site) for r in one.report.refusals] == [(r.code, r.site) for r in two.report.refusals], name
        two.program.save(tmp_path / "edited.onnx")
        edited = lnr.load(str(tmp_path / "edited.onnx"))
        assert lnr.verify(onnx, edited)["max_rel"] < 2e-6, name
        assert lnr.verify(one.program, edited)["max_rel"] < 2e-6, name
        assert kinds(edited) == kinds(one.program), name


def kinds(program: lnr.Program | OnnxProgram) -> list[str]:
    """Return the kinds of norms in blocks and at the end. A mean taken off before an RMSNorm is a LayerNorm again."""
    (stream,) = program.inspect()["streams"]
    norms = [norm for block in stream["blocks"] for norm in block["norms"]]
    return [norm["kind"] for norm in (*norms, stream["final_norm"]) if norm]
