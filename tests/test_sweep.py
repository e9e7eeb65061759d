"""A fixed sample of the sweep over every architecture, and what the page and the truth that it rests on promise."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

import sweep
import zoo


def test_the_truth_is_spelled_as_placements_are() -> None:
    names = {"pre", "post", "peri", "output", "inner", "none", "parallel"}
    for family, row in zoo.FAMILIES.items():
        found = {word.partition("*")[0] for word in row["blocks"].split()}
        assert found <= names or row["blocks"] == "unsupported", family
        assert row.get("read") or row.get("why") or "." in family, f"{family}: where is this read?"
    assert len({family.partition(".")[0] for family in zoo.FAMILIES}) >= 150


def test_the_page_keeps_its_promise() -> None:
    text = sweep.PAGE.read_text()
    right, wrong = map(float, re.search(r"\(([\d.]+)% right, ([\d.]+)% wrong\)", text).groups())  # type: ignore[union-attr]
    assert right >= 98
    assert wrong <= 1
    assert not re.search(r"NOT EXACT|NOT FINITE|crash", text)


def test_a_family_that_takes_too_long_is_stopped_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "DEADLINE", 0.2)
    monkeypatch.setattr(sweep, "look", lambda *given: time.sleep(30))
    sweep.sweep(["llama"], False, False, str(tmp_path / "r.jsonl"), 1)
    assert "longer than the deadline" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["dinov3_vit", "granite_docling_vision"])
def test_empty_parameters_and_buffers_take_part_in_exact_edits(name: str) -> None:
    """No register tokens, and positions in a buffer: both are sources of the stream."""
    module, inputs = zoo.build(name)
    cells = dict(sweep.exact(name, inputs))
    assert not any(cell.startswith("NOT") for cell in cells.values())
    assert int(cells["quantize"].split()[0]) >= 12
    assert sweep.converted(zoo.capture(module, inputs), "peri", inputs) == "yes"


def test_norms_of_several_results_are_recorded() -> None:
    module, inputs = zoo.build("patchtst")
    assert sweep.converted(zoo.capture(module, inputs), "peri", inputs) != "NOT FINITE"
