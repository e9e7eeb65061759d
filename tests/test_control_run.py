"""A control that is kept in a folder of its own: healings of one teacher share it, and end as they do alone."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import lnrewrite as lnr
import zoo
from lnrewrite import demo
from lnrewrite.cli import main
from lnrewrite.healing.distributed import World
from lnrewrite.healing.snapshots import Snapshots
from lnrewrite.models.program import Program
from test_resuming import HOW, Killed, killed_at, same
from tiers import rows

OTHER = [
    {"lr": 1e-3},
    {"gain_lr": 3.0, "rehearse": 0.5},
    {"losses": "kl=1,hidden=2"},
    {"progressive": True, "stages": ("mlp", "attention"), "ramp": 0.5},
    {"drop_final": True},
    {"save_steps": 1},
]
"""Choices of a student that its control has nothing to do with."""


@pytest.fixture(scope="module")
def teacher() -> Program:
    return lnr.capture(zoo.short_gpt(), kwargs=demo.calibration(batches=2)[0])


@pytest.fixture(scope="module")
def students(teacher: Program) -> dict[str, Program]:
    data = demo.calibration(batches=2)
    return {
        to: lnr.Pipeline.parse(f"place{{to={to} fit=constants}}").run(teacher, data).program for to in ("peri", "none")
    }


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_bytes(demo.training_text()[:8_000])
    return str(path)


def phases(run: Path) -> set[str]:
    return {json.loads(line)["phase"] for line in (run / "log.jsonl").read_text().splitlines()}


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("other", rows(OTHER, sample=OTHER[3:4]), ids=str)
def test_healings_that_share_a_control_end_as_they_do_alone(
    other: dict[str, Any], teacher: Program, students: dict[str, Program], text: str, tmp_path: Path
) -> None:
    kept = tmp_path / "control"
    first = lnr.heal(teacher, students["peri"], text, **HOW, control_run=kept, run=tmp_path / "one")
    assert same(first, lnr.heal(teacher, students["peri"], text, **HOW))
    told = f"the control is of {kept}, trained before"
    assert told not in first.report.notes
    assert "control" in phases(kept) and phases(tmp_path / "one") == {"global rates", "global"}
    held = files(kept)
    for student in students.values():
        shared = lnr.heal(teacher, student, text, **HOW | other, control_run=kept, run=tmp_path / "two")
        assert same(shared, lnr.heal(teacher, student, text, **HOW | other))
        assert shared.report.rates["control"] == first.report.rates["control"]
        assert told in shared.report.notes
        assert "control" in (tmp_path / "two" / "loss.html").read_text()
    assert held == files(kept)


@pytest.mark.parametrize("phase", ["control", "global"])
def test_a_control_goes_on_where_the_healing_that_trained_it_was_stopped(
    phase: str, teacher: Program, students: dict[str, Program], text: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """With `resume`, or where another student takes it up."""
    kept, run = tmp_path / "control", tmp_path / "run"
    with monkeypatch.context() as patched, pytest.raises(Killed):
        killed_at(patched, phase, 3)
        lnr.heal(teacher, students["peri"], text, **HOW, control_run=kept, run=run)
    for to, how in (("none", {}), ("peri", {"run": run, "resume": True})):
        found = lnr.heal(teacher, students[to], text, **HOW, control_run=kept, **how)
        assert same(found, lnr.heal(teacher, students[to], text, **HOW))


def test_a_control_of_other_training_is_refused_and_left_alone(
    teacher: Program, students: dict[str, Program], text: str, tmp_path: Path
) -> None:
    kept, pair = tmp_path / "control", (teacher, students["peri"])
    lnr.heal(*pair, text, **HOW, control_run=kept)
    held = files(kept)
    Path(other := str(tmp_path / "other.txt")).write_bytes(demo.training_text()[8_000:16_000])
    seeded = lnr.capture(zoo.short_gpt(), kwargs=demo.calibration(batches=2)[0])
    with torch.no_grad():
        next(seeded.module().parameters()).mul_(2)
    moved = lnr.Pipeline.parse("place{to=peri fit=constants}").run(seeded, demo.calibration(batches=2)).program
    wrong: list[tuple[str, Any, str, dict[str, Any]]] = [
        ("seed", pair, text, {"seed": 1}),
        ("steps", pair, text, {"steps": 6}),
        ("control_lr", pair, text, {"control_lr": 1e-4}),
        ("train", pair, text, {"train": "norms"}),
        ("data", pair, other, {}),
        ("teacher", (seeded, moved), text, {}),
    ]
    for name, models, data, how in wrong:
        with pytest.raises(lnr.LnrewriteError, match=rf"LN605 .*control: .* other options \(.*\b{name}\b"):
            lnr.heal(*models, data, **HOW | how, control_run=kept)
    assert held == files(kept)
    lnr.heal(*pair, text, **HOW, control_run=kept)  # nobody holds it


def test_where_no_control_can_be_kept_that_is_said_before_the_models_are_read(tmp_path: Path) -> None:
    given: Any = ("teacher", "student", "data")
    with pytest.raises(lnr.UsageError, match="LN003 .*no control is trained"):
        lnr.heal(*given, control=False, control_run=tmp_path / "control")
    with pytest.raises(lnr.UsageError, match="LN003 .*the run itself is kept there"):
        lnr.heal(*given, run=tmp_path / "run", control_run=tmp_path / "x" / ".." / "run")
    command = [
        "heal",
        "demo:tinygpt",
        "demo:tinygpt",
        "--data",
        "lnrewrite.demo:calibration",
        "-o",
        str(tmp_path / "o.pt2"),
    ]
    for more in (["--no-control", "--control-run", str(tmp_path / "c")], ["--control-run", " "]):
        result = CliRunner().invoke(main, [*command, *more])
        assert result.exit_code == 2 and len(result.output.strip().splitlines()) == 1 and "LN003" in result.output
    assert not list(tmp_path.iterdir())


def test_a_control_is_waited_for(tmp_path: Path) -> None:
    """Two that heal at once: the second waits until the first has trained the control, and finds it."""
    alone = World(0, 1, torch.device("cpu"))

    def opened() -> Snapshots:
        return Snapshots(tmp_path / "control", alone, {"steps": 4}, resume=False, shared=True)

    first, found = opened(), list[Snapshots]()
    second = threading.Thread(target=lambda: found.append(opened()))
    second.start()
    second.join(0.5)
    assert second.is_alive() and not found
    first.log({"phase": "control", "step": 4})
    first.leave()
    second.join(60)
    assert ("control", 4) in found[0].before
    found[0].leave()
