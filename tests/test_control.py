"""The control teaches the student, and the student starts with what training changed in the control."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lnrewrite as lnr
import zoo
from lnrewrite import demo

HOW: dict[str, Any] = {"batch_size": 4, "length": 16, "steps": 6, "warmup": 0, "control_lr": 1e-3}
HOW |= {"lr": 1e-12, "gain_lr": 1.0}
"""So low a rate that a student stays where it starts."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_bytes(demo.training_text(8_000))
    return str(path)


def losses(found: Any) -> tuple[float, ...]:
    return tuple(found.report.losses[name]["mean"] for name in ("teacher", "control", "healed"))


def test_a_student_starts_with_what_its_teacher_learned(text: str) -> None:
    """A copy of the teacher is the control then."""
    teacher = lnr.capture(zoo.short_gpt(), kwargs=demo.calibration(1)[0])
    was, control, healed = losses(lnr.heal(teacher, teacher.apply([], "heal")[0], text, **HOW))
    assert healed == pytest.approx(control, abs=1e-5) and abs(control - was) > 1e-3


def test_a_student_that_it_takes_further_away_stays(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the student's weights are in a basis of their own."""
    teacher = lnr.capture(zoo.short_gpt(), kwargs=demo.calibration(1)[0])
    student = teacher.apply([], "heal")[0]
    matrices = {n: -3.0 for n, p in student.module().named_parameters() if p.dim() >= 2}
    monkeypatch.setattr("lnrewrite.healing.running.grown", lambda one, teacher: matrices)
    found = lnr.heal(teacher, student, text, **HOW | {"weight_decay": 0.0})
    before = dict(student.module().named_parameters())
    assert all(torch.allclose(p, before[n], atol=1e-8) for n, p in found.program.module().named_parameters())


def test_the_control_comes_first(text: str, tmp_path: Path) -> None:
    teacher = lnr.capture(zoo.short_gpt(), kwargs=demo.calibration(1)[0])
    student = lnr.Pipeline.parse("place{to=none fit=constants}").run(teacher, demo.calibration(2)).program
    lnr.heal(teacher, student, text, **HOW, local_steps=2, run=tmp_path / "run")
    log = (tmp_path / "run" / "log.jsonl").read_text()
    assert log.index('"control"') < log.index('"local"') < log.index('"global"')
