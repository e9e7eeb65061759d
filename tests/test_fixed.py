"""A model that chooses by its data: captured on the path of its inputs, said everywhere, written only on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lnrewrite as lnr
from commands import fails, ok
from lnrewrite.errors import LnrewriteError
from tiers import rows
from zoo import choices

ON_MEAN = "`if h.mean() > 0:` (choices.py:"
INPUT = ("--input", "h=float32[batch,8,16]")


def inputs(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 8, choices.WIDTH, generator=torch.Generator().manual_seed(seed))


def captured(name: str, h: torch.Tensor) -> tuple[torch.nn.Module, lnr.Program]:
    module = choices.NETS[name]().eval()
    return module, lnr.capture(module, (h,))


# ---- the capture ----


@pytest.mark.parametrize(
    ("name", "sign"), rows([(c.__name__, s) for c in choices.FIXED for s in (1, -1)],
    sample=[("on_mean", 1), ("on_mean", -1), ("on_item", 1), ("on_float", -1), ("loop", 1), ("first", 1)])
)  # fmt: skip
def test_the_path_of_the_inputs_is_captured_and_another_is_refused(name: str, sign: int) -> None:
    module, program = captured(name, sign * inputs())
    assert program.fixed_paths and all("choices.py:" in path for path in program.fixed_paths)
    assert all(any(path in note for note in program.notes) for path in program.fixed_paths)
    graph = program.module()
    refused = 0
    with torch.no_grad():
        assert torch.allclose(graph(sign * inputs()), module(sign * inputs()), atol=1e-5)
        for factor in (1, -1, 5, -5, 0.01):
            try:
                found = graph(factor * inputs(1))
            except RuntimeError as error:
                assert program.fixed_paths[0].partition(" was ")[0] in str(error)
                refused += 1
                continue
            assert torch.allclose(found, module(factor * inputs(1)), atol=1e-4)
    assert refused


@pytest.mark.parametrize("name", rows([c.__name__ for c in choices.FREE], sample=["checked", "noisy"]))
def test_what_is_no_choice_by_data_is_not_called_one(name: str) -> None:
    _, program = captured(name, inputs())
    assert program.fixed_paths == () and program.notes == ()
    assert program.dynamic_axes()["h"].keys() == {0, 1}


@pytest.mark.parametrize("most", [7, 100, 4096])
def test_what_sizes_choose_otherwise_is_told(most: int) -> None:
    """What data that are made of sizes alone say (positions) is a choice where other sizes say something else."""

    def longer(net: torch.nn.Module, h: torch.Tensor) -> torch.Tensor:
        return 2 * h if torch.arange(h.shape[1]).max() >= most else h

    module, h = choices.Chooser(longer).eval(), inputs()
    program = lnr.capture(module, (h,))
    (path,) = program.fixed_paths
    assert path.startswith("`return 2 * h if torch.arange(h.shape[1]).max() >= most else h`")
    long = torch.randn(2, most + 1, choices.WIDTH)
    if most > 7:
        with pytest.raises(RuntimeError, match="fixed path"):
            program.module()(long)
    torch.testing.assert_close(program.module()(h), module(h))


def test_what_differs_from_its_module_on_other_inputs_alone_is_marked() -> None:
    _, program = captured("for_negative", inputs().abs())
    (path,) = program.fixed_paths
    assert "on other inputs of these shapes the module's outputs are" in path


def test_what_differs_from_its_module_on_its_own_inputs_is_refused() -> None:
    with pytest.raises(lnr.LnrewriteError, match="the same while it is exported") as error:
        captured("while_exported", inputs())
    assert error.value.code == "LN023"


def test_a_module_that_differs_from_itself_is_not_judged() -> None:
    _, program = captured("erratic", inputs())
    assert program.fixed_paths == ()
    assert any("could not be checked" in note for note in program.notes)


def test_the_fact_stays_with_the_program(tmp_path: Path) -> None:
    _, program = captured("on_mean", inputs())
    result = lnr.Pipeline.preset("exact").run(program, partial=True)
    assert result.report.edits
    result.program.save(tmp_path / "a.pt2")
    again = lnr.load(str(tmp_path / "a.pt2"))
    report = again.export(tmp_path / "a.onnx")
    written = lnr.load(str(tmp_path / "a.onnx"))
    for held in (program, result.program, result.report, again, report, written):
        assert held.fixed_paths == program.fixed_paths, held
        assert any(ON_MEAN in note for note in held.notes), held
    with pytest.warns(UserWarning, match="captured on one path"):
        lnr.convert(choices.mean(), "peri", args=(inputs(),))


def test_a_program_of_draft_export_says_so(tmp_path: Path) -> None:
    program = torch.export.draft_export(choices.mean().eval(), (inputs(),))
    torch.export.save(program, tmp_path / "draft.pt2")
    assert lnr.load(str(tmp_path / "draft.pt2")).fixed_paths


# ---- the commands ----

WRITING: dict[str, tuple[Any, ...]] = {
    "convert": ("--to", "peri", "-o", "out.pt2"),
    "opt": ("--preset", "exact", "-o", "out.pt2"),
    "export": ("--target", "cpu", "-o", "out.onnx"),
}


@pytest.mark.parametrize("command", rows(WRITING, sample=["opt"]))
def test_writing_needs_a_flag_and_the_report_says_why(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call = (command, "zoo.choices:mean", *WRITING[command], *INPUT)
    error = fails("LN033", 1, *call)
    assert ON_MEAN in error["why"] and "--accept-fixed-paths" in error["remedy"]
    accepted = (*call, "--accept-fixed-paths")
    assert "note: captured on one path" in ok(*accepted).stdout
    report = json.loads(ok(*accepted, "--force", "--json").stdout)
    assert any(ON_MEAN in note for note in report["notes"])
    assert any(ON_MEAN in path for path in report["fixed_paths"])


@pytest.mark.exhaustive
def test_commands_that_only_look_say_so_and_refuse_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ok("export", "zoo.choices:mean", *INPUT, "--target", "cpu", "-o", "a.onnx", "--accept-fixed-paths")
    looks = [
        ("inspect", "zoo.choices:mean", *INPUT),
        ("opt", "zoo.choices:mean", *INPUT, "--preset", "exact", "--dry-run"),
        ("verify", "zoo.choices:mean", "zoo.choices:mean", *INPUT),
        ("bench", "a.onnx", "--rounds", "1"),
    ]
    for call in looks:
        assert "note: captured on one path" in ok(*call).stdout, call
        assert any(ON_MEAN in note for note in json.loads(ok(*call, "--json").stdout)["notes"]), call


def test_inputs_of_another_path_are_not_called_bad_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = choices.mean().eval()
    other = next(h for h in (inputs(1) + 9, inputs(1) - 9) if _takes_another(module, h))
    np.savez("other.npz", h=other.numpy())
    call = ("convert", "zoo.choices:mean", *INPUT, "--to", "peri", "-o", "out.pt2", "--accept-fixed-paths")
    assert ON_MEAN in fails("LN033", 1, *call, "--calibrate", "other.npz")["why"]
    number = ("convert", "zoo.choices:number", *INPUT, "--to", "peri", "-o", "out.pt2", "--accept-fixed-paths")
    error = fails("LN033", 1, *number)  # the one made-up input on the path is the example; the result leaves it there
    assert error["what"] == "the result" and "choices.py:" in error["why"]


def _takes_another(module: torch.nn.Module, h: torch.Tensor) -> bool:
    try:
        lnr.load("zoo.choices:mean", inputs=[INPUT[1]]).module()(h)
    except RuntimeError:
        return True
    return False


def test_made_up_inputs_take_the_captured_path() -> None:
    _, program = captured("on_mean", inputs())
    batches = program.synthetic(0)
    assert len(batches) == 8
    for batch in batches:
        program.module()(**batch)


def test_none_on_the_path_is_an_error_that_blames_no_data() -> None:
    _, program = captured("on_float", inputs(7))
    with pytest.raises(LnrewriteError, match="LN033 synthetic inputs"):
        program.synthetic(0)
    assert lnr.Pipeline.preset("exact").run(program, partial=True).report.edits  # proved on the example inputs
