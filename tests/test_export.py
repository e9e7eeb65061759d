"""Export as a user asks for it: every target and dtype, the proof, the report, the command line."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from click.testing import CliRunner

import lnrewrite as lnr
import zoo
from lnrewrite.cli import main
from lnrewrite.export import writer as exporting
from lnrewrite.models.program import Program
from tiers import rows

Programs = dict[str, Program]
pytestmark = pytest.mark.usefixtures("onnx_once", "demo_captured_once")


@pytest.fixture(scope="module")
def programs() -> Programs:
    return {name: zoo.program(name, depth=1) for name in ("gpt2", "gemma2")}


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


FILES = list(product(("cpu", "cuda", "tensorrt", "generic"), ("fp32", "fp16")))


@pytest.mark.parametrize(("target", "dtype"), rows(FILES, sample=FILES[::3]))
def test_every_norm_has_a_form_and_a_reason(programs: Programs, target: str, dtype: str, tmp_path: Path) -> None:
    for name, program in programs.items():
        report = program.export(tmp_path / "m.onnx", target=target, dtype=dtype, optimize="none")
        assert report.norms is not None and report.proof is not None
        assert len(report.norms) == program.inspect()["norms"]["total"]
        assert all(row.site and row.why for row in report.norms)
        assert report.proof["max_rel"] <= (2e-5 if dtype == "fp32" else 2e-2)
        rows, tokens = zip(*report.proof["shapes_tried"], strict=True)
        assert len(set(rows)) > 1 and len(set(tokens)) > 1
        forms, counts = Counter(row.form for row in report.norms), operators(tmp_path / "m.onnx")
        assert all(counts[form] == count for form, count in forms.items() if form != "decomposed")
        if target in ("tensorrt", "generic"):
            onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)
        if target == "cuda":
            assert sum(form.startswith("Skip") * n for form, n in forms.items()) == (3 if name == "gpt2" else 2)
        if dtype == "fp16":
            held = onnx.load(tmp_path / "m.onnx").graph
            assert {v.type.tensor_type.elem_type for v in held.output} == {onnx.TensorProto.FLOAT16}


def test_what_is_left_decomposed_is_listed_with_the_reason(tmp_path: Path) -> None:
    class Kept(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.batch, self.layer = torch.nn.BatchNorm1d(6), torch.nn.LayerNorm(8)
            self.gain = torch.nn.Parameter(torch.rand(8))
            self.register_buffer("size", torch.rand(8))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            odd, length = (
                x / (x.abs().mean(-1, keepdim=True) + 1e-5) * self.gain,
                torch.nn.functional.normalize(x, dim=-1),
            )
            tanh = torch.tanh(x * 0.3) * self.gain
            return self.batch(x), self.layer(x), x / (self.size + 1e-5).sqrt(), length, odd, tanh

    program = lnr.capture(Kept().eval(), (torch.randn(2, 6, 8),))
    report = program.export(tmp_path / "m.onnx", target="cpu", optimize="none")
    rows = {row.form: row.why for row in report.norms or () if row.form != "decomposed"}
    assert set(rows) == {"BatchNormalization", "LayerNormalization"}
    left = [row.why for row in report.norms or () if row.form == "decomposed"]
    assert len(left) == 4 and [why.split(":")[0] for why in left if "LN205" in why] == ["LN205"]
    assert all(any(said in why for why in left) for said in ("kind l2", "kind dynamic_tanh", "no statistics of the"))
    assert "4 left decomposed" in str(report) and all(why[:40] in str(report) for why in left)
    assert [row["why"] for row in report.to_dict()["norms"] if row["form"] == "decomposed"] == left


def test_bf16_is_written_and_proved_as_far_as_the_cpu_goes(programs: Programs, tmp_path: Path) -> None:
    report = programs["gemma2"].export(tmp_path / "m.onnx", target="cuda", dtype="bf16", optimize="none")
    kinds = {i.data_type for i in onnx.load(tmp_path / "m.onnx").graph.initializer}
    assert onnx.TensorProto.BFLOAT16 in kinds
    assert report.proof is not None and report.proof["max_rel"] < 0.1


def test_the_rest_of_the_graph_is_fused_for_cuda(programs: Programs, tmp_path: Path) -> None:
    report = programs["gpt2"].export(tmp_path / "m.onnx", target="cuda")
    counts = operators(tmp_path / "m.onnx")
    assert counts["Attention"] == 1 and counts["SkipLayerNormalization"] == 3 and not counts["Softmax"]
    assert "attention: 1 Attention" in report.notes
    names = {i.name for i in onnx.load(tmp_path / "m.onnx").graph.initializer}
    assert "transformer.h.0.attn.c_attn.weight" in names


def test_operators_that_cuda_lacks_are_named(tmp_path: Path) -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.up(self.norm(x)).atan()

    program = lnr.capture(Odd(), (torch.randn(2, 5, 8),))
    assert any("1 Atan" in note for note in program.export(tmp_path / "m.onnx", target="cuda").notes)
    assert not any("Atan" in note for note in program.export(tmp_path / "m.onnx", target="cpu").notes)


def test_fusions_that_raise_or_change_numbers_are_dropped(monkeypatch: Any) -> None:
    from lnrewrite.export import fusions as rest

    def raises(model: ir.Model) -> None:
        raise IndexError("pop from empty list")

    def changes(model: ir.Model) -> None:
        next(n for n in model.graph if n.op_type == "Relu").op_type = "FastGelu"
        next(n for n in model.graph if n.op_type == "FastGelu").domain = "com.microsoft"

    def undoes(model: ir.Model) -> None:
        next(n for n in model.graph if n.op_type == "LayerNormalization").op_type = "Identity"

    monkeypatch.setattr(rest, "GROUPS", {"bad": raises, "worse": changes, "worst": undoes})
    monkeypatch.setattr(rest, "FOR", {"cuda": ("bad", "worse", "worst")})
    text = """<ir_version: 8, opset_import: ["" : 18]> g (float[n,4] x) => (float[n,4] y)
    <float[4] w = {1, 1, 1, 1}> { u = LayerNormalization <axis = -1> (x, w) y = Relu (u) }"""
    model = ir.from_onnx_text(text)
    made, notes = rest.fuse_groups(model, "cuda", lambda made: "it is 0.3 off")
    assert made is model
    assert ["IndexError" in notes[0], "0.3 off" in notes[1], "LayerNormalization" in notes[2]] == [True] * 3


def test_a_file_that_fails_its_proof_is_not_kept(programs: Programs, tmp_path: Path, monkeypatch: Any) -> None:
    def spoiled(model: ir.Model, *args: Any) -> list[Any]:
        norm = next(n for n in model.graph if n.op_type == "LayerNormalization")
        norm.attributes["epsilon"] = ir.AttrFloat32("epsilon", 3.0)
        return []

    monkeypatch.setattr(exporting, "lower", spoiled)
    with pytest.raises(lnr.LnrewriteError) as error:
        programs["gpt2"].export(tmp_path / "m.onnx")
    assert error.value.code == "LN403" and not list(tmp_path.iterdir())
    programs["gpt2"].export(tmp_path / "m.onnx", verify=False)
    assert (tmp_path / "m.onnx").exists()


@pytest.mark.exhaustive
def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        module, inputs = zoo.build("pre rms")
        program = lnr.capture(module, kwargs=inputs)
        program.export(tmp_path / f"{name}.onnx", target="cpu")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ({"target": "gpu"}, "LN003"),
        ({"dtype": "int8"}, "LN003"),
        ({"opset": 12}, "LN503"),
        ({"optimize": "x"}, "LN003"),
    ],
)
def test_wrong_words(programs: Programs, how: dict[str, Any], code: str, tmp_path: Path) -> None:
    with pytest.raises(lnr.LnrewriteError) as error:
        programs["gpt2"].export(tmp_path / "m.onnx", **how)
    assert error.value.code == code and not list(tmp_path.iterdir())


def lnrewrite(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(main, list(arguments))
    return done.exit_code, done.stdout, done.stderr


def test_the_command_line_from_a_model_to_a_timed_file(tmp_path: Path) -> None:
    """convert to ONNX in one go, inspect and opt the file, export it for a target, verify, bench."""
    peri, folded, cpu = (str(tmp_path / f"{name}.onnx") for name in ("peri", "folded", "cpu"))
    data = "lnrewrite.demo:calibration"
    code, out, err = lnrewrite(
        "convert", "zoo:short_gpt", "--to", "peri", "-o", peri, "--calibrate", data, "--fit", "constants", "--json"
    )
    assert code == 0 and json.loads(out)["placement_after"] == "peri", err
    code, out, _ = lnrewrite("inspect", peri, "--json")
    assert code == 0 and json.loads(out)["placement"] == "peri" and json.loads(out)["format"] == "onnx"
    code, out, err = lnrewrite("opt", peri, "--passes", "fold-affine", "-o", folded, "--json", "--partial")
    assert code == 0 and json.loads(out)["steps"][0]["edits"] == 4, err
    code, out, err = lnrewrite("verify", peri, folded, "--json")
    assert code == 0 and json.loads(out)["dtype"] == "float64", err
    code, out, err = lnrewrite("export", folded, "-o", cpu, "--target", "cpu", "--json")
    assert code == 0 and {"site", "form", "why"} == json.loads(out)["norms"][0].keys(), err
    code, out, err = lnrewrite("bench", peri, cpu, "--rounds", "2", "--json")
    found = json.loads(out)
    assert code == 0 and [row["path"] for row in found["models"]] == [peri, cpu], err
    assert lnrewrite("bench", peri, cpu, "--rounds", "1")[1].count("\n") == 5


@pytest.mark.exhaustive
def test_no_verify_is_loud_and_pt2_is_not_made_of_onnx(tmp_path: Path) -> None:
    path = str(tmp_path / "m.onnx")
    code, _, err = lnrewrite("export", "demo:tinygpt", "-o", path, "--target", "generic", "--no-verify", "-q")
    assert code == 0 and "not verified" in err
    code, _, err = lnrewrite("opt", path, "--passes", "fold-affine", "-o", str(tmp_path / "m.pt2"))
    assert code == 1 and "LN032" in err


def test_a_torch_module_is_called_like_its_onnx_file(programs: Programs, tmp_path: Path) -> None:
    programs["gpt2"].save(tmp_path / "m.onnx")
    ids = torch.randint(0, 60, (4, 7))
    onnx_program = lnr.load(str(tmp_path / "m.onnx"))
    a, b = programs["gpt2"].module()(input_ids=ids)["logits"], onnx_program.module()(input_ids=ids)["logits"]
    assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
