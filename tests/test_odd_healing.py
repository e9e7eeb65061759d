"""Healing on models and data as strangers have them: masks, labels, iterables, pictures."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lnrewrite as lnr
from lnrewrite.healing.budget import tokens_of
from lnrewrite.healing.distributed import World
from lnrewrite.healing.losses import Objective
from lnrewrite.healing.participant import Participant

QUICK: dict[str, Any] = {"steps": 2, "control": False, "lr": 1e-4}


class Reader(nn.Module):
    """One block of attention and one map, causal or not, with a mask that hides by `fill`."""

    def __init__(self, causal: bool, fill: float, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.causal, self.fill = causal, fill
        self.table, self.head = nn.Embedding(40, width), nn.Linear(width, 40)
        self.places = nn.Embedding(64, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out, self.map = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        length = input_ids.shape[1]
        x = self.table(input_ids) + self.places(torch.arange(length))
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        scores = q @ k.mT / 4
        scores = scores.masked_fill(attention_mask[:, None] == 0, self.fill)
        if self.causal:
            scores = scores.masked_fill(torch.ones(length, length).triu(1) == 1, self.fill)
        x = x + self.out(scores.softmax(-1) @ v)
        x = x + nn.functional.gelu(self.map(self.norms[1](x)))
        out: Tensor = self.head(self.norms[2](x))
        return out


def padded(many: int = 24, length: int = 12) -> dict[str, Tensor]:
    """Return rows that all end in at least two hidden tokens."""
    draw = torch.Generator().manual_seed(0)
    shown = torch.arange(length) < torch.randint(4, length - 2, (many, 1), generator=draw)
    return {"input_ids": torch.randint(1, 40, (many, length), generator=draw) * shown, "attention_mask": shown.long()}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("fill", [-1e9, -torch.inf])
def test_what_is_learned_does_not_depend_on_padding(causal: bool, fill: float) -> None:
    batch = padded()
    found = Objective.of(lnr.capture(Reader(causal, fill).eval(), kwargs=batch), batch)
    assert found.ids == ("input_ids" if causal else "") and found.masks == {"attention_mask": 0}
    shown = int(batch["attention_mask"].sum())
    assert found.count(batch) == (shown - len(batch["input_ids"]) if causal else shown)


def test_a_mask_of_pairs_is_no_tokens() -> None:
    ids, pairs = torch.zeros(4, 16, dtype=torch.int64), torch.ones(4, 16, 16, dtype=torch.bool)
    assert tokens_of({"ids": ids}) == tokens_of({"ids": ids, "mask": pairs}) == 64
    assert tokens_of({"x": torch.zeros(4, 16, 9), "mask": pairs}) == 64
    assert tokens_of({"pairs": pairs}) == 4 * 16 * 16


class Pictures(nn.Module):
    """Two branches of convolutions with norms over the channels of [rows, channels, height, width]."""

    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.flat = flat
        self.stem, self.head = nn.Conv2d(3, 16, 1), nn.Linear(16, 1 if flat else 5)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
        self.classes = nn.Embedding(5, 16)

    def trunk(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=False):
            x = x + conv(norm(x.movedim(1, -1)).movedim(-1, 1)).relu()
        out: Tensor = self.norms[2](x.movedim(1, -1))
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.trunk(x).mean((1, 2)))
        return out[:, 0] if self.flat else out


class Conditioned(Pictures):
    """Takes an input that is named as targets are in data."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = self.head(self.trunk(x).mean((1, 2)) + self.classes(labels))
        return out


class Segments(Pictures):
    """Gives every place its classes, on the second axis as torch's losses take them, or on the last."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.trunk(x))
        return out if self.last else out.movedim(-1, 1)


def converted(net: nn.Module, **inputs: Tensor) -> tuple[Any, Any]:
    """Return a teacher and its conversion to Peri-LN."""
    teacher = lnr.capture(net.eval(), kwargs=inputs)
    return teacher, lnr.Pipeline.parse("place{to=peri fit=constants}").run(teacher, [inputs, inputs]).program


def test_states_are_compared_along_their_channels() -> None:
    teacher, _ = converted(Pictures(), x=torch.randn(8, 3, 6, 5))
    states = Participant.of(teacher, World.join("cpu", 0)).run({"x": torch.randn(4, 3, 6, 5)}).states
    assert states and {tuple(s.shape) for s in states.values()} == {(4, 6, 5, 16)}


@pytest.mark.parametrize("flat", [False, True])
def test_without_targets_a_picture_is_one(flat: bool) -> None:
    teacher, student = converted(Pictures(flat), x=torch.randn(8, 3, 6, 6))
    report = lnr.heal(teacher, student, [{"x": torch.randn(4, 3, 6, 6)} for _ in range(12)], **QUICK).report
    assert report.unit != "nats" and report.targets % 4 == 0 and report.targets <= 8 * 4


def test_an_input_may_be_named_as_targets_are() -> None:
    given = {"x": torch.randn(64, 3, 6, 6), "labels": torch.randint(0, 5, (64,))}
    teacher, student = converted(Conditioned(), **{n: t[:8] for n, t in given.items()})
    batches = [{n: t[i : i + 4] for n, t in given.items()} for i in range(0, 64, 4)]
    assert lnr.heal(teacher, student, batches, **QUICK).report.unit != "nats"


def test_labels_stand_with_both_or_with_none_and_are_of_any_width(tmp_path: Path) -> None:
    x, labels = torch.randn(64, 3, 6, 6), torch.randint(0, 5, (64,))
    teacher, student = converted(Pictures(), x=x[:8])
    with_labels, without = tmp_path / "with.npz", tmp_path / "without.pt"
    np.savez(with_labels, x=x.numpy(), labels=labels.numpy().astype(np.uint16))
    torch.save({"x": x}, without)
    report = lnr.heal(teacher, student, with_labels, held_out=with_labels, **QUICK).report
    assert report.unit == "nats" and report.targets == 64
    for data, held in ((with_labels, without), (without, with_labels)):
        with pytest.raises(lnr.LnrewriteError, match=r"LN022 .*labels.*none"):
            lnr.heal(teacher, student, data, held_out=held, **QUICK)
    torch.save({"x": x, "labels": torch.tensor(1)}, without)
    with pytest.raises(lnr.LnrewriteError, match=r"LN022 .*labels are one number"):
        lnr.heal(teacher, student, without, **QUICK)


@pytest.mark.parametrize(("high", "wide"), [(6, 6), (5, 6), (6, 5)])
def test_labels_of_places_go_with_classes_on_either_axis(high: int, wide: int) -> None:
    x, labels, reports = torch.randn(64, 3, high, wide), torch.randint(0, 5, (64, high, wide)), []
    labels[:, 0] = -100
    for last in (True, False):
        batches = [{"x": x[i : i + 4], "labels": labels[i : i + 4]} for i in range(0, 64, 4)]
        reports.append(lnr.heal(*converted(Segments(last), x=x[:8]), batches, **QUICK).report)
    one, two = reports
    assert one.unit == two.unit == "nats" and one.targets == two.targets == 24 * (high - 1) * wide
    assert one.losses["healed"]["mean"] == pytest.approx(two.losses["healed"]["mean"], abs=1e-6)
    assert one.losses["healed"]["mean"] < one.losses["converted"]["mean"]


def test_pictures_with_as_many_classes_as_places_are_told() -> None:
    batch = {"x": torch.randn(8, 3, 5, 5), "labels": torch.randint(0, 5, (8, 5, 5))}
    pair = converted(Segments(last=False), x=batch["x"])
    with pytest.raises(lnr.LnrewriteError, match=r"LN022 .*the second or the last axis"):
        lnr.heal(*pair, [batch] * 9, **QUICK)


def walks(batches: list[dict[str, Tensor]]) -> dict[str, Callable[[], object]]:
    """Return iterables of all kinds that give these batches."""

    class Persistent:
        """Starts again whenever it is asked for an iterator, which is the same one: as a loader with workers does."""

        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            self.left = iter(batches)
            return self

        def __next__(self) -> dict[str, Tensor]:
            return next(self.left)

    class Loader:
        def __init__(self) -> None:
            self.walk = Persistent()

        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return iter(self.walk)

    return {
        "list": lambda: batches,
        "loader": Loader,
        "generator": lambda: (b for b in batches),
        "function": lambda: lambda: (b for b in batches),
        "endless": lambda: itertools.cycle(batches),
    }


@pytest.mark.parametrize("kind", ["list", "loader", "generator", "function", "endless"])
def test_iterables_give_what_they_give(kind: str) -> None:
    teacher, student = converted(Pictures(), x=torch.randn(8, 3, 6, 6))
    draw = torch.Generator().manual_seed(0)
    batches = [{"x": torch.randn(4, 3, 6, 6, generator=draw)} for _ in range(10)]
    found = lnr.heal(teacher, student, walks(batches)[kind](), **QUICK)
    listed = lnr.heal(teacher, student, batches, **QUICK)
    same = ("teacher", "converted") if kind == "endless" else ("teacher", "converted", "healed")
    assert all(found.report.losses[name] == listed.report.losses[name] for name in same)
    told = lnr.heal(teacher, student, walks(batches)[kind](), batch_size=16, **QUICK).report.notes
    assert any("of 4 rows" in note for note in told)


def test_held_out_documents_are_as_many_however_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    documents = ["".join(chr(c) for c in draw.integers(97, 120, 60)) for _ in range(200)]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in [*documents, "\ud83d cut"]))
    (tmp_path / "train.txt").write_text("".join(documents[:100]))
    monkeypatch.setitem(sys.modules, "given", SimpleNamespace(texts=documents))
    teacher = lnr.load("demo:tinygpt")
    how = {"held_out": None, "length": 16, **QUICK}
    counts = [
        lnr.heal(teacher, teacher, str(tmp_path / "train.txt"), **{**how, "held_out": held}).report.targets
        for held in (tmp_path / "held.jsonl", "given:texts")
    ]
    assert counts[1] == 256 * 15 and counts[0] >= counts[1]


def test_a_batch_of_one_size_is_one(tmp_path: Path) -> None:
    batch = {name: rows[:2] for name, rows in padded().items()}
    for fixed in (False, True):
        shapes = {} if fixed else {name: {0: torch.export.Dim.AUTO} for name in batch}
        teacher = lnr.capture(Reader(True, -1e9).eval(), kwargs=batch, dynamic_shapes=shapes or dict.fromkeys(batch))
        student = lnr.Pipeline.parse("place{to=peri fit=constants}").run(teacher, [batch, batch]).program
        torch.save(padded(40), tmp_path / "rows.pt")
        report = lnr.heal(teacher, student, tmp_path / "rows.pt", **QUICK).report
        assert (report.recipe["batch_size"] == 2) is fixed


def test_the_user_s_random_numbers_stay() -> None:
    teacher, student = converted(Pictures(), x=torch.randn(8, 3, 6, 6))
    batches = [{"x": torch.randn(4, 3, 6, 6)} for _ in range(10)]
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    lnr.heal(teacher, student, batches, **QUICK)
    assert torch.equal(torch.rand(3), wanted)
