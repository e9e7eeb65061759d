"""Texts for a training: every form of the same documents gives the same tokens, and documents do not see each other."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

import lnrewrite as lnr
import zoo
from lnrewrite import demo
from lnrewrite.backends.torch.fused import IGNORED
from lnrewrite.data import documents
from lnrewrite.healing.losses import Objective
from lnrewrite.healing.opening import Reading, apart, held_out_of, open_source, tokenizer_named
from lnrewrite.healing.sources import ArraySource, Windows
from lnrewrite.models.program import Program
from zoo import families

END, WORDS = 2, [f"w{i}" for i in range(60)]
DRAW = random.Random(0)
TEXTS = [" ".join(DRAW.choices(WORDS, k=DRAW.randint(3, 40))) for _ in range(300)]


def tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words that puts a token before each text, and one behind if it is an encoder's."""
    ids = {word: i for i, word in enumerate(["[PAD]", "<s>", "</s>", "[UNK]", *WORDS])}
    made = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    both = "<s> $A </s>" if "cls_token" in special else "<s> $A"
    made.post_processor = processors.TemplateProcessing(single=both, special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", **special)


WANTED = [i for text in TEXTS for i in (1, *(4 + WORDS.index(word) for word in text.split()), END)]
"""The tokens of the documents, each with the one that its tokenizer puts before it, and behind it that of an end."""


def captured(name: str, *more: str) -> Program:
    module, inputs = zoo.build(name, head=True)
    ids = inputs["input_ids"]
    full = {"position_ids": torch.arange(ids.shape[1]).expand_as(ids), "attention_mask": torch.ones_like(ids)}
    return lnr.capture(module, kwargs={"input_ids": ids} | {n: full[n] for n in more})


@pytest.fixture(scope="module")
def llama() -> Program:
    assert len(WORDS) + 4 <= families.VOCAB
    return captured("llama", "position_ids")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("files"))


def written(folder: Path) -> Path:
    """Write the same documents in every form."""
    (folder / "d.jsonl").write_text("".join(json.dumps({"id": i, "text": t}) + "\n\n" for i, t in enumerate(TEXTS)))
    (folder / "d.txt").write_text("\n".join(TEXTS))
    table = pyarrow.table({"text": TEXTS, "content": TEXTS, "n": range(len(TEXTS))})
    parquet.write_table(table, folder / "d.parquet", row_group_size=7)
    np.array(WANTED, dtype=np.uint16).tofile(folder / "d.bin")
    np.save(folder / "d.npy", np.array(WANTED, dtype=np.int32))
    tokenizer(eos_token="</s>").save_pretrained(folder / "tok")
    return folder


def reading(**how: Any) -> Reading:
    return Reading(4, 8, 0, **{"tokenizer": lnr_tokenizer(), "batches": 10_000, **how})


def lnr_tokenizer(**special: str) -> Any:
    return tokenizer_named(tokenizer(**special or {"eos_token": "</s>"}))


GIVEN = ["d.jsonl", "d.parquet", "d.bin", "d.npy", "texts", "mappings", "iterator", "folder"]


@pytest.mark.parametrize("form", GIVEN)
def test_every_form_gives_the_same_tokens(form: str, files: Path, llama: Program) -> None:
    rows = [{"text": text} for text in TEXTS]
    given: Any = {"texts": TEXTS, "mappings": lambda: rows, "iterator": iter(rows), "folder": "d.jsonl"}.get(form, form)
    how = reading()
    if form == "folder":
        how = reading(tokenizer=tokenizer_named(files / "tok"))
    source = open_source(str(files / given) if isinstance(given, str) else given, llama, how)
    assert isinstance(source, Windows) and source.end == END
    kept = torch.cat([batch["input_ids"].flatten() for batch in source.held_out])
    found = source.tokens.tolist() + kept.tolist()
    assert found == WANTED[: len(found)] and len(WANTED) - len(found) < 8 * 32
    assert source.tokens.itemsize <= 4  # what lies on the disk is not widened as a whole


def test_a_text_is_one_document_read_in_pieces(files: Path, llama: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = open_source(str(files / "d.txt"), llama, reading())
    monkeypatch.setattr(documents, "PIECE", 50)
    cut = open_source(str(files / "d.txt"), llama, reading())
    assert isinstance(whole, Windows) and isinstance(cut, Windows) and torch.equal(whole.tokens, cut.tokens)
    words = [4 + WORDS.index(word) for text in TEXTS for word in text.split()]
    assert whole.tokens.tolist() == [1, *words][: len(whole.tokens)]


def test_no_more_is_read_than_the_run_asks_for(llama: Program) -> None:
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1
            yield " ".join(WORDS)

    source = open_source(endless(), llama, reading(batches=3))
    assert isinstance(source, Windows) and read < 300 and len(source.tokens) > 3 * 4 * 8


def test_other_data_are_measured_from_their_start(files: Path, llama: Program) -> None:
    held = torch.cat([batch["input_ids"] for batch in held_out_of(str(files / "d.jsonl"), llama, reading())])
    assert held.flatten().tolist() == WANTED[: 256 * 8]
    assert torch.equal(held, torch.cat([b["input_ids"] for b in held_out_of(str(files / "d.bin"), llama, reading())]))


def test_rows_of_arrays_stay_on_the_disk(tmp_path: Path, llama: Program) -> None:
    rows = np.arange(40 * 8).reshape(40, 8) % 50
    np.save(tmp_path / "rows.npy", rows.astype(np.uint16))
    plain = captured("llama")
    source = open_source(str(tmp_path / "rows.npy"), plain, reading())
    assert isinstance(source, ArraySource) and source.arrays["input_ids"].dtype == torch.uint16
    batch = source.batch(0)["input_ids"]
    assert batch.dtype == torch.int64 and all(row in rows.tolist() for row in batch.tolist())
    assert source.held_out[0]["input_ids"].dtype == torch.int64


# ---- documents are kept apart ----


class Placed(nn.Module):
    """Take positions that part nothing: every token sees all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.places = zoo.short_gpt(), nn.Embedding(128, 256)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids) + self.places(position_ids)
        return found


def test_documents_do_not_see_each_other_where_a_model_takes_positions(llama: Program) -> None:
    data = reading().corpus(llama, "data").data
    assert apart(llama, data, END) and not apart(llama, data, None)
    for other in (
        captured("llama"),
        captured("llama", "attention_mask"),
        captured("llama", *("position_ids", "attention_mask")),
    ):
        assert not apart(other, reading().corpus(other, "data").data, END)
    ids = torch.randint(4, 60, (2, 16), generator=torch.Generator().manual_seed(0))
    placed = lnr.capture(Placed(), kwargs={"input_ids": ids, "position_ids": torch.arange(16).expand_as(ids)})
    assert not apart(placed, reading().corpus(placed, "data").data, END)
    batch = open_source(TEXTS, llama, reading()).batch(5)
    ids, places = batch["input_ids"], batch["position_ids"]
    for row, counted in zip(ids.tolist(), places.tolist(), strict=True):
        expected = 0
        for i, place in enumerate(counted):
            expected = 0 if i and row[i - 1] == END else expected + bool(i)
            assert place == expected
    assert (ids == END).any()
    objective = Objective("input_ids", {}, False, end=END)
    targets = objective.targets(batch)
    assert torch.equal(targets == IGNORED, ids[:, :-1] == END)
    assert objective.count(batch) == int((ids[:, :-1] != END).sum())


def test_what_a_run_trains_on_and_measures_does_not_cross_documents(files: Path, llama: Program) -> None:
    """The gradient of the loss behind an end knows nothing of what is before it: here by the held-out losses."""
    student = lnr.Pipeline.parse("place{to=peri}").run(llama).program
    found = lnr.heal(
        llama, student, str(files / "d.jsonl"), tokenizer=files / "tok", steps=2, batch_size=4, length=16, control=False
    )
    source = open_source(str(files / "d.jsonl"), llama, Reading(4, 16, 0, lnr_tokenizer(), batches=2))
    held = torch.cat([b["input_ids"] for b in source.held_out])
    assert found.report.targets == int((held[:, :-1] != END).sum()) < held[:, 1:].numel()


def test_an_encoder_takes_a_document_a_row() -> None:
    encoder = captured("bert", "attention_mask")
    kind = {"cls_token": "<s>", "sep_token": "</s>"}
    source = open_source(TEXTS, encoder, reading(tokenizer=lnr_tokenizer(**kind)))
    assert isinstance(source, ArraySource)
    ids, mask = source.arrays["input_ids"], source.arrays["attention_mask"]
    assert (ids[:, 0] == 1).all() and torch.equal(mask == 0, ids == 0) and (ids == 0).any()
    assert all(row[row != 0][-1] == END for row in ids)
    bare = captured("bert")
    full = open_source(TEXTS, bare, reading(tokenizer=lnr_tokenizer(**kind)))
    assert isinstance(full, ArraySource) and not (full.arrays["input_ids"] == 0).any()


def test_bytes_of_documents_are_parted_by_a_blank_line(tmp_path: Path) -> None:
    program = lnr.capture(zoo.short_gpt(), kwargs=demo.calibration(1)[0])
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"body": t}) + "\n" for t in TEXTS))
    source = open_source(str(path), program, Reading(4, 8, 0, field="body", batches=10_000))
    assert isinstance(source, Windows) and source.end is None
    assert bytes(source.tokens.tolist()) == "".join(t + "\n\n" for t in TEXTS).encode()[: len(source.tokens)]


# ---- what is wrong ----

WRONG: dict[str, tuple[bytes, str]] = {
    "empty.txt": (b"", "holds no text"),
    "empty.jsonl": (b"\n\n", "holds no text"),
    "empty.bin": (b"", "is empty"),
    "odd.bin": (b"\0\0\0", "has 3 bytes"),
    "large.bin": (b"\xff\xff" * 100, "holds 65535"),
    "list.jsonl": (b"[1, 2]\n", "line 1 holds a list"),
    "none.jsonl": (b'{"text": "w1"}\n{"body": "w1"}\n', "line 2 holds body"),
    "number.jsonl": (b'{"text": 3}\n', "line 1 holds text and no text"),
    "broken.jsonl": (b'{"text": "w1"}\n{"text": \n', "line 2 is not JSON"),
    "deep.jsonl": (b"[" * 100_000 + b"\n", "line 1 is not JSON"),
    "latin.txt": (b"\xff\xfe\x00", "UTF-8"),
    "latin.jsonl": (b'{"text": "\xff"}\n', "line 1 is not JSON"),
    "none.parquet": (b"PAR1 nothing", "parquet"),
    "short.txt": (b"w1 w2 w3", "5 tokens"),
    "any.csv": (b"w1,w2", "not a known form"),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_hold_no_text_are_told(name: str, tmp_path: Path, llama: Program) -> None:
    content, words = WRONG[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(lnr.LnrewriteError, match=rf"LN022 .*{words}"):
        open_source(str(tmp_path / name), llama, reading())


def test_an_empty_text_of_bytes_is_told(tmp_path: Path) -> None:
    program = lnr.capture(zoo.short_gpt(), kwargs=demo.calibration(1)[0])
    (tmp_path / "empty.txt").touch()
    with pytest.raises(lnr.LnrewriteError, match="LN022 .*is empty"):
        open_source(str(tmp_path / "empty.txt"), program, Reading(4, 8, 0))


def test_columns_and_tokenizers_that_are_not_there_are_told(files: Path, llama: Program) -> None:
    wrong: list[tuple[Any, str]] = [
        (files / "nowhere", "no such folder"),
        (files, "holds no tokenizer"),
        (3, "a int is not a tokenizer"),
    ]
    for given, words in wrong:
        with pytest.raises(lnr.LnrewriteError, match=f"LN022 .*{words}"):
            tokenizer_named(given)
    with pytest.raises(lnr.LnrewriteError, match="LN022 .*brings no tokenizer.*--tokenizer"):
        open_source(TEXTS, llama, reading(tokenizer=None))
    for name, field, words in (("d.parquet", "body", "columns text, content, n"), ("d.parquet", "n", "is a int")):
        with pytest.raises(lnr.LnrewriteError, match=f"LN022 .*{words}"):
            open_source(str(files / name), llama, reading(field=field))
    with pytest.raises(lnr.LnrewriteError, match="LN022 .*item 1 is not a text"):
        open_source(["w1", 2], llama, reading())
