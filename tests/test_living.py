"""Students that are modules in Python: on every option they compute the healed network, or are refused before."""

from __future__ import annotations

import copy
import inspect
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lnrewrite as lnr
import zoo
from lnrewrite import demo
from lnrewrite.healing.config import HealingConfig
from lnrewrite.healing.session import Healed
from lnrewrite.healing.snapshots import Snapshots
from test_resuming import Killed, killed_at
from tiers import rows
from zoo import families

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms": {"train": "norms"},
    "touched": {"train": "touched"},
    "local": {"local_steps": 2},
    "progressive": {"progressive": True},
    "stages": {"progressive": True, "stages": ("mlp", "attention")},
    "drop_final": {"drop_final": True},
    "all gone": {"progressive": True, "drop_final": True},
}
"""Those that say what moves and what is trained; these have all models and placements."""

OTHERS: dict[str, dict[str, Any]] = {
    "tokens": {"tokens": 2000, "steps": None},
    "losses": {"losses": "task=1,hidden=2,spread=0.3"},
    "no task": {"losses": "kl=1"},
    "control": {"control": True, "control_lr": 1e-3},
    "a shared control": {"control": True, "control_run": "control"},
    "accumulate": {"accumulate": 2},
    "rates": {"lr": 2e-3, "gain_lr": 3.0, "warmup": 1, "weight_decay": 0.0, "max_grad_norm": 0.1},
    "rehearse": {"rehearse": 0.5},
    "bf16": {"bf16": True},
    "recomputed": {"gradient_checkpointing": True},
    "kept": {"run": "run", "save_steps": 1, "restart": True},
    "ramp": {"progressive": True, "ramp": 0.3, "seed": 1},
    "written": {"output": "healed.pt2", "force": False},
    "held out": {"held_out": "held.pt", "device": "cpu"},
    "a text": {"data": "t.txt", "length": 8, "tokenizer": None, "field": "text"},
}
ELSEWHERE = {"batch_size", "kwargs", "config", "choices", "resume"}  # of every run here; and the last test
MODELS = ("tinygpt", "llama", "gpt2", "opt")
HOW: dict[str, Any] = {"steps": 3, "lr": 1e-3, "warmup": 0, "control": False}


def pair(name: str, to: str) -> tuple[nn.Module, nn.Module, list[dict[str, Any]]]:
    """Return a teacher, the student that a conversion in place makes of it, and batches."""
    if name == "tinygpt":
        teacher: Any = zoo.short_gpt()
        batches: list[dict[str, Any]] = demo.calibration(12)
    else:
        teacher = zoo.build(name, depth=1, head=True)[0]
        draw = torch.Generator().manual_seed(0)
        batches = [{"input_ids": torch.randint(3, families.VOCAB, (4, 8), generator=draw)} for _ in range(12)]
    student = lnr.convert(teacher, to, kwargs=batches[0], calibrate=batches[:2], live=True)
    return teacher, student, batches


def heal(teacher: Any, student: Any, batches: list[dict[str, Any]], data: Any = None, **how: Any) -> Healed:
    rows = len(next(iter(batches[0].values())))
    return lnr.heal(teacher, student, data or batches, kwargs=batches[0], batch_size=rows, **HOW | how)


def outputs(module: Any, batch: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        found = module(**batch)
    return found if isinstance(found, torch.Tensor) else found.logits


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() <= 1e-5 * one.abs().max())


CASES = [*product(MODELS, ("post", "peri", "output", "none"), OPTIONS), *product(MODELS[:1], ("peri",), OTHERS)]
SAMPLE = [
    ("tinygpt", "peri", "plain"),
    ("llama", "peri", "progressive"),
    ("opt", "none", "drop_final"),
]


@pytest.mark.parametrize(("name", "to", "option"), rows(CASES, sample=SAMPLE))
def test_the_student_computes_what_was_healed_or_is_refused_before(
    name: str, to: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, student, batches = pair(name, to)
    monkeypatch.chdir(tmp_path)
    torch.save({"input_ids": torch.cat([batch["input_ids"] for batch in batches])}, "held.pt")
    Path("t.txt").write_bytes(demo.training_text(4_000))
    own = dict(student.named_parameters())
    state = {n: p.detach().clone() for n, p in teacher.named_parameters()}
    start = outputs(student, batches[0])
    trained: list[object] = []
    log = Snapshots.log
    monkeypatch.setattr(Snapshots, "log", lambda self, row: (trained.append(row), log(self, row))[1])
    try:
        found = heal(teacher, student, batches, **(OPTIONS | OTHERS)[option])
    except lnr.LnrewriteError as error:
        assert option in OPTIONS and error.code == "LN602" and not trained, error
        assert torch.equal(outputs(student, batches[0]), start)
        return
    assert found.module is student and trained
    for batch in batches:
        assert near(outputs(found.program.module(), batch), outputs(student, batch))
    assert not torch.equal(outputs(student, batches[0]), start)
    now = dict(student.named_parameters())
    assert all(now[n] is own[n] for n in now.keys() & own.keys() if now[n].shape == own[n].shape)
    assert all(torch.equal(p, state[n]) for n, p in teacher.named_parameters())
    assert near(outputs(copy.deepcopy(student), batches[1]), outputs(student, batches[1]))
    if hasattr(student, "save_pretrained"):
        student.save_pretrained(tmp_path / "saved")
        again = lnr.load(tmp_path / "saved")
        assert near(outputs(again.module(), batches[1]), outputs(student, batches[1]))


def test_every_option_of_a_healing_is_among_these() -> None:
    """One that is new has to be seen on a module too."""
    seen = {key for how in (OPTIONS | OTHERS).values() for key in how} | HOW.keys() | ELSEWHERE
    given = inspect.signature(lnr.heal).parameters.keys() - {"teacher", "student"}
    assert seen >= {field.name for field in fields(HealingConfig)} | given


@pytest.mark.exhaustive
def test_a_run_of_a_module_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, student, batches = pair("tinygpt", "peri")
    whole, again = (copy.deepcopy(student) for _ in range(2))
    heal(teacher, whole, batches, save_steps=1)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        killed_at(patched, "global", 3)
        heal(teacher, student, batches, save_steps=1, run=tmp_path / "run")
    heal(teacher, again, batches, save_steps=1, run=tmp_path / "run", resume=True)
    assert torch.equal(outputs(whole, batches[0]), outputs(again, batches[0]))
    assert not torch.equal(outputs(whole, batches[0]), outputs(student, batches[0]))


def test_a_student_that_cannot_follow_is_refused_before(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, student, batches = pair("tinygpt", "peri")
    monkeypatch.setattr(Snapshots, "log", lambda self, row: pytest.fail("it was trained"))
    program = lnr.capture(teacher, kwargs=batches[0])
    with pytest.raises(lnr.LnrewriteError, match="LN602 .*from the teacher on.*as a module too"):
        heal(program, student, batches, progressive=True)


def test_what_a_graph_does_not_hold_stays_as_it_was() -> None:
    teacher, student, batches = pair("tinygpt", "peri")
    student.spare = nn.Linear(3, 3)  # no forward uses it
    spare = student.spare.weight.detach().clone()
    found = heal(teacher, student, batches)
    assert found.module is student and torch.equal(student.spare.weight, spare)


@pytest.mark.parametrize("option", ["plain", "progressive"])
def test_a_module_that_is_not_its_graph_is_refused_before(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that its capture did not see changes what it computes: the capture itself is compared with it."""
    teacher, student, batches = pair("tinygpt", "peri")
    monkeypatch.setattr(Snapshots, "log", lambda self, row: pytest.fail("it was trained"))
    for model in (teacher, student):
        model.register_forward_hook(lambda m, a, output: output if torch.compiler.is_exporting() else 1.01 * output)
    with pytest.raises(lnr.LnrewriteError, match=r"LN023 .*outputs are .* from the module's"):
        heal(teacher, student, batches, **OPTIONS[option])


def test_a_module_that_computes_something_else_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The student is compared with its graph on real data after the training, too."""
    teacher, student, batches = pair("tinygpt", "peri")
    log = Snapshots.log

    def spoil(self: Snapshots, row: Any) -> None:
        log(self, row)
        student.register_forward_hook(lambda m, a, output: output * 1.01)

    monkeypatch.setattr(Snapshots, "log", spoil)
    with pytest.raises(lnr.LnrewriteError, match="LN313 .*from those of its graph"):
        heal(teacher, student, batches)
