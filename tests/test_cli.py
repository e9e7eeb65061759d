"""The command line as people and scripts use it: exit codes, one line per failure, one JSON object, files whole or not.

Models that these tests name as `test_cli:...` stand in this file: the tests' folder is importable.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.shell_completion import ShellComplete
from torch import nn

import lnrewrite
from commands import fails, ok, run
from killing import Layer
from lnrewrite import demo
from lnrewrite.cli import console, main
from lnrewrite.cli.tables import WIDTH, drawing, placement_map
from lnrewrite.errors import Code
from lnrewrite.pipeline import Pipeline

HERE = Path(__file__).parent
TINY = "demo:tinygpt"


# ---- models that the tests name ----


class Deep(nn.Module):
    """A stack of `count` branches with a long name, behind a linear layer."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.a_rather_long_name_for_a_stack_of_residual_layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.a_rather_long_name_for_a_stack_of_residual_layers:
            x = layer(x)
        return x


def deep() -> nn.Module:
    torch.manual_seed(0)
    return Deep(40)


def shallow() -> nn.Module:
    torch.manual_seed(0)
    return Deep(2)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def not_finite() -> nn.Module:
    model = shallow()
    nn.init.constant_(model.embed.bias, float("nan"))  # type: ignore[union-attr, arg-type]
    return model


class Unexportable(nn.Module):
    """Leave torch in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_numpy(self.linear(x).detach().numpy().copy())


def talkative() -> nn.Module:
    print("this would spoil the JSON")
    return shallow()


def ctrl_c() -> Iterator[dict[str, torch.Tensor]]:
    """Give one batch, then press Ctrl-C."""
    yield {"x": torch.randn(2, 3, 4)}
    os.kill(os.getpid(), signal.SIGINT)
    yield {"x": torch.randn(2, 3, 4)}


# ---- helpers ----


@pytest.fixture(autouse=True)
def in_empty_folder(demo_captured_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test where nothing lies; names of this file stay importable."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(HERE))


# ---- what commands answer ----


def test_inspect_draws_a_map_and_answers_in_json() -> None:
    shown = ok("inspect", TINY).stdout
    assert shown.startswith("demo, pre: 1 stream, 12 blocks, 13 norms (13 layer; 13 on a stream)\n")
    assert "   0  blocks.0.attn  x ─●─ attn  ─── + ───  pre     layer 1e-05\n" in shown
    found = json.loads(ok("inspect", TINY, "--json").stdout)
    assert found == lnrewrite.load(TINY).inspect()
    assert ok("inspect", TINY, "-q").stdout == "pre\n"


@pytest.mark.exhaustive
def test_inspect_folds_long_models_within_100_columns() -> None:
    result = ok("inspect", "test_cli:deep")
    assert "× 40" in result.stdout and "0…39" in result.stdout
    assert len(result.stdout.splitlines()) < 10
    whole = ok("inspect", "test_cli:deep", "-v")
    assert whole.stdout.count(" pre ") == 40
    assert max(map(len, (result.stdout + whole.stdout).splitlines())) <= WIDTH


def _block(name: str, kind: str, *where: str, **more: Any) -> dict[str, Any]:
    norms = [{"where": w, "kind": "rms", "eps": 1e-6, "gamma": True, "beta": False} for w in where]
    return {"name": name, "kind": kind, "placement": "x", "parallel_group": None, "norms": norms, **more}


def test_marks_stand_where_the_norms_are() -> None:
    assert drawing(_block("a", "attention", "in", "inner", "out")) == "x ─●─ attn• ─●─ + ───"
    assert drawing(_block("b", "other", "post")) == "x ─── f     ─── + ─●─"


def test_alike_layers_fold_whatever_their_period() -> None:
    layers = [
        [
            _block(f"h.{i}.self", "attention", "in"),
            _block(f"h.{i}.cross", "attention", "in"),
            _block(f"h.{i}.mlp", "mlp"),
        ]
        for i in range(12)
    ]
    blocks = [_block("first", "conv"), *(b for layer in layers for b in layer), _block("last", "mlp", scale=0.5)]
    refusal = {"code": "LN204", "site": "s", "why": "a long reason " * 12, "remedy": "do something else"}
    stream = {"name": "s", "width": 8, "blocks": blocks, "embedding_norm": None, "final_norm": None}
    norms = {"total": 24, "on_stream": 24, "kinds": {"rms": 24}}
    found = {"format": "f", "placement": "mixed", "streams": [stream], "norms": norms, "refusals": [refusal]}
    lines = placement_map(found).splitlines()
    rows = [line for line in lines if " + ─" in line]
    assert [row.split()[1] for row in rows] == ["first", "h.0…11.self", "h.0…11.cross", "h.0…11.mlp", "last"]
    assert rows[1].endswith("rms 1e-06, × 12") and rows[4].endswith("skip × 0.5")
    assert any(line.startswith("  LN204 s:") for line in lines) and max(map(len, lines)) <= WIDTH


def test_convert_writes_what_verify_compares() -> None:
    data = ("--calibrate", "lnrewrite.demo:calibration", "--fit", "constants")
    shown = ok("convert", TINY, "--to", "peri", "-o", "peri", *data).stdout
    start = "pipeline   place{to=peri fit=constants}\nwritten    peri.pt2\nplacement  pre -> peri\n"
    assert shown.startswith(start)
    assert "lnrewrite.demo:calibration data, held out" in " ".join(shown.split())
    assert json.loads(ok("inspect", "peri.pt2", "--json").stdout)["placement"] == "peri"
    assert ok("verify", TINY, "peri.pt2", "--tolerance", "calibrated", "-q").stdout == "within\n"
    found = json.loads(ok("verify", TINY, "peri.pt2", "--json", code=4).stdout)
    assert found["verdict"] == "different"
    assert set(found) == {"verdict", "max_abs", "max_rel", "cosine", "shapes_tried", "dtype", "notes"}


def test_opt_runs_presets_and_dry_runs() -> None:
    report = json.loads(ok("opt", TINY, "--preset", "exact", "-o", "exact.pt2", "--json").stdout)
    assert (report["output"], report["exactness"]) == ("exact.pt2", "algebraic")
    assert ok("verify", TINY, "exact.pt2", "-q").stdout == "within\n"
    before = os.listdir()
    report = json.loads(ok("opt", TINY, "--passes", "canonicalize,fold-affine", "--dry-run", "--json").stdout)
    assert report["output"] is None and report["steps"][1]["edits"] == 12
    assert "dry run" in ok("opt", TINY, "--passes", "canonicalize", "--dry-run").stdout
    assert os.listdir() == before


def test_partial_writes_what_could_be_done_and_says_so() -> None:
    arguments = ("opt", TINY, "--passes", "fold-affine{final}", "-o", "some.pt2")
    error = fails("LN102", 1, *arguments)
    assert error["refusals"][0]["code"] == "LN102"  # type: ignore[index]
    report = json.loads(ok(*arguments, "--partial", "--json", code=3).stdout)
    assert report["refusals"] and Path("some.pt2").exists()


def test_text_calibrates_a_model_that_reads_bytes() -> None:
    Path("some.txt").write_bytes(demo.training_text(4096))
    data = ("--calibrate", "some.txt", "--blocks", "0-1")
    report = json.loads(ok("convert", TINY, "--to", "output", "-o", "a", *data, "--json").stdout)
    assert [row["blocks"] for row in report["fitted"]] == [["blocks.0.attn"], ["blocks.0.mlp"], []]
    assert report["drift"]["data"] == "some.txt"
    assert Path("a.pt2").exists()


def test_weights_inputs_and_blocks() -> None:
    torch.save(shallow().state_dict(), "weights.pt")
    how = ("--factory", "test_cli:shallow", "--input", "x=float32[batch,length,4]")
    ok("convert", "weights.pt", *how, "--to", "peri", "--blocks", " 1 ; 1-1", "-o", "half.pt2", "-q")
    found = json.loads(ok("inspect", "half.pt2", "--json").stdout)
    assert [b["placement"] for b in found["streams"][0]["blocks"]] == ["pre", "peri"]


def test_passes_and_explain() -> None:
    assert re.search(r"^place +depends +yes +Convert blocks", ok("passes").stdout, re.M)
    assert "to: pre|post|peri|output|none" in ok("passes", "place").stdout
    rows = json.loads(ok("passes", "--json").stdout)["passes"]
    assert {"canonicalize", "fold-affine", "place"} <= {row["name"] for row in rows}
    assert max(map(len, ok("passes").stdout.splitlines())) <= WIDTH
    for code in Code:
        assert max(map(len, ok("explain", code).stdout.splitlines())) <= WIDTH
    assert json.loads(ok("explain", "ln012", "--json").stdout)["code"] == "LN012"
    assert json.loads(ok("explain", "12", "--json").stdout)["code"] == "LN012"
    assert "..." not in ok("--help").stdout.partition("Commands:")[2]
    listed = json.loads(ok("explain", "--json").stdout)["codes"]
    assert [row["code"] for row in listed] == list(Code) and all(row["title"] for row in listed)
    assert ok("explain").stdout.count("  LN") == len([code for code in Code if code.startswith("LN")])


def test_doctor_and_version() -> None:
    """What is installed is told, and of the target of this machine that it can be proved here."""
    assert ok("--version").stdout == f"lnrewrite, version {lnrewrite.__version__}\n"
    told = json.loads(ok("doctor", "--json").stdout)
    assert told["versions"]["torch"] == version("torch") and told["targets"]["cpu"] == "export, prove, bench"
    for text in (ok("--version", "-v").stdout, ok("doctor").stdout):
        assert re.search(rf"^torch +{re.escape(version('torch'))}$", text, re.M)
    fails("LN003", 2, "-v", "inspect", "model.pt2")


def test_values_are_completed() -> None:
    """What a shell asks for is answered: placements, presets, targets."""
    for words, wanted in (
        (["convert", "--to", "p"], {"pre", "post", "peri"}),
        (["opt", "--preset", "in"], {"inference"}),
        (["export", "--target", ""], {"cpu", "cuda", "tensorrt", "generic"}),
        (["explain", "LN01"], {c for c in Code if c.startswith("LN01")}),
    ):
        found = ShellComplete(main, {}, "lnrewrite", "_X").get_completions(words[:-1], words[-1])
        assert {item.value for item in found} == wanted


def test_progress_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long work says now and then what it is at, one line each; not with -q, nor beside a JSON object."""
    monkeypatch.setattr(console, "EVERY", 0.0)
    told = ok("inspect", "test_cli:shallow", "--input", "x=float32[2,3,4]")
    assert "looking for residual streams\n" in told.stderr
    for option in ("-q", "--json"):
        assert ok("inspect", "test_cli:shallow", "--input", "x=float32[2,3,4]", option).stderr == ""


def test_what_a_model_prints_stays_out_of_the_json() -> None:
    result = ok("inspect", "test_cli:talkative", "--json")
    assert json.loads(result.stdout)["placement"] == "pre"
    assert "spoil" in result.stderr


# ---- what goes wrong ----


class Own(nn.Linear):
    """A layer that torch does not have."""


def test_models_that_are_none() -> None:
    Path("empty").mkdir()
    torch.save(Own(2, 2), "module.pt")
    torch.save(nn.Linear(2, 2).state_dict(), "weights.pt")
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), "script.pt")
    Path("cut.pt").write_bytes(Path("weights.pt").read_bytes()[:-200])
    Path("near.pt2").write_bytes(b"")
    assert "did you mean near.pt2?" in fails("LN010", 1, "inspect", "neat.pt2")["remedy"]
    fails("LN011", 1, "inspect", "empty")
    fails("LN015", 1, "inspect", "cut.pt")
    assert f"would run {__name__}.Own" in fails("LN012", 1, "inspect", "module.pt")["why"]
    fails("LN013", 1, "convert", "weights.pt", "--to", "peri", "-o", "out.pt2")
    fails("LN014", 1, "inspect", "script.pt")
    fails("LN010", 1, "verify", TINY, "missing.pt2")


@pytest.mark.parametrize(
    ("model", "code"),
    [("test_cli:not_finite", "LN024"), ("test_cli:plain", "LN201"), ("test_cli:Unexportable", "LN023")],
)
def test_models_that_cannot_be_converted(model: str, code: str) -> None:
    fails(code, 1, "inspect", model)
    fails(code, 1, "convert", model, "--to", "peri", "-o", "out.pt2")


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        (["inspekt", "x"], "LN001", "did you mean inspect?"),
        (["passes", "plaice"], "LN001", "did you mean place?"),
        (["explain", "LN1O1"], "LN001", "did you mean LN1"),
        (["opt", TINY, "--passes", "fold-afine", "--dry-run"], "LN001", "did you mean fold-affine?"),
        (["opt", TINY, "--preset", "exacts", "--dry-run"], "LN001", "did you mean exact?"),
        (["opt", TINY, "--passes", "inference", "--dry-run"], "LN001", "--preset inference"),
        (["opt", TINY, "--passes", "place{too=pre}", "--dry-run"], "LN003", "did you mean to?"),
        (["opt", TINY, "--passes", "place{to=pre", "--dry-run"], "LN002", "pass{option=value}"),
        (["convert", TINY, "--to", "pery", "-o", "x"], "LN003", "did you mean peri?"),
        (["convert", TINY, "--to", "peri", "--norm", "lyer", "-o", "x"], "LN003", "did you mean layer?"),
        (["convert", TINY, "--to", "peri", "--blocks", "a b", "-o", "x"], "LN004", "joined by ';'"),
        (["convert", TINY, "--to", "peri", "-o", "x.bin"], "LN025", ".pt2"),
        (["convert", TINY, "--to", "peri", "-o", "x.gguf"], "LN025", ".onnx"),
        (["convert", TINY, "--to", "peri", "--outputt", "x"], "LN003", "did you mean --output?"),
        (["convert", TINY], "LN003", "lnrewrite convert --help"),
        (["inspect"], "LN003", "lnrewrite inspect --help"),
        (["inspect", TINY, "--device", "nowhere"], "LN003", "give cpu"),
        (["inspect", TINY, "--seed", "-1"], "LN003", "--help"),
        (["opt", TINY, "--dry-run"], "LN003", "--help"),
        (["opt", TINY, "--passes", "canonicalize"], "LN003", "--help"),
        (["verify", TINY, TINY, "--tolerance", "algebraik"], "LN003", "did you mean algebraic?"),
        (["--jsn"], "LN003", "lnrewrite --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_wrong_command_lines(arguments: list[str], code: str, hint: str) -> None:
    seen = run(*arguments)
    assert seen.exit_code == 2 and seen.stdout == ""
    assert re.fullmatch(rf"error: {code} [^\n]+\n", seen.stderr) and hint in seen.stderr, seen.stderr
    error = json.loads(run(*arguments, "--json").stdout)["error"]
    assert error["code"] == code and hint in error["remedy"]
    assert not os.listdir()


def test_selections_that_name_nothing() -> None:
    fails("LN004", 2, "convert", "test_cli:shallow", "--to", "peri", "--blocks", "7", "-o", "x")


def test_outputs_that_cannot_be_written() -> None:
    Path("there.pt2").write_text("mine")
    Path("folder.pt2").mkdir()
    assert "--force" in fails("LN025", 1, "convert", TINY, "--to", "peri", "-o", "there")["remedy"]
    fails("LN025", 1, "convert", TINY, "--to", "peri", "-o", "folder.pt2", "--force")
    fails("LN025", 1, "convert", TINY, "--to", "peri", "-o", "missing/x.pt2")
    fails("LN025", 1, "opt", TINY, "--preset", "exact", "-o", "/proc/x.pt2")
    assert Path("there.pt2").read_text() == "mine"
    ok("opt", "test_cli:shallow", "--passes", "canonicalize", "-o", "there", "--force", "-q")
    assert json.loads(ok("inspect", "there.pt2", "--json").stdout)["placement"] == "pre"


def test_outputs_in_folders_without_permission() -> None:
    Path("locked").mkdir()
    Path("locked").chmod(0o500)
    if os.access("locked", os.W_OK):
        pytest.skip("this user may write anywhere")
    fails("LN025", 1, "convert", TINY, "--to", "peri", "-o", "locked/x.pt2")


IDS = np.zeros((8, 16), dtype=np.int64)


@pytest.mark.parametrize(
    ("arrays", "word"),
    [
        ({"input_idz": IDS}, "did you mean input_ids?"),
        ({"input_ids": IDS[..., None]}, "the first counts samples"),
        ({"input_ids": IDS.astype(np.float32)}, "float32"),
        ({"input_ids": IDS + 300}, "256 rows"),
        ({"input_ids": np.zeros((8, 300), dtype=np.int64)}, "the model fails on input_ids [1, 300]"),
    ],
    ids=["names", "shapes", "dtype", "range", "length"],
)
def test_calibration_data_that_does_not_fit(arrays: dict[str, Any], word: str) -> None:
    np.savez("data.npz", **arrays)
    assert word in fails("LN022", 1, "convert", TINY, "--to", "peri", "-o", "x", "--calibrate", "data.npz")["why"]


def test_calibration_data_that_is_not_there() -> None:
    for data in ("gone.npz", "test_cli:gone", "no_such_module:gone"):
        fails("LN022", 1, "convert", "test_cli:shallow", "--to", "peri", "-o", "x", "--calibrate", data)


def test_a_fault_of_ours_is_one_line_and_a_traceback_only_with_v(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr(Pipeline, "run", broken)
    arguments = ("opt", "test_cli:shallow", "--passes", "canonicalize", "--dry-run")
    assert "fault of lnrewrite" in fails("LN301", 1, *arguments)["remedy"]
    assert "Traceback" in run(*arguments, "-v").stderr


@pytest.mark.parametrize("moment", ["run", "save"])
def test_ctrl_c_leaves_nothing_behind(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*args: Any, **_: Any) -> None:
        if moment == "save":
            args[1].write(b"half")
        raise KeyboardInterrupt

    owner, name = (Pipeline, "run") if moment == "run" else (torch.export, "save")
    monkeypatch.setattr(owner, name, pressed)
    error = fails("interrupted", 130, "opt", "test_cli:shallow", "--passes", "canonicalize", "-o", "x.pt2")
    assert "nothing was written" in error["why"]


# ---- the installed command ----


def shell(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(HERE.parent), str(HERE)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "2"} | env
    command = [sys.executable, "-m", "lnrewrite.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_real_processes() -> None:
    helped = shell()
    assert helped.returncode == 0 and helped.stdout.startswith("Usage: lnrewrite ")
    done = shell("convert", "test_cli:talkative", "--to", "peri", "-o", "x.pt2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output"] == "x.pt2" and os.listdir() == ["x.pt2"]
    failed = shell("inspect", "gone.pt2")
    assert (failed.returncode, failed.stdout, failed.stderr.count("\n")) == (1, "", 1)


@pytest.mark.exhaustive
def test_a_real_ctrl_c() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        done = shell("convert", "test_cli:shallow", "--to", "peri", "-o", "x.pt2", "--calibrate", "test_cli:ctrl_c")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stdout, os.listdir()) == (130, "", [])
    assert done.stderr.startswith("error: interrupted") and done.stderr.count("\n") == 1


@pytest.mark.exhaustive
def test_a_terminal_without_unicode() -> None:
    done = shell("inspect", "test_cli:shallow", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "x -o- f     --- + ---" in done.stdout or "x -o- mlp   --- + ---" in done.stdout


def test_nobody_reads_on() -> None:
    command = f"{sys.executable} -m lnrewrite.cli passes | true"
    environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment)
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is full")
@pytest.mark.parametrize("option", ["", "--json"])
def test_a_full_disk_behind_stdout(option: str) -> None:
    command = f"{sys.executable} -m lnrewrite.cli passes {option} > /dev/full"
    environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and re.fullmatch(r"error: LN025 [^\n]+\n", done.stderr), done.stderr
