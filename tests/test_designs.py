"""Published designs: every norm is reported or noted, and nothing that is done to the nets is wrong or not a number."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import product

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

RIGHT = 1e-9
PLACES = [f"place{{to={to}}}" for to in ("pre", "post", "peri", "output", "none")]
TEXTS = {name: text for name, (_, text) in PRESETS.items()} | {text: text for text in PLACES}
SEEN = ("Derf", "SeeDNorm", "EvoNorm-S0", "NormFormer with ResScale")
MADE = [
    ("Derf", PLACES[0]), ("SeeDNorm", "inference"), ("NormFormer with ResScale", PLACES[3]),
    ("PowerNorm with group scaling", PLACES[4]),
]  # fmt: skip


@cache
def captured(name: str) -> tuple[Program, tuple[torch.Tensor, ...]]:
    module, inputs = DESIGNS[name].build()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    with zoo.float64():
        return lnr.capture(module.double(), inputs), inputs


def noted(program: Program) -> list[Refusal]:
    return [r for r in program.network.refusals if r.code == "LN205"]


@pytest.mark.parametrize("name", rows(DESIGNS, sample=SEEN))
def test_every_norm_is_reported_or_noted_where_it_is(name: str) -> None:
    design, program = DESIGNS[name], captured(name)[0]
    assert Counter(program.inspect()["norms"]["kinds"]) == design.norms
    assert len(noted(program)) == design.noted
    if design.blocks is None:
        return
    said = " ".join(f"{r.why}," for r in noted(program))
    blocks = program.network.blocks
    assert len(blocks) == len(design.truth) and (blocks or len(program.network.refusals) > design.noted)
    for block, placement in zip(blocks, design.truth, strict=True):
        assert block.placement == placement or f"in block {block.name}," in said


@pytest.mark.parametrize(("name", "text"), rows(product(DESIGNS, TEXTS), sample=MADE))
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
