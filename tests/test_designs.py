"""Published designs: every norm is reported or noted, and nothing that is done to the nets is wrong or not a number.

docs/results/designs.md says what is seen of each and what becomes of it; `pytest tests/test_designs.py
--update-goldens` (in one process) writes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

import lnrewrite as lnr
import zoo
from lnrewrite.errors import Refusal
from lnrewrite.ir import Exactness
from lnrewrite.models.program import Program
from lnrewrite.pipeline import PRESETS, Pipeline
from tiers import rows
from zoo.designs import DESIGNS
from zoo.published import ALL, PUBLISHED

TABLE = Path(__file__).parents[1] / "docs" / "results" / "designs.md"
INTRO = """# Exact passes on published designs

What is seen of each design (the placements of its blocks, its norms by kind, the codes of what is told of it), what the
preset `inference` does (edits, and the codes of what was refused; `lnrewrite explain CODE`), and which norms are left.
`-`: nothing. Every result is within 1e-9 of the model, relative, in float64.

```sh
python -m pytest tests/test_designs.py -m exhaustive -n 0 --update-goldens
```

| design | placements | norms | told | inference | left |
|---|---|---|---|---|---|
"""
RIGHT = 1e-9
PLACES = [f"place{{to={to}}}" for to in ("pre", "post", "peri", "output", "none")]
BEHIND = ("place{to=mix}", "norm-writers", "scale-norms", "crmsnorm-to-rmsnorm")
TEXTS = {name: text for name, (_, text) in PRESETS.items()} | {text: text for text in (*PLACES, *BEHIND)}
SEEN = ("Derf", "SeeDNorm", "EvoNorm-S0", "NormFormer with ResScale")
MADE = [
    ("CRMSNorm", "crmsnorm-to-rmsnorm"), ("TaperNorm at its end, the gate first", "inference"),
    ("Derf", PLACES[0]), ("SeeDNorm", "inference"), ("NormFormer with ResScale", PLACES[3]),
    ("PowerNorm with group scaling", PLACES[4]),
]  # fmt: skip


@cache
def captured(name: str) -> tuple[Program, tuple[torch.Tensor, ...]]:
    module, inputs = ALL[name].build()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    with zoo.float64():
        return lnr.capture(module.double(), inputs), inputs


def noted(program: Program) -> list[Refusal]:
    return [r for r in program.network.refusals if r.code == "LN205"]


@pytest.mark.parametrize("name", rows(DESIGNS | PUBLISHED, sample=SEEN))
def test_every_norm_is_reported_or_noted_where_it_is(name: str) -> None:
    design, program = ALL[name], captured(name)[0]
    assert Counter(program.inspect()["norms"]["kinds"]) == design.norms
    assert len(noted(program)) == design.noted
    assert not [r for r in program.network.refusals if r.code == "LN208"]  # what is seen has been tried
    if design.blocks is None:
        return
    said = " ".join(f"{r.why}," for r in noted(program))
    blocks = program.network.blocks
    assert len(blocks) == len(design.truth) and (blocks or len(program.network.refusals) > design.noted)
    for block, placement in zip(blocks, design.truth, strict=True):
        assert block.placement == placement or f"in block {block.name}," in said


CALLED = {
    "static hyper-connections": "static hyper-connections", "attention residuals": "attention residuals",
    "second skip (B2T)": "B2T", "residual and normed stream (ResiDual)": "ResiDual", "EvoNorm-B0": "EvoNorm-B0",
    "EvoNorm-S0": "EvoNorm-S0", "Region Norm": "Region Norm", "Global Response Norm": "Global Response Norm",
    "ELC-BERT, normed at its ends": "ELC-BERT", "DenseFormer over a stack": "DenseFormer", "MUDDFormer": "MUDDFormer",
    "MUDDFormer over a stack": "MUDDFormer",
}  # fmt: skip


@pytest.mark.parametrize("name", rows(CALLED, sample=("static hyper-connections",)))
def test_what_is_refused_is_called_by_its_name(name: str) -> None:
    assert any(CALLED[name] in refusal.why for refusal in captured(name)[0].network.refusals)


@pytest.mark.parametrize(("name", "text"), rows(product(ALL, TEXTS), sample=MADE))
def test_nothing_made_of_it_is_wrong(name: str, text: str) -> None:
    program, inputs = captured(name)
    with zoo.float64():
        want = zoo.floats(program.module()(*inputs))
        result = Pipeline.parse(TEXTS[text]).run(program, partial=True)
        got = zoo.floats(result.program.module()(*inputs))
    exact = result.report.exactness < Exactness.CALIBRATED
    for a, b in zip(want, got, strict=True):
        assert torch.isfinite(b).all()
        assert not exact or (a - b).abs().max() <= RIGHT * a.abs().max()
    said = result.report.edits or result.report.refusals or text not in PLACES
    assert said or all(f"to={b.placement}}}" in text for b in program.network.blocks)
    assert not [r for r in result.report.refusals if r.code == "LN404"]
    assert not noted(program) or [n for n in result.report.notes if "LN205" in n]


@pytest.mark.parametrize("name", rows(("PowerNorm", "RepBN", "SimpleRMSNorm"), sample=("PowerNorm",)))
def test_what_is_said_to_run_first_lets_a_norm_move(name: str) -> None:
    program, _ = captured(name)
    with zoo.float64():
        told = {r.remedy for r in Pipeline.parse(PLACES[4]).run(program, partial=True).report.refusals}
        (first,) = {remedy.removeprefix("run ").removesuffix(" first") for remedy in told}
        report = Pipeline.parse(f"{first},{PLACES[4]}").run(program).report
    assert report.placement_after == "none"


THERE = [("crmsnorm-to-rmsnorm", "rms"), ("crmsnorm-to-rmsnorm{back=true}", "crms")]


@pytest.mark.parametrize(("text", "there"), THERE)
def test_compressed_norms_there_and_back(text: str, there: str, tmp_path: Path) -> None:
    """In PyTorch and in ONNX; what is written is read back as what it is."""
    program, inputs = captured("CRMSNorm")
    with zoo.float64():
        back = Pipeline.parse("crmsnorm-to-rmsnorm,fold-affine{final=true}").run(program).program
        found = Pipeline.parse(text).run(back if there == "crms" else program)
        want, got = (zoo.floats(p.module()(*inputs)) for p in (program, found.program))
    assert kinds(found.program) == f"{there}*5" and found.report.exactness is Exactness.ALGEBRAIC
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    module, inputs = ALL["CRMSNorm"].build()
    lnr.capture(module, inputs).export(tmp_path / "m.onnx", optimize="none")
    onnx = lnr.load(str(tmp_path / "m.onnx"))
    steps = ["crmsnorm-to-rmsnorm", "fold-affine{final=true}", text][: 3 if there == "crms" else 1]
    result = Pipeline.parse(",".join(steps)).run(onnx)
    assert kinds(result.program) == f"{there}*5"
    assert lnr.verify(onnx, result.program)["max_rel"] < 2e-6


@pytest.mark.parametrize("name", rows(ALL, sample=("Admin", "batch norm behind sums of tokens")))
def test_the_table_says_what_is_seen_and_made_of_it(name: str, update_goldens: bool) -> None:
    program, _ = captured(name)
    with zoo.float64():
        result = Pipeline.parse(TEXTS["inference"]).run(program, partial=True)
    left, report = result.program, result.report
    told, codes = ((r.code for r in rows) for rows in (program.network.refusals, report.refusals))
    done = f"{report.edits or ''} {spelled(codes)}".strip()
    seen = (zoo.spelled(zoo.placements(program.network)), kinds(program), spelled(told), done, kinds(left))
    row = " | ".join((f"| {name}", *(cell or "-" for cell in seen))) + " |"
    if update_goldens:
        held = {line.split(" | ")[0][2:]: line for line in written()} | {name: row}
        TABLE.write_text(INTRO + "".join(f"{held[n]}\n" for n in ALL if n in held))
    assert row in written()


def test_the_table_holds_every_design() -> None:
    assert [line.split(" | ")[0][2:] for line in written()] == list(ALL)


def written() -> list[str]:
    """Return the rows of the table."""
    return TABLE.read_text().removeprefix(INTRO).splitlines() if TABLE.exists() else []


def kinds(program: Program) -> str:
    """Return a program's norms by kind, as `rms*4 l2`."""
    return spelled(Counter(program.inspect()["norms"]["kinds"]).elements())


def spelled(names: Iterable[str]) -> str:
    """Return names with their numbers."""
    return " ".join(f"{name}*{times}" if times > 1 else name for name, times in sorted(Counter(names).items()))


def test_norms_at_early_exits_see_the_stream() -> None:
    program, inputs = captured("LayerSkip")
    assert [s.taps for s in program.network.streams] == [("a norm",)]
    with zoo.float64():
        report = Pipeline.parse("rescale-stream{by=0.0625}").run(program, partial=True).report
    assert {r.code for r in report.refusals} == {"LN120"}
