"""Rehearsal: which rows are replaced, by what, and that it keeps what the data lack."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lnrewrite as lnr
import zoo
from lnrewrite import demo
from lnrewrite.backends.torch.fused import IGNORED
from lnrewrite.healing.config import HealingConfig
from lnrewrite.healing.losses import Objective
from lnrewrite.healing.rehearsal import Rehearsed, known
from lnrewrite.healing.sources import TARGETS, WHOLE, BatchSource, Tensors

LIMITS = {"input_ids": 900, "token_type_ids": 2}


class Given(BatchSource):
    """Give rows of ascending tokens, the last of the first row masked."""

    def __init__(self, rows: int, labels: Tensor | None = None) -> None:
        ids = torch.arange(rows * 64).reshape(rows, 64)
        mask = torch.ones_like(ids)
        mask[0, -1] = 0
        self.whole = {"input_ids": ids, "token_type_ids": ids % 2, "attention_mask": mask}
        self.whole |= {} if labels is None else {TARGETS: labels}
        self.held_out = [self.whole]

    def rows_of(self, index: int) -> int:
        return len(self.whole["input_ids"])

    def batch(self, index: int, rows: slice = WHOLE) -> Tensors:
        return {name: t[rows] for name, t in self.whole.items()}


def rehearsed(feed: BatchSource, share: float = 0.25, ids: str = "input_ids") -> Rehearsed:
    return Rehearsed(feed, share, LIMITS, Objective(ids, {"attention_mask": 0}, True), torch.ones(900), seed=3)


def test_the_last_rows_hold_random_tokens_and_no_target() -> None:
    given = Given(8)
    before = {name: t.clone() for name, t in given.whole.items()}
    batch = rehearsed(given).batch(5)
    ids = batch["input_ids"]
    assert torch.equal(ids[:6], before["input_ids"][:6])
    other = ids[6:] != before["input_ids"][6:]
    assert other.any(1).all() and ids.max() < 900
    assert all(torch.equal(batch[name], before[name]) for name in ("token_type_ids", "attention_mask"))
    assert torch.equal(batch[TARGETS][0, :62], before["input_ids"][0, 1:63])
    assert batch[TARGETS][0, 62] == IGNORED  # the token that follows is masked
    assert (batch[TARGETS][:, -1] == IGNORED).all() and (batch[TARGETS][6:] == IGNORED).all()
    assert all(torch.equal(t, before[name]) for name, t in given.whole.items())  # the data are left alone


def test_every_token_comes_and_rows_from_hardly_to_wholly_random() -> None:
    feed = rehearsed(Given(8), 0.5)
    rows = torch.cat([feed.batch(i)["input_ids"][4:] for i in range(200)])
    assert len(rows.unique()) == 900 > 8 * 64  # the data hold fewer
    random = (rows != feed.held_out[0]["input_ids"][4:].repeat(200, 1)).float().mean(1)
    assert random.min() < 0.05 and random.max() > 0.95 and random.mean().item() == pytest.approx(0.5, abs=0.05)


def scores(ids: Tensor, width: int) -> Tensor:
    """Expect a token of a hundred behind each, one of them more often, and all others never."""
    found = torch.full((*ids.shape, width), -40.0)
    found[..., :100] = 0.0
    found[..., 7] = 2.0
    return found


def test_tokens_come_as_the_teacher_expects_them_evened_out() -> None:
    """What it never learned has no answer worth copying: drawn alike, such tokens ruin a model whose norms go."""
    teacher: Any = SimpleNamespace(outputs=lambda batch: (scores(batch["input_ids"], 960),))  # padded beyond the table
    odds = known(teacher, given := Given(8), 900)
    assert len(odds) == 900 and odds[100:].sum() < 1e-6 * odds[:100].sum()
    assert (odds[7] / odds[8]).item() == pytest.approx(torch.tensor(1.0).exp().item())
    objective = Objective("input_ids", {"attention_mask": 0}, True)
    feed = Rehearsed(given, 0.5, LIMITS, objective, odds, 3)
    rows = torch.cat([feed.batch(i)["input_ids"][4:] for i in range(50)])
    new = rows[rows != given.whole["input_ids"][4:].repeat(50, 1)]
    assert new.max() < 100 and len(new.unique()) == 100 and (new == 7).float().mean() > 1.5 / 100


@pytest.mark.parametrize("shown", [torch.zeros(2, 64, 32), torch.zeros(2, 2), torch.full((2, 64, 900), torch.nan)])
def test_all_tokens_come_where_none_is_scored(shown: Tensor) -> None:
    """States, classes, and a teacher that gives no numbers."""
    teacher: Any = SimpleNamespace(outputs=lambda batch: (shown,))
    assert torch.equal(known(teacher, Given(8), 900), torch.ones(900))


def test_a_batch_is_a_function_of_its_number() -> None:
    feeds = [rehearsed(Given(4)) for _ in range(2)]
    first = [feeds[0].batch(i)["input_ids"] for i in range(4)]
    assert torch.equal(feeds[1].batch(2)["input_ids"], first[2])
    assert not torch.equal(first[1], first[2])


@pytest.mark.parametrize(
    ("rows", "share", "kept"),
    [(8, 0.125, [7, 7, 7, 7]), (8, 0.03125, [8, 8, 8, 7]), (4, 0.375, [3, 2, 3, 2]), (2, 0.9, [1, 1, 1, 1])],
)
def test_the_share_is_that_of_all_batches_and_a_row_of_data_is_kept(rows: int, share: float, kept: list[int]) -> None:
    feed = rehearsed(Given(rows), share)
    assert [int((feed.batch(i)[TARGETS][:, 0] != IGNORED).sum()) for i in range(4)] == kept


def test_given_labels_stay_and_without_a_task_there_are_none() -> None:
    labels = torch.arange(4)
    assert rehearsed(Given(4, labels), ids="").batch(0)[TARGETS].tolist() == [0, 1, 2, IGNORED]
    assert labels.tolist() == [0, 1, 2, 3]
    assert TARGETS not in rehearsed(Given(4), ids="").batch(0)


@pytest.mark.exhaustive
def test_what_the_data_lack_is_kept(tmp_path: Path) -> None:
    """The data are ASCII; how far are teacher and student apart on windows of other bytes?"""
    text = tmp_path / "ascii.txt"
    text.write_bytes(bytes(b for b in demo.training_text() if b < 128)[:30_000])
    calibration = demo.calibration()
    teacher = lnr.capture(zoo.short_gpt(), kwargs=calibration[0])
    student = lnr.Pipeline.parse("place{to=peri fit=constants}").run(teacher, calibration).program
    others = torch.randint(128, 256, (16, 64), generator=torch.Generator().manual_seed(1))
    objective = Objective("input_ids", {}, True)

    def apart(rehearse: float) -> float:
        how = {"steps": 40, "batch_size": 8, "length": 64, "lr": 1e-3, "control": False, "rehearse": rehearse}
        healed = lnr.heal(teacher, student, str(text), **how).program.module()
        with torch.no_grad():
            pair = (program(input_ids=others) for program in (healed, teacher.module()))
            return float(objective.divergence(*pair, {"input_ids": others}))

    assert apart(0.125) < 0.6 * apart(0.0)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_is_below_one(share: float) -> None:
    with pytest.raises(lnr.UsageError, match="LN003 rehearse"):
        HealingConfig(rehearse=share)
