"""Exact pipelines on real architectures, in true float64, with random gains and biases: edited exactly, or refused.

docs/results/families.md holds what each pipeline did to each family; `pytest tests/test_families.py --update-goldens`
(in one process) writes it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lnrewrite as lnr
import zoo
from lnrewrite.models.program import Program
from tiers import rows

TABLE = Path(__file__).parents[1] / "docs" / "results" / "families.md"
PIPELINES = {
    "fold": "canonicalize,fold-affine{final=true}",
    "to RMSNorm": "absorb-scales,layernorm-to-rmsnorm",
    "absorb": "absorb-scales,merge-norms,fold-embedding-norm",
    "batch norm": "fold-batchnorm",
    "rescale": "rescale-stream{by=0.25}",
    "quantize": str(lnr.Pipeline.preset("quantize")),
}
FAMILIES = (
    "gpt2", "opt", "bloom", "gpt_neox", "gptj", "falcon", "cohere", "llama", "qwen3", "granite", "mixtral", "gemma2",
    "glm4", "olmo2", "bert", "albert", "modernbert", "vit", "dinov2", "beit", "convnext", "gemma3_text", "t5",
    "whisper",
)  # fmt: skip
SAMPLE = ("gpt2", "gpt_neox", "llama", "gemma2", "bert", "convnext")
"""Pre, parallel, gated, peri, post, channels first: what the others are made of."""
INTRO = """# Exact passes on 24 families

The number of edits, and the codes of what was refused (`lnrewrite explain CODE`). `-`: the
pipeline does not apply. Every result is within 1e-9 of the model, relative, in float64.

```sh
python -m pytest tests/test_families.py -m exhaustive -n 0 --update-goldens
```

"""
HEAD = "| family | " + " | ".join(PIPELINES) + " |\n|---" + "|---" * len(PIPELINES) + "|"
RIGHT = 1e-9


def outputs(program: Program, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    with zoo.float64():
        return zoo.floats(program.module()(**inputs))


def cell(result: lnr.Result) -> str:
    """Return what a pipeline did: how many edits, which codes refused, or that it speaks of nothing here."""
    codes = " ".join(sorted({r.code for r in result.report.refusals}))
    return f"{result.report.edits or ''} {codes}".strip() or "-"


@pytest.mark.parametrize("family", rows(FAMILIES, sample=SAMPLE))
def test_every_pipeline_is_exact_or_refuses(family: str, update_goldens: bool) -> None:
    program, inputs = zoo.captured(family, double=True)
    wanted = outputs(program, inputs)
    cells = []
    for name, text in PIPELINES.items():
        result = lnr.Pipeline.parse(text).run(program, partial=True)
        for a, b in zip(wanted, outputs(result.program, inputs), strict=True):
            assert (a - b).abs().max() <= RIGHT * a.abs().max(), name
        if name == "to RMSNorm" and family in ("gpt2", "opt", "gpt_neox", "vit", "whisper"):
            assert result.program.inspect()["norms"]["kinds"].keys() == {"rms"}
        cells.append(cell(result))
    row = f"| {family} | " + " | ".join(cells) + " |"
    if update_goldens:
        write(family, row)
    assert row in TABLE.read_text().splitlines()


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("family", rows(FAMILIES, sample=("gpt2",)))
def test_what_comes_out_is_seen_alike_when_captured_afresh(family: str, pipeline: str) -> None:
    """The picture of a result is lifted from its edited graph; a capture of its module says the same."""
    program, inputs = zoo.captured(family, double=True)
    result = lnr.Pipeline.parse(PIPELINES[pipeline]).run(program, partial=True)
    with zoo.float64():
        again = lnr.capture(result.program.module(), kwargs=inputs)
    assert str(again.stream) == str(result.program.stream)


def write(family: str, row: str) -> None:
    """Put one row into the table."""
    held = TABLE.read_text().splitlines() if TABLE.exists() else []
    rows = {line.split(" ")[1]: line for line in held if line.startswith("| ")} | {family: row}
    body = "\n".join(rows[f] for f in FAMILIES if f in rows)
    steps = "\n".join(f"- {name}: `{text}`" for name, text in PIPELINES.items())
    TABLE.write_text(f"{INTRO}{steps}\n\n{HEAD}\n{body}\n")


def test_the_table_holds_every_family_and_enough_edits() -> None:
    rows = [line.split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| ")][1:]
    assert [row[0].removeprefix("| ") for row in rows] == list(FAMILIES)
    edited = sum(cell.strip(" |")[:1].isdigit() for row in rows for cell in row[1:])
    assert edited >= 80, "families that could be edited exactly are refused"
