"""Documents and tokens in files are what a conversion is fitted to, and what `probe` and `diff` look at."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import lnrewrite as lnr
import zoo
from commands import fails, ok
from lnrewrite import demo
from lnrewrite.backends.inputs import spec_of
from lnrewrite.data import corpus, documents
from lnrewrite.data.batches import BATCH, Data
from lnrewrite.data.calibration import BATCHES, EIGHTHS, calibration_for, read_batches
from test_corpus import END, WANTED, WRONG, captured, lnr_tokenizer, written

ROWS = {(WANTED[0], *WANTED[i : i + 7]) for i in range(1, len(WANTED) - 6, 7)}
"""The windows of all tokens, each with what its tokenizer puts before a text."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("files"))


def decoder(path: Path, length: int = 8) -> Data:
    return replace(Data.of(captured("llama", "position_ids"), str(path), length), tokenizer=lnr_tokenizer())


@pytest.mark.parametrize("form", ["d.jsonl", "d.parquet", "d.bin"])
def test_windows_of_every_form_are_those_of_the_tokens(files: Path, form: str) -> None:
    data = decoder(files / form)
    batches = read_batches(data, 0)
    rows = [tuple(row) for batch in batches for row in batch["input_ids"].tolist()]
    assert set(rows) == ROWS and len(rows) == (len(WANTED) - 1) // 7
    assert all(torch.equal(b["position_ids"], torch.arange(8).expand_as(b["input_ids"])) for b in batches)
    again, other = read_batches(data, 0), read_batches(data, 1)
    assert torch.equal(again[0]["input_ids"], batches[0]["input_ids"])
    assert not torch.equal(other[0]["input_ids"], batches[0]["input_ids"])
    few = read_batches(data, 0, limit=3)
    assert [len(batch["input_ids"]) for batch in few] == [BATCH] * 3
    assert {tuple(row) for batch in few for row in batch["input_ids"].tolist()} <= ROWS


def test_a_text_is_read_no_further_than_is_needed(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of gigabytes is neither held in memory nor tokenized as a whole; the windows start as a text does."""
    monkeypatch.setattr(documents, "PIECE", 50)
    monkeypatch.setattr(corpus, "TOGETHER", 4)
    read, pieces = 0, documents._text

    def counted(*how: Any) -> Iterator[documents.Piece]:
        nonlocal read
        for piece in pieces(*how):
            read += len(piece[0])
            yield piece

    monkeypatch.setattr(documents, "_text", counted)
    (batch,) = read_batches(decoder(files / "d.txt"), 0, limit=1)
    assert batch["input_ids"].shape == (BATCH, 8) and (batch["input_ids"][:, 0] == WANTED[0]).all()
    assert read < (files / "d.txt").stat().st_size


def test_few_rows_are_small_batches(tmp_path: Path) -> None:
    program = captured("llama", "position_ids")
    np.array((WANTED * 2)[: 12 * 128], dtype=np.uint16).tofile(tmp_path / "d.bin")
    batches = calibration_for(program, str(tmp_path / "d.bin"))
    assert EIGHTHS // 2 < len(batches) <= EIGHTHS < BATCHES and sum(len(b["input_ids"]) for b in batches) == 12


class Positions(torch.nn.Module):
    """Read bytes at so many positions."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.bytes, self.places = torch.nn.Embedding(256, 4), torch.nn.Embedding(positions, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        stream: torch.Tensor = self.bytes(input_ids)
        return stream + self.places(torch.arange(input_ids.shape[1]))


def of_positions(positions: int) -> Any:
    """Return a program of `Positions` that takes any number of rows and tokens."""
    free = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    return lnr.capture(Positions(positions), (torch.zeros(2, 5, dtype=torch.int64),), dynamic_shapes=(free,))


@pytest.mark.parametrize(("positions", "window"), [(500, 128), (128, 128), (127, 64), (77, 64), (9, 8), (7, 0)])
def test_windows_of_a_text_are_no_longer_than_a_context(positions: int, window: int, tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("What the norms of a trained network are for. " * 40)
    program = of_positions(positions)
    if window:
        batches = calibration_for(program, str(tmp_path / "d.txt"))
        assert {batch["input_ids"].shape[1] for batch in batches} == {window}
    else:  # what is told is of a whole window
        with pytest.raises(lnr.LnrewriteError, match=r"LN022 .*fails on input_ids \[\d, 128\]"):
            calibration_for(program, str(tmp_path / "d.txt"))


def test_arrays_longer_than_a_context_are_not_cut(tmp_path: Path) -> None:
    np.save(tmp_path / "d.npy", np.zeros((9, 30), dtype=np.int64))
    program = of_positions(20)
    with pytest.raises(lnr.LnrewriteError, match=r"LN022 .*fails on input_ids \[\d, 30\].*no longer than its context"):
        calibration_for(program, str(tmp_path / "d.npy"))


def test_an_iterable_longer_than_a_context_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read again, an iterator would give nothing, and that would be what is told."""
    given = SimpleNamespace(rows=iter([{"input_ids": torch.zeros(2, 128, dtype=torch.int64)}]))
    monkeypatch.setitem(sys.modules, "given", given)
    with pytest.raises(lnr.LnrewriteError, match=r"LN022 .*fails on input_ids \[2, 128\]"):
        calibration_for(of_positions(20), "given:rows")


def test_a_fixed_batch_is_filled_however_large(tmp_path: Path) -> None:
    spec = spec_of({"input_ids": torch.zeros(600, 4, dtype=torch.int64)}, {}, {"input_ids": 100})
    np.array(WANTED * 2, dtype=np.uint16).tofile(tmp_path / "d.bin")
    batches = read_batches(Data(str(tmp_path / "d.bin"), spec, lnr_tokenizer()), 0, limit=1)
    assert [len(batch["input_ids"]) for batch in batches] == [600]


def test_documents_of_an_encoder_are_rows_with_their_padding_masked(files: Path) -> None:
    kind = {"cls_token": "<s>", "sep_token": "</s>"}
    data = Data.of(captured("bert", "attention_mask"), str(files / "d.jsonl"), 16)
    batches = read_batches(replace(data, tokenizer=lnr_tokenizer(**kind)), 0)
    ids, mask = (torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "attention_mask"))
    assert (ids[:, 0] == 1).all() and torch.equal(mask == 0, ids == 0) and (ids == 0).any()
    assert all(row[row != 0][-1] == END for row in ids)


@pytest.mark.parametrize("name", [name for name in WRONG if not name.endswith(("txt", "csv"))])
def test_files_that_hold_no_text_are_told(name: str, tmp_path: Path) -> None:
    content, words = WRONG[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(lnr.LnrewriteError, match=rf"LN022 .*{words}"):
        read_batches(decoder(tmp_path / name), 0)


def test_a_folder_is_told_from_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(lnr.LnrewriteError, match="LN022 .*it is a folder"):
        read_batches(decoder(tmp_path), 0)
    with pytest.raises(lnr.LnrewriteError, match="LN022 .*no such file"):
        read_batches(decoder(tmp_path / "gone.txt"), 0)


def test_commands_take_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = zoo.short_gpt()
    program = lnr.capture(module, kwargs=demo.calibration(1)[0])
    program.save("m.pt2")
    text = demo.heldout_text().decode(errors="ignore")
    Path("d.jsonl").write_text("".join(json.dumps({"text": text[i : i + 500]}) + "\n" for i in range(0, 6_000, 500)))
    Path("none.jsonl").write_text('{"body": "a"}\n')
    how = ("--calibrate", "d.jsonl", "--fit", "constants", "--json")
    made = json.loads(ok("convert", "m.pt2", "--to", "peri", "-o", "peri.pt2", *how).output)
    assert made["drift"] and ok("diff", "m.pt2", "peri.pt2", "--data", "d.jsonl")
    told = fails("LN022", 1, "convert", "m.pt2", "--to", "peri", "-o", "x.pt2", "--calibrate", "none.jsonl")
    assert "line 1 holds body" in told["why"] and not Path("x.pt2").exists()
