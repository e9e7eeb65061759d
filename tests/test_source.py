"""A MODEL is identified once, at the door; files are rewritten from Python as from the command line; logs are quiet."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import lnrewrite as lnr
from lnrewrite.cli import main
from lnrewrite.loading import identify
from lnrewrite.loading.open import open_module
from lnrewrite.pipeline.sounding import Unproved


class Net(nn.Module):
    """A residual network of two blocks with LayerNorm before each branch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.maps = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, linear in zip(self.norms, self.maps, strict=True):
            x = x + linear(norm(x))
        return x


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    module = Net()
    for norm in module.norms:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    lnr.capture(module, (torch.randn(2, 8),)).save("net.pt2")
    return "net.pt2"


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the files that are looked at to see what they are."""
    seen: list[str] = []
    look = identify._file

    def counted(name: str, *rest: Any) -> Any:
        seen.append(name)
        return look(name, *rest)

    monkeypatch.setattr(identify, "_file", counted)
    return seen


def run(*words: str) -> None:
    done = CliRunner().invoke(main, list(words))
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("command", "models"),
    [
        (("inspect", "net.pt2"), 1),
        (("opt", "net.pt2", "--preset", "exact", "-o", "out.pt2"), 1),
        (("convert", "net.pt2", "--to", "peri", "-o", "out.pt2"), 1),
        (("export", "net.pt2", "--target", "generic", "-o", "out.onnx"), 1),
        (("verify", "net.pt2", "net.pt2"), 2),
    ],
)
def test_a_model_is_identified_once(command: tuple[str, ...], models: int, model: str, looks: list[str]) -> None:
    run(*command)
    assert looks == [model] * models


def test_what_took_the_place_of_a_model_since_is_looked_at_again(model: str, tmp_path: Path) -> None:
    """A second model is opened when the first was captured, which takes its time."""
    source = identify.identify(model)
    torch.save(Net(), "evil.pt")
    os.replace("evil.pt", model)
    with pytest.raises(lnr.LnrewriteError, match="LN012"):
        open_module(source)


def test_data_are_read_once_even_if_the_proof_fails(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which edit was wrong is found in a second run, on the same batches: an iterator gives them only once."""
    runs: list[object] = []
    run = lnr.Pipeline.run

    def failing(self: lnr.Pipeline, program: Any, calibrate: Any = None, *rest: Any, **how: Any) -> Any:
        runs.append(calibrate)
        if len(runs) == 1:
            raise Unproved("the model", "made up")
        return run(self, program, calibrate, *rest, **how)

    monkeypatch.setattr(lnr.Pipeline, "run", failing)
    batches = ({"x": torch.randn(2, 8)} for _ in range(4))
    assert lnr.rewrite_file(model, "fold-affine", "once.pt2", calibrate=batches).edits
    assert len(runs) == 2 and runs[0] is runs[1]


def test_a_preset_with_partial_succeeds_as_without(model: str) -> None:
    run("opt", model, "--preset", "inference", "--partial", "-o", "out.pt2")


def test_a_file_is_rewritten_from_python_as_from_the_command_line(model: str) -> None:
    run("opt", model, "--preset", "exact", "-o", "one.pt2")
    report = lnr.rewrite_file(Path(model), "exact", Path("two"))
    assert report.output == "two.pt2" and report.edits == 4
    assert Path("one.pt2").read_bytes() == Path("two.pt2").read_bytes()
    assert lnr.rewrite_file(model, "fold-affine", None).output is None
    with pytest.raises(lnr.LnrewriteError, match="LN025"):
        lnr.rewrite_file(model, "exact", "two.pt2")
    batches = [{"x": torch.randn(2, 8)} for _ in range(4)]
    report = lnr.rewrite_file(model, "place{to=peri}", "peri.pt2", calibrate=iter(batches))
    assert report.placement_after == "peri" and report.drift is not None


def test_as_a_library_it_is_silent_and_its_log_tells_how_far_it_is(
    model: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    lnr.rewrite_file(model, "exact", "quiet.pt2")
    assert capfd.readouterr() == ("", "")
    with caplog.at_level(logging.INFO, logger="lnrewrite"):
        lnr.rewrite_file(model, "exact", "told.pt2")
    assert [r.getMessage() for r in caplog.records if r.name == "lnrewrite"] == [
        "capturing net.pt2", "1/2 canonicalize", "2/2 fold-affine", "writing told.pt2",
    ]  # fmt: skip


def test_warnings_of_a_command_are_lines_on_stderr(model: str) -> None:
    done = CliRunner().invoke(main, ["opt", model, "--preset", "exact", "--no-verify", "-o", "bare"])
    assert done.exit_code == 0
    assert done.stderr.splitlines() == [
        "warning: nothing shows that bare.pt2 computes what net.pt2 does",
        "note: bare has no suffix: it is written as bare.pt2",
    ]
    assert not logging.getLogger("lnrewrite").handlers[1:]  # the command's handler went with it
