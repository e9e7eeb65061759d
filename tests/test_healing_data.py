"""What a healing is given, by people who do not know what it does with it: data, folders, parameters that stay."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import lnrewrite as lnr
import zoo
from commands import fails
from lnrewrite.backends.inputs import spec_of
from lnrewrite.data.batches import Data
from lnrewrite.healing.losses import Objective
from lnrewrite.healing.sources import TARGETS, ArraySource, IterableSource, Windows
from tiers import rows
from zoo import families

FEW = {"steps": 2, "batch_size": 2, "control": False}


def ids(seed: int, *shape: int) -> Tensor:
    return torch.randint(60, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, Any, list[dict[str, Tensor]]]:
    """Return a decoder, its program as peri, and batches."""
    module, _ = families.build("llama")
    batches = [{"input_ids": ids(i, 2, 12)} for i in range(20)]
    teacher = lnr.capture(module, kwargs=batches[0])
    made = lnr.Pipeline.parse("place{to=peri fit=constants}").run(teacher, batches[:2]).program
    return module, (teacher, made), batches


@pytest.mark.parametrize("seed", rows(range(20), range(3)))
def test_of_a_loader_that_shuffles_nothing_is_trained_on_that_is_held_out(seed: int) -> None:
    draw = random.Random(seed)
    count, size = draw.randint(18, 60), draw.randint(1, 2)

    def walk() -> Iterator[dict[str, Tensor]]:
        order = draw.sample(range(count), count)
        for start in range(0, count - size + 1, size):
            yield {"ids": torch.tensor(order[start : start + size])[:, None]}

    source = IterableSource(walk, Data("d", spec_of({"ids": torch.zeros(size, 1).long()})))
    held = {int(v) for batch in source.held_out for v in batch["ids"].flatten()}
    taken = [source.batch(i)["ids"] for i in range(2 * count)]
    assert held.isdisjoint(int(v) for batch in taken for v in batch.flatten())
    assert all(torch.equal(source.batch(i)["ids"], taken[i]) for i in draw.sample(range(2 * count), 5))
    assert source.notes
    with pytest.raises(lnr.LnrewriteError, match=r"LN022.*shuffle=False"):
        IterableSource(walk, source.data, processes=2)


def test_labels_at_their_own_tokens_are_what_comes_before_them_predicts(pair: Any) -> None:
    """transformers' causal models move labels themselves; others come as they are predicted."""
    _, (teacher, student), batches = pair
    early = [b | {"labels": torch.cat([b["input_ids"][:, 1:], torch.full((2, 1), -100)], 1)} for b in batches]
    own = [b | {"labels": b["input_ids"].clone()} for b in batches]
    reports = [lnr.heal(teacher, student, data, **FEW).report for data in (batches, own, early)]
    assert len({(r.targets, r.losses["teacher"]["mean"], r.losses["healed"]["mean"]) for r in reports}) == 1


@pytest.mark.parametrize(
    ("label", "why"),
    [(9999, "hold 9999 of"), (-5, "hold -5"), (0.5, "labels are of"), (-100, "no targets"), (None, "others")],
)
def test_labels_that_are_none_are_told(label: float | None, why: str, pair: Any) -> None:
    _, (teacher, student), batches = pair
    data = [b | {"labels": torch.full((2, 12), label if label is not None else 1)} for b in batches]
    data[3:] = batches[3:] if label is None else data[3:]
    with pytest.raises(lnr.LnrewriteError, match=f"LN022.*{why}"):
        lnr.heal(teacher, student, data, **FEW)


def test_pairs_of_inputs_and_labels_are_taken(pair: Any) -> None:
    module, inputs = families.build("vit")
    data = [(torch.randn(2, *inputs["pixel_values"].shape[1:]), ids(i, 2) % 2) for i in range(12)]
    teacher = lnr.capture(Scores(module, inputs), kwargs={"pixel_values": data[0][0]})
    student = lnr.Pipeline.parse("place{to=peri fit=constants}").run(teacher).program
    assert lnr.heal(teacher, student, data, **FEW).report.targets == 2 * 8


class Scores(nn.Module):
    """Give two scores of an image."""

    def __init__(self, module: nn.Module, inputs: dict[str, Tensor]) -> None:
        super().__init__()
        self.module, width = module, module(**inputs)[0].shape[-1]
        self.head = nn.Linear(width, 2)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(self.module(pixel_values=pixel_values)[0].flatten(1, -2).mean(1))


@pytest.mark.parametrize(("source", "target"), [(12, 12), (12, 7)])
def test_a_mask_counts_the_tokens_of_its_own_sequence(source: int, target: int) -> None:
    module, _ = families.build("t5")
    batch = {"input_ids": ids(0, 2, source), "attention_mask": torch.ones(2, source).long()}
    batch |= {"decoder_input_ids": ids(1, 2, target)}
    batch["attention_mask"][:, 5:] = 0
    program = lnr.capture(module, kwargs=batch)
    assert Objective.of(program, batch).masks == {} and Objective.of(program, batch).count(batch) == 2 * target
    given = batch | {"decoder_attention_mask": torch.ones(2, target).long()}
    program = lnr.capture(module, kwargs=given)
    assert Objective.of(program, given).masks == {"decoder_attention_mask": 0}


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_mask_of_the_tokens_counts_them(family: str) -> None:
    module, _ = families.build(family)
    batch = {"input_ids": ids(0, 2, 12), "attention_mask": torch.ones(2, 12).long()}
    batch["attention_mask"][:, 8:] = 0
    assert Objective.of(lnr.capture(module, kwargs=batch), batch).masks == {"attention_mask": 0}


def test_parameters_that_take_no_gradient_stay(pair: Any) -> None:
    module, (teacher, _), batches = pair
    student = lnr.convert(module, to="peri", kwargs=batches[0], calibrate=batches[:2], live=True)
    frozen = [n for n, p in student.named_parameters() if "embed" in n or "q_proj" in n]
    for name in frozen:
        student.get_parameter(name).requires_grad_(False)
    before = {n: p.detach().clone() for n, p in student.named_parameters()}
    for degrees in ({"progressive": True}, {"drop_final": True}):
        with pytest.raises(lnr.LnrewriteError, match="LN602.*takes no gradient"):
            lnr.heal(module, student, batches, kwargs=batches[0], **FEW, **degrees)
    assert all(torch.equal(before[n], p) for n, p in student.named_parameters())
    found = lnr.heal(module, student, batches, kwargs=batches[0], **FEW)
    moved = {n for n, p in found.module.named_parameters() if not torch.equal(before[n], p)}
    assert moved and moved.isdisjoint(frozen)


def test_a_run_goes_on_with_its_own_models_and_data_alone(pair: Any, tmp_path: Path) -> None:
    _, (teacher, student), batches = pair
    other = teacher.apply([], "other")[0]
    with torch.no_grad():
        other.module().get_parameter("lm_head.weight").mul_(1.01)

    def stops() -> Iterator[dict[str, Tensor]]:
        yield from batches[:12]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lnr.heal(teacher, student, stops, **FEW | {"steps": 9, "save_steps": 1}, run=tmp_path)
    for models, data, what in (
        ((other, student), batches, "teacher"), ((teacher, other), batches, "student"),
        ((teacher, student), [{"input_ids": (b["input_ids"] + 1) % 60} for b in batches], "data"),
    ):  # fmt: skip
        with pytest.raises(lnr.LnrewriteError, match=f"LN605.*{what}"):
            lnr.heal(*models, data, **FEW | {"steps": 9, "save_steps": 1}, run=tmp_path, resume=True)
    found = lnr.heal(teacher, student, batches, **FEW | {"steps": 9, "save_steps": 1}, run=tmp_path, resume=True)
    assert found.report.tokens == 9 * 2 * 12


MINE = {
    "log.jsonl": '["my", "log"]\n', "loss.html": "mine", "global-000500/weights.bin": "mine", "local-000001/a": "mine",
}  # fmt: skip


@pytest.mark.parametrize("name", MINE)
def test_what_no_run_wrote_stays(name: str, pair: Any, tmp_path: Path) -> None:
    _, (teacher, student), batches = pair
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(MINE[name])
    for restart in (False, True):
        with pytest.raises(lnr.LnrewriteError, match="LN605"):
            lnr.heal(teacher, student, batches, **FEW, run=tmp_path, restart=restart)
    assert (tmp_path / name).read_text() == MINE[name]


@pytest.mark.parametrize("place", ["teacher", "teacher/inside", "data.json"])
def test_what_is_read_is_never_written_over(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module, _ = families.build("llama")
    module.save_pretrained(tmp_path / "teacher")
    shutil.copytree("teacher", "student")
    data = tmp_path / "data.json"
    data.mkdir()
    (data / "rows.jsonl").write_text(json.dumps({"text": "a"}))
    before = sorted((p, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file())
    asked = ["teacher", "student", "--data", str(data / "rows.jsonl"), "--force"]
    for more in (["-o", place], *(["-o", "out", "--run", at] for at in (place, "out", "out/run"))):
        fails("LN025", 1, "heal", *asked, *more)
    assert sorted((p, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file()) == before


@pytest.mark.parametrize("id", [70_000, -1])
def test_ids_without_a_row_are_told_wherever_they_come_from(id: int, pair: Any) -> None:
    module, _, batches = pair
    data = [*batches[:3], {"input_ids": torch.full((2, 12), id)}]
    for given in (data, lambda: iter(data)):
        with pytest.raises(lnr.LnrewriteError, match=f"LN022.*input_ids holds {id}"):
            lnr.convert(module, "peri", kwargs=batches[0], calibrate=given, fit="constants")


def test_padding_in_calibration_data_is_told(pair: Any) -> None:
    module, _, batches = pair
    data = [b | {"attention_mask": torch.ones(2, 12).long(), "labels": b["input_ids"]} for b in batches[:3]]
    notes = []
    for hidden in (0, 4):
        data[0]["attention_mask"][:, 12 - hidden :] = 0
        program = lnr.capture(module, kwargs={n: t for n, t in data[0].items() if n != "labels"})
        notes.append(
            "a mask hides" in str(lnr.Pipeline.parse("place{to=peri fit=constants}").run(program, data).report)
        )
    assert notes == [False, True]


@pytest.mark.parametrize("held_out", ["bare.pt", "labeled.pt"])
def test_labels_at_their_own_tokens_are_moved_whatever_is_held_out(held_out: str, pair: Any, tmp_path: Path) -> None:
    """A model learned to predict the token that it reads; and what is held out may hold labels as the data do."""
    _, (teacher, student), batches = pair
    every = torch.cat([b["input_ids"] for b in batches])
    torch.save({"input_ids": every}, tmp_path / "bare.pt")
    torch.save({"input_ids": every, "labels": every}, tmp_path / "labeled.pt")
    found = [
        lnr.heal(teacher, student, str(tmp_path / data), held_out=str(tmp_path / held), **FEW)
        for data, held in (("labeled.pt", held_out), ("bare.pt", "bare.pt"))
    ]
    assert any("labels are the tokens they stand at" in note for note in found[0].report.notes)
    ours, theirs = ({name: row["mean"] for name, row in each.report.losses.items()} for each in found)
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_trained_in_float32(dtype: torch.dtype, progressive: bool, pair: Any) -> None:
    """Held in half, a step was lost where it was small, and a thousand times the rate where its square was 0."""
    module, _, batches = pair
    teacher = copy.deepcopy(module).to(dtype)
    student = lnr.convert(copy.deepcopy(teacher), "peri", kwargs=batches[0], live=True)
    wide = [copy.deepcopy(each).float() for each in (teacher, student)]
    how = {**FEW, "steps": 6, "lr": 1e-5, "progressive": progressive, "kwargs": batches[0]}
    found = [lnr.heal(*both, batches, **how).report.losses["healed"]["mean"] for both in ((teacher, student), wide)]
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert {p.dtype for p in (*student.parameters(), *teacher.parameters())} == {dtype}
    values = [torch.cat([p.to(dtype).flatten() for p in each.parameters()]) for each in (student, wide[1])]
    assert (values[0] == values[1]).float().mean() > 0.97


def test_a_run_that_never_began_leaves_none(pair: Any, tmp_path: Path) -> None:
    """What is refused before the training is asked for again with other options, in the same folder."""
    _, (teacher, student), batches = pair
    how = {**FEW, "run": tmp_path / "run", "progressive": True}
    with pytest.raises(lnr.LnrewriteError, match="LN004"):
        lnr.heal(teacher, student, batches, **how, stages=("mpl",))
    assert lnr.heal(teacher, student, batches, **how, stages=("mlp",)).report.losses["healed"]


@pytest.mark.parametrize("where", ["data", "held_out"])
def test_one_number_is_no_data(where: str, pair: Any, tmp_path: Path) -> None:
    _, (teacher, student), _ = pair
    np.save(tmp_path / "one.npy", np.int64(3))
    np.save(tmp_path / "rows.npy", np.arange(480).reshape(40, 12) % 60)
    given = {"data": str(tmp_path / "rows.npy"), "held_out": None} | {where: str(tmp_path / "one.npy")}
    with pytest.raises(lnr.LnrewriteError, match="LN022.*one.npy.*axes"):
        lnr.heal(teacher, student, **given, **FEW)


def test_feeds_repeat_themselves_and_hold_out() -> None:
    tokens = torch.arange(1000)
    data = Data("d", spec_of({"ids": tokens}), length=8)
    windows = Windows(tokens, data, 4, 4, 0)
    arrays = ArraySource({"ids": torch.arange(100).reshape(50, 2)}, data, 4, 4, 0)
    stream = IterableSource(lambda: ({"ids": torch.tensor([[i]])} for i in range(20)), data)
    for feed in (windows, arrays, stream):
        numbers = [feed.batch(i)["ids"] for i in range(30)]
        again = [feed.batch(i)["ids"] for i in range(7, 30)]
        assert all(torch.equal(a, b) for a, b in zip(numbers[7:], again, strict=True))
        kept = {int(v) for batch in feed.held_out for v in batch["ids"].flatten()}
        assert kept and kept.isdisjoint(int(v) for batch in numbers for v in batch.flatten())
    assert not torch.equal(windows.batch(0)["ids"], Windows(tokens, data, 4, 4, 1).batch(0)["ids"])
    epoch = torch.cat([arrays.batch(i)["ids"] for i in range(12)])
    assert len(set(epoch[:, 0].tolist())) == 48  # every row once before any row twice


def test_labels_that_fit_no_output_are_told() -> None:
    module, inputs = zoo.build("vit")
    teacher = lnr.capture(module, kwargs=inputs)
    student = lnr.Pipeline.parse("place{to=peri}").run(teacher).program
    rows = len(inputs["pixel_values"])
    data = [inputs | {"labels": torch.zeros(rows, 77, dtype=torch.int64)}] * 12
    with pytest.raises(lnr.LnrewriteError, match=r"LN022 labels.*\[\d+, 77\]"):
        lnr.heal(teacher, student, data, steps=1, batch_size=rows)


def test_ignored_targets_weigh_nothing() -> None:
    objective = Objective("", {}, True)
    batch = {TARGETS: torch.tensor([[1, -100], [-100, -100]])}
    scores = torch.zeros(2, 2, 4)
    assert objective.count(batch) == 1 and torch.allclose(objective.rows(scores, batch), torch.tensor([4.0]).log())
    masked = Objective("ids", {"mask": 0}, True)
    batch = {"ids": torch.tensor([[1, 2, 3]]), "mask": torch.tensor([[1, 1, 0]])}
    assert masked.count(batch) == 1
    teacher = torch.zeros(1, 3, 4)
    teacher[0, 2, 0] = 9.0  # a padded token, whose logits do not count
    assert masked.divergence(torch.zeros(1, 3, 4), teacher, batch) == 0


def test_windows_beyond_the_context_are_told(tmp_path: Path) -> None:
    """A table of positions inside a model says nothing of itself until it is run."""
    module, inputs = zoo.build("gpt2", depth=1, head=True)
    teacher = lnr.capture(module, kwargs=inputs)
    student = lnr.Pipeline.parse("place{to=peri}").run(teacher).program
    np.save(tmp_path / "t.npy", np.zeros(2000, int))
    with pytest.raises(lnr.LnrewriteError, match=r"LN022 .*fails on input_ids \[\d+, 200\].*context"):
        lnr.heal(teacher, student, str(tmp_path / "t.npy"), steps=1, length=200)


@pytest.mark.parametrize(("positions", "window"), [(200, 128), (90, 64)])
def test_windows_are_no_longer_than_the_context(positions: int, window: int, tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, n_positions=positions, vocab_size=100)
    ids = torch.arange(24).reshape(2, 12)
    teacher = lnr.capture(transformers.GPT2LMHeadModel(config).eval(), kwargs={"input_ids": ids})
    student = lnr.Pipeline.parse("place{to=peri}").run(teacher).program
    np.save(tmp_path / "t.npy", np.arange(4000) % 60)
    how = {"steps": 2, "batch_size": 4, "control": False, "lr": 1e-4}
    assert lnr.heal(teacher, student, str(tmp_path / "t.npy"), **how).report.tokens == 2 * 4 * window
    assert lnr.probe(teacher, str(tmp_path / "t.npy")).to_dict()["data"]
