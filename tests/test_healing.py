"""Healing: the command and the call, what is trained, and what is refused or told."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lnrewrite as lnr
import zoo
from commands import fails, ok
from lnrewrite import demo
from lnrewrite.healing import snapshots
from lnrewrite.healing.config import HealingConfig
from lnrewrite.healing.distributed import World
from lnrewrite.healing.losses import Mix, Objective
from lnrewrite.healing.participant import Participant
from lnrewrite.healing.report import picture
from lnrewrite.healing.session import heal
from lnrewrite.healing.training import Phase
from lnrewrite.models.program import Program
from tiers import rows
from zoo import families

MODEL = "zoo:short_gpt"
ALONE = World(0, 1, torch.device("cpu"))
SMALL = {"batch_size": 4, "length": 32, "steps": 6, "save_steps": 2}


@pytest.fixture(scope="module")
def pair() -> tuple[Program, Program]:
    """Return two layers of demo:tinygpt and what calibration makes of them as peri."""
    data = demo.calibration(batches=4)
    teacher = lnr.capture(zoo.short_gpt(), kwargs=data[0])
    return teacher, lnr.Pipeline.parse("place{to=peri fit=constants}").run(teacher, data).program


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_bytes(demo.training_text()[:40_000])
    return str(path)


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory, pair: tuple[Program, Program]) -> str:
    path = tmp_path_factory.mktemp("student") / "peri.pt2"
    pair[1].save(path)
    return str(path)


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def changed(before: dict[str, torch.Tensor], module: nn.Module) -> set[str]:
    return {n for n, p in module.named_parameters() if not torch.equal(before[n], p)}


# ---- what a run gives ----


def test_a_matrix_that_was_scaled_takes_steps_of_its_own_size(pair: Any, text: str) -> None:
    teacher, name = pair[0], "blocks.1.mlp.up.weight"
    moved = {}
    for scale in (1, 16):
        student = teacher.apply([], "scaled")[0]
        with torch.no_grad():
            student.module().get_parameter(name).mul_(scale)
        before = weights(student.module())[name]
        healed = heal(
            teacher, student, text, **SMALL | {"steps": 1, "lr": 3e-4}, weight_decay=0.0, control=False
        ).program
        moved[scale] = (healed.module().get_parameter(name) - before).norm() / before.norm()
    assert float(moved[16]) == pytest.approx(float(moved[1]), rel=0.05) and moved[1] > 0


def test_a_short_run_comes_nearer_to_the_control_and_leaves_its_models_alone(pair: Any, text: str) -> None:
    teacher, student = pair
    before = weights(teacher.module()), weights(student.module())
    found = lnr.heal(teacher, student, text, steps=30, batch_size=8, lr=5e-4)
    losses = found.report.losses
    assert set(losses) == {"teacher", "converted", "healed", "control"}
    assert losses["healed"]["mean"] < losses["converted"]["mean"] - 0.01
    assert all(row["median"] <= row["mean"] <= row["p999"] for row in losses.values())
    assert found.report.gap == losses["healed"]["mean"] - losses["control"]["mean"]
    assert (found.report.placement_before, found.report.placement_after) == ("pre", "peri")
    assert not changed(before[0], teacher.module()) and not changed(before[1], student.module())
    assert not any("taper" in str(n.target) for n in found.program.module().graph.nodes)
    assert "healed against control" in str(found.report) and json.dumps(found.report.to_dict())


def test_progressive_starts_at_the_teacher_and_ends_without_a_trace(pair: Any, text: str) -> None:
    teacher, student = pair
    report = lnr.heal(teacher, student, text, **SMALL, progressive=True, lr=1e-9, control=False).report
    seen = report.losses
    assert report.notes and seen["healed"]["mean"] > seen["teacher"]["mean"]  # no weight moved, but the norms did
    found = lnr.heal(teacher, student, text, **SMALL, progressive=True, stages=("mlp", "attention"))
    assert found.report.placement_after == "peri" and found.program.inspect()["norms"]["total"] == 9
    assert {str(n.target) for n in found.program.module().graph.nodes if n.op == "call_function"} == {
        str(n.target) for n in student.module().graph.nodes if n.op == "call_function"
    }


GOING = ((False, False, 1), (True, False, 0), (True, True, 0))


@pytest.mark.parametrize(("drop", "progressive", "left"), rows(GOING, sample=GOING[2:]))
def test_every_norm_goes_and_the_onnx_file_holds_none(
    drop: bool, progressive: bool, left: int, pair: Any, text: str, tmp_path: Path
) -> None:
    import onnx

    teacher, _ = pair
    none = lnr.Pipeline.parse("place{to=none fit=constants}").run(teacher, demo.calibration(batches=4)).program
    found = lnr.heal(teacher, none, text, **SMALL, drop_final=drop, progressive=progressive, control=False)
    found.program.export(tmp_path / "none.onnx", target="generic", verify=False)
    operators = [node.op_type for node in onnx.load(tmp_path / "none.onnx").graph.node]
    assert sum("Normalization" in op for op in operators) == left
    assert not {"ReduceMean", "Sqrt", "Reciprocal"} & set(operators)


@pytest.mark.parametrize("train", ["norms", "touched", "all"])
def test_only_what_was_asked_for_is_trained(train: str, pair: Any, text: str) -> None:
    teacher, student = pair
    before = weights(student.module())
    found = lnr.heal(teacher, student, text, **SMALL, train=train, control=False)
    moved, names = changed(before, found.program.module()), set(before)
    norms = {n for n in names if "norm" in n}
    touched = norms | {n for n in names if "proj" in n or "down" in n}
    assert moved == {"norms": norms, "touched": touched, "all": names}[train]
    assert found.report.trained["tensors"] == len(moved)
    held = {p.data_ptr() for p in teacher.module().parameters()}
    assert not held & {p.data_ptr() for p in found.program.module().parameters()}  # shared only while it trained


def test_the_local_phase_trains_what_the_conversion_changed(pair: Any, text: str, tmp_path: Path) -> None:
    teacher, student = pair
    how = {**SMALL, "steps": 1, "lr": 1e-3, "gain_lr": 10, "warmup": 0, "control": False}
    lnr.heal(teacher, student, text, **how, local_steps=12, run=tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    local = [row["hidden"] for row in rows if row["phase"] == "local"]
    assert len(local) == 12 and sum(local[-3:]) < sum(local[:3])
    assert {"step", "loss", "lr", "tokens", "tokens_per_second", "seconds_left"} <= set(rows[-1])
    page = (tmp_path / "run" / "loss.html").read_text()
    assert "<polyline" in page and "local" in page and "global" in page
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["log.jsonl", "loss.html"]


def test_gains_and_biases_never_decay(pair: Any) -> None:
    side = Participant.of(pair[1], ALONE)
    names = frozenset(side.named)
    where = ("global", 1, side, None, Objective("", {}, True))
    phase = Phase(*where, Mix(task=1), HealingConfig(weight_decay=0.1), names, sizes={}, lr=1e-3)
    decayed = {id(p) for g in phase.optimizer().param_groups if g["weight_decay"] for p in g["params"]}
    named = side.named
    assert {n for n, p in named.items() if id(p) in decayed} == {n for n, p in named.items() if p.dim() > 1}
    assert any("norm_out" in n for n, p in named.items() if id(p) not in decayed)


@pytest.mark.exhaustive
def test_a_living_module_is_healed_in_place() -> None:
    module, inputs = zoo.build("llama")
    teacher = lnr.convert(module, "peri", kwargs=inputs, live=True)  # any other placement: a pair is a pair
    batches = [
        {"input_ids": torch.randint(1, families.VOCAB, (4, 8), generator=torch.Generator().manual_seed(i))}
        for i in range(16)
    ]
    before = weights(teacher)
    found = lnr.heal(module, teacher, batches, kwargs=batches[0], steps=3, batch_size=4)
    assert found.module is teacher and changed(before, teacher) == set(before)
    out = teacher(**batches[1]).logits
    assert torch.allclose(out, found.program.module()(**batches[1]).logits, atol=1e-5)
    assert teacher.generate(batches[0]["input_ids"], max_new_tokens=3).shape == (4, 11)


def test_an_encoder_without_targets_is_distilled() -> None:
    module, inputs = zoo.build("bert")
    teacher = lnr.capture(module, kwargs=inputs)
    student = lnr.Pipeline.parse("place{to=pre}").run(teacher).program
    draw = torch.Generator().manual_seed(0)
    data = [
        {n: torch.randint(1, families.VOCAB, t.shape, generator=draw) if "ids" in n else t for n, t in inputs.items()}
        for _ in range(12)
    ]
    found = lnr.heal(teacher, student, data, steps=4, batch_size=len(next(iter(inputs.values()))), progressive=True)
    assert found.report.unit == "relative squared error" and "control" not in found.report.losses
    assert found.report.losses["teacher"]["mean"] == 0 and "no control" in " ".join(found.report.notes)
    with pytest.raises(lnr.UsageError, match="LN003"):
        lnr.heal(teacher, student, data, losses="task=1", steps=2)


# ---- what no run should come to ----


def test_a_loss_that_is_not_finite_stops_at_a_step_and_a_block(pair: Any, text: str, tmp_path: Path) -> None:
    how = {**SMALL, "steps": 8, "warmup": 0, "lr": 1e12, "save_steps": 1, "control": False}
    with pytest.raises(lnr.LnrewriteError, match=r"LN604 global step \d+.*blocks\.\d|outputs") as told:
        lnr.heal(*pair, text, **how, run=tmp_path / "run")
    step = int(told.value.what.split()[-1])
    assert [p.name for p in (tmp_path / "run").glob("global-*")] == [f"global-{step - 1:06d}"]


@pytest.mark.parametrize("how", [{"local_steps": 2}, {"losses": "hidden=1"}])
def test_a_training_that_could_change_nothing_is_refused_before(
    how: dict[str, Any], pair: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without norms in the blocks no state depends on a norm; the final one stands behind the last."""
    bare = lnr.Pipeline.parse("place{to=none fit=constants}").run(pair[0], demo.calibration(2)).program
    monkeypatch.setattr(snapshots.Snapshots, "log", lambda self, row: pytest.fail("it was trained"))
    with pytest.raises(lnr.UsageError, match="LN003 train=norms.*none of the losses"):
        lnr.heal(pair[0], bare, text, **SMALL, **how, train="norms", control=False)


@pytest.mark.parametrize("bad", [0, 2])
def test_the_micro_batch_whose_loss_is_not_finite_is_the_one_that_is_looked_at(
    bad: int, pair: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses are looked at once a step, when all micro-batches were seen."""
    terms, calls, looked = Phase.terms, list[Any](), list[Any]()

    def spoilt(self: Phase, batch: Any, targets: float) -> Any:
        calls.append(batch["input_ids"])
        return {n: t * (math.nan if len(calls) == bad + 1 else 1) for n, t in terms(self, batch, targets).items()}

    def fail(self: Phase, step: int, batch: Any, what: str) -> None:
        looked.append((step, batch["input_ids"], what))
        raise KeyboardInterrupt

    monkeypatch.setattr(Phase, "terms", spoilt)
    monkeypatch.setattr(Phase, "check", lambda self, source, world: None)  # it looks at losses, too
    monkeypatch.setattr(Phase, "fail", fail)
    with pytest.raises(KeyboardInterrupt):
        lnr.heal(*pair, text, **SMALL, accumulate=4, control=False)
    ((step, batch, what),) = looked
    assert step == 0 and len(calls) == 4 and torch.equal(batch, calls[bad]) and what == "the loss"


# ---- many processes ----


def test_rows_are_shared_evenly_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(lnr.UsageError, match="LN003.*3 rows.*2 processes"):
        World.join("cpu", 3)


def test_bf16_and_recomputing_train_too(pair: Any, text: str) -> None:
    plain, low = (
        lnr.heal(*pair, text, **SMALL, control=False, bf16=b, gradient_checkpointing=b).report for b in (False, True)
    )
    assert abs(plain.losses["healed"]["mean"] - low.losses["healed"]["mean"]) < 0.02


# ---- data ----


def labelled() -> list[dict[str, torch.Tensor]]:
    """Give batches whose targets are the tokens themselves, every other one ignored."""
    found = []
    for i in range(20):
        ids = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(i))
        labels = ids.clone()
        labels[:, ::2] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def test_labels_are_targets(pair: Any) -> None:
    found = lnr.heal(*pair, labelled(), steps=4, batch_size=4, losses="task=1")
    assert found.report.targets == 6 * 4 * 8 and found.report.losses["healed"]["mean"] > 1


def test_token_arrays_are_cut_into_windows(pair: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.frombuffer(demo.training_text(20_000), dtype=np.uint8).astype(np.uint16))
    found = lnr.heal(*pair, str(tmp_path / "t.npy"), **SMALL, control=False)
    assert found.report.tokens == 6 * 4 * 32


def test_wrong_data_are_told_before_anything_is_trained(pair: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "short.txt").write_bytes(b"too short")
    torch.save({"input_ids": torch.full((40, 8), 300)}, tmp_path / "ids.pt")
    torch.save({"input_ids": torch.zeros(40, 1, dtype=torch.int64)}, tmp_path / "one.pt")
    torch.save({"input_ids": torch.zeros(5, 8, dtype=torch.int64)}, tmp_path / "few.pt")
    wrong = {
        "short.txt": "9 tokens",
        "ids.pt": "holds 300",
        "one.pt": "one token",
        "few.pt": "5 samples",
        "no.txt": "no such",
    }
    for name, words in wrong.items():
        with pytest.raises(lnr.LnrewriteError, match=rf"LN022.*{words}"):
            lnr.heal(*pair, str(tmp_path / name), steps=2, batch_size=16)
    with pytest.raises(lnr.LnrewriteError, match="LN022"):
        lnr.heal(*pair, {"input_ids": torch.zeros(4, 8, dtype=torch.int64)}, steps=2)
    with pytest.raises(lnr.LnrewriteError, match="LN022.*no batches"):
        lnr.heal(*pair, [], steps=2)
    for choice in (
        {"train": "some"},
        {"losses": "kl=x"},
        {"losses": "task=0"},
        {"losses": "tusk=1"},
        {"losses": "kl=1,kl=2"},
        {"ramp": 0},
        {"local_steps": 2, "progressive": True},
        {"batch_size": 3, "accumulate": 2},
        {"stages": ("mlp",)},
        {"lr": -1},
    ):
        with pytest.raises(lnr.UsageError, match="LN003"):
            lnr.heal(*pair, text, **{"steps": 2, **choice})


def test_teacher_and_student_belong_together(pair: Any, text: str) -> None:
    other = lnr.capture(demo.tinygpt.TinyGPT(layers=3), kwargs=demo.calibration(1)[0])
    words = lnr.capture(demo.tinygpt.TinyGPT(vocab=300), kwargs=demo.calibration(1)[0])
    for student, why in ((other, "blocks differ"), (words, "vocabulary is")):
        with pytest.raises(lnr.LnrewriteError, match=f"LN601.*{why}"):
            lnr.heal(pair[0], student, text)


# ---- the command ----


def test_the_command_writes_a_model_and_tells_its_losses(student: str, text: str, tmp_path: Path) -> None:
    out = tmp_path / "healed.pt2"
    how = ("--data", text, "-o", out, "--steps", 4, "--batch-size", 4, "--length", 32)
    told = json.loads(ok("heal", MODEL, student, *how, "--json").stdout)
    assert told["output"] == str(out) and told["exactness"] == "learned" and told["placement_after"] == "peri"
    assert set(told["losses"]["healed"]) == {"mean", "median", "p999"}
    assert json.loads(ok("inspect", out, "--json").stdout)["placement"] == "peri"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["healed.pt2", "healed.pt2.run"]
    fails("LN025", 1, "heal", MODEL, student, *how)  # it is there already
    fails("LN022", 1, "heal", MODEL, student, "--data", "no.txt", "-o", "x.pt2")
    fails("LN003", 2, "heal", MODEL, student, *how, "--force", "--train", "some")


def test_the_picture_shows_every_phase() -> None:
    rows = [{"phase": p, "step": s, "loss": 1 / (s + 1)} for p in ("local", "global", "control") for s in range(5)]
    page = picture(rows, "a <b>")
    assert page.count("<polyline") == 3 and "a &lt;b&gt;" in page
    assert picture([], "nothing")
