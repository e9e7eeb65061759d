"""What healing chooses by itself, and how sure its figures are."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

import lnrewrite as lnr
import zoo
from lnrewrite import demo
from lnrewrite.healing.losses import Measured, Objective, losses_of
from lnrewrite.models.program import Program

SMALL = {"batch_size": 4, "length": 32, "steps": 4}


@pytest.fixture(scope="module")
def pair() -> tuple[Program, Program]:
    """Return two layers of demo:tinygpt and what calibration makes of them as peri."""
    data = demo.calibration(batches=4)
    teacher = lnr.capture(zoo.short_gpt(), kwargs=data[0])
    return teacher, lnr.Pipeline.parse("place{to=peri}").run(teacher, data).program


# ---- gaps and their errors ----


@pytest.mark.parametrize("seed", range(3))
def test_the_error_of_a_gap_is_over_windows_and_not_over_targets(seed: int) -> None:
    """Targets of a window go together: the gaps of many draws spread as the error of each says."""
    draw = np.random.default_rng(seed)
    windows = np.repeat(np.arange(30), draw.integers(5, 20, size=30))
    gaps, errors = [], []
    for _ in range(400):
        shared = draw.normal(0, 1, 30)[windows]  # as one window, so its targets
        ours = Measured(3 + shared + draw.normal(0, 0.1, len(windows)), windows)
        gap, error = ours.minus(Measured(np.full(len(windows), 2.5), windows))
        gaps.append(gap)
        errors.append(error or 0.0)
    assert np.mean(gaps) == pytest.approx(0.5, abs=0.05)
    assert np.mean(errors) == pytest.approx(np.std(gaps), rel=0.15)
    assert np.std(gaps) > 3 * 1 / np.sqrt(len(windows))  # what counting targets would give


def test_one_window_has_no_error() -> None:
    one = Measured(np.arange(4.0), np.zeros(4, dtype=np.int64))
    assert one.minus(one) == (0.0, None)


def test_targets_are_counted_to_their_windows(pair: Any) -> None:
    """Ignored targets leave a window with fewer; one without any is not there."""
    ids = torch.randint(256, (5, 16), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.arange(16) < torch.tensor([[4], [16], [0], [15], [8]]), -100)
    batches = [{"input_ids": ids[i : i + 2], "labels": labels[i : i + 2]} for i in (0, 2, 4)]
    module = pair[0].module()
    found = losses_of(module, Objective("", (), True), batches, module)
    assert np.bincount(found.windows).tolist() == [12, 0, 16, 1, 8]
    alone = losses_of(module, Objective("", (), True), [{"input_ids": ids[4:], "labels": labels[4:]}], module)
    assert np.allclose(found.values[-8:], alone.values, atol=1e-5)


def test_the_report_tells_both_gaps_with_their_errors(pair: Any, tmp_path: Any) -> None:
    (tmp_path / "t.txt").write_bytes(demo.training_text(20_000))
    report = lnr.heal(*pair, str(tmp_path / "t.txt"), **SMALL).report
    told = report.to_dict()
    losses = {name: row["mean"] for name, row in told["losses"].items()}
    assert told["gap"] == losses["healed"] - losses["control"]
    assert told["gap_to_teacher"] == losses["healed"] - losses["teacher"]
    assert 0 < told["gap_standard_error"] < 0.1 and 0 < told["gap_to_teacher_standard_error"] < 0.1
    text = str(report)
    assert f"{told['gap']:+.4f} ± {told['gap_standard_error']:.4f}" in text and "the teacher as it was" in text
    assert json.dumps(told, allow_nan=False)
