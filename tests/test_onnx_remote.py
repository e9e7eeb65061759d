"""ONNX Runtime runs in a process that may die: what is told then, and that the next model runs."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

import lnrewrite as lnr
from lnrewrite.backends.onnx import remote as onnx_remote
from lnrewrite.backends.onnx import server as onnx_server
from lnrewrite.backends.onnx.session import OnnxModule
from tiers import rows

TEXT = """<ir_version: 9, opset_import: ["" : 18]> g (float[n,4] x) => (float[n,4] y, bool[n,4] z, int64[2] s, float e)
<float[4] w = {1, 2, 3, 4}> { y = Mul (x, w) z = Greater (x, w) s = Shape (x) e = ReduceSum <keepdims = 0> (x) }"""
DYING = f"""
import os, signal, sys
sys.path.insert(0, {os.path.dirname(onnx_server.__file__)!r})
import server
opened = server.opened
def at_first(model, level, library):
    if level in {{levels}}:
        os.kill(os.getpid(), signal.SIGSEGV)
    return opened(model, level, library)
server.opened = at_first
server.main()
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> OnnxModule:
    monkeypatch.setattr(onnx_remote, "_running", {})
    return OnnxModule(ir.from_onnx_text(TEXT))


def server() -> Any:
    return onnx_remote._running[os.getpid()]


def right(module: OnnxModule, count: int = 3) -> None:
    x = torch.randn(count, 4)
    found = module(x=x)
    assert torch.equal(found["y"], x * torch.arange(1.0, 5)) and found["z"].dtype is torch.bool
    assert found["s"].tolist() == [count, 4] and found["e"].shape == ()


def test_sizes_and_types_come_through(module: OnnxModule) -> None:
    for count in (0, 1, 5000):
        right(module, count)


def test_memory_between_operators_is_there() -> None:
    """A model of few weights and inputs may need more than a gigabyte: chunked attention, or that of many tokens."""
    text = """<ir_version: 9, opset_import: ["" : 18]> g (float[n,1] x) => (float e)
    { t = Transpose <perm = [1, 0]> (x) p = Mul (x, t) e = ReduceMax <keepdims = 0> (p) }"""
    found = OnnxModule(ir.from_onnx_text(text))(x=torch.full((18_000, 1), 2.0))
    assert found["e"] == 4


def test_a_process_that_dies_is_told_and_the_next_call_starts_another(module: OnnxModule) -> None:
    right(module)
    other = OnnxModule(module.model)
    right(other)
    server()._process.kill()
    with pytest.raises(lnr.LnrewriteError, match="LN030 ONNX Runtime: its process died: Killed"):
        module(x=torch.randn(3, 4))
    right(module)
    right(other)


@pytest.mark.parametrize("levels", [onnx_server.LEVELS[:1], onnx_server.LEVELS], ids=["highest", "both"])
def test_a_model_that_kills_the_highest_level_runs_at_the_next(
    levels: tuple[str, ...], module: OnnxModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dying.py").write_text(DYING.format(levels=levels))
    monkeypatch.setattr(onnx_server, "__file__", str(tmp_path / "dying.py"))
    if len(levels) == 1:
        right(module)
        assert "ORT_ENABLE_EXTENDED" in module.notes[0]
        return
    with pytest.raises(lnr.LnrewriteError, match="LN030 ONNX Runtime: its process died: Segmentation fault"):
        module(x=torch.randn(3, 4))


def test_an_export_tells_it(module: OnnxModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dying.py").write_text(DYING.format(levels=onnx_server.LEVELS[:1]))
    monkeypatch.setattr(onnx_server, "__file__", str(tmp_path / "dying.py"))
    ir.save(ir.from_onnx_text(TEXT), tmp_path / "m.onnx")
    report = lnr.load(str(tmp_path / "m.onnx")).export(tmp_path / "out.onnx")
    assert any("ORT_ENABLE_EXTENDED" in note for note in report.notes) and "notes" not in (report.proof or {})


@pytest.mark.parametrize("interpreter", ["", "/none", sys.executable + "\0", "/bin/false"])
def test_where_no_process_can_be_started_it_runs_in_this_one(
    interpreter: str, module: OnnxModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", interpreter)
    right(module)
    assert server() is None
    with pytest.raises(lnr.LnrewriteError, match="LN022"):
        module(x=torch.randn(3, 5))


def test_what_is_unused_is_forgotten(module: OnnxModule) -> None:
    for _ in range(3):
        right(OnnxModule(module.model))
    gc.collect()
    assert len(server().unused) <= 3
    right(module)
    assert not server().unused


def forked(module: OnnxModule) -> None:
    right(module)
    assert set(onnx_remote._running) >= {os.getpid(), os.getppid()}


def test_a_fork_has_a_process_of_its_own(module: OnnxModule) -> None:
    right(module)
    child = multiprocessing.get_context("fork").Process(target=forked, args=(module,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    right(module)


def test_threads_take_turns(module: OnnxModule) -> None:
    failed: list[BaseException] = []

    def run(count: int) -> None:
        try:
            for _ in range(20):
                right(module, count)
        except BaseException as error:
            failed.append(error)

    right(module)
    threads = [threading.Thread(target=run, args=(count,)) for count in (1, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


CALL = """
import os, sys, time
import onnx_ir as ir, numpy as np
from lnrewrite.backends.onnx import remote as onnx_remote
from lnrewrite.backends.onnx.session import OnnxModule
module = OnnxModule(ir.from_onnx_text(sys.argv[1]))
module(x=np.zeros((2, 4), np.float32))
print(onnx_remote._running[os.getpid()]._process.pid, flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("how", rows(["ends", "killed"], sample=["killed"]))
def test_it_ends_with_its_user_and_does_not_call_home(how: str, tmp_path: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("XDG_CACHE_HOME", "ORT_DISABLE_TELEMETRY")}
    command = [sys.executable, "-c", CALL, TEXT, "0" if how == "ends" else "60"]
    user = subprocess.Popen(command, stdout=subprocess.PIPE, env=kept | {"HOME": str(tmp_path)})
    assert user.stdout
    pid = int(user.stdout.readline())
    if how == "killed":
        user.send_signal(signal.SIGKILL)
    user.wait(60)
    user.stdout.close()
    with pytest.raises(ProcessLookupError):
        for _ in range(200):
            os.kill(pid, 0)
            threading.Event().wait(0.05)
    assert not list(tmp_path.rglob("*onnxruntime*"))


def test_a_feed_of_any_layout_is_taken() -> None:
    session = onnx_remote.RemoteSession(
        ir.to_proto(ir.from_onnx_text(TEXT)).SerializeToString(), 16, onnx_server.LEVELS[0]
    )
    x = np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::-1].T[1:5]
    assert np.array_equal(session({"x": x})["y"], x * np.arange(1, 5, dtype=np.float32))
    with pytest.raises(onnx_remote.Failed, match="Unexpected input data type"):
        session({"x": x.astype(np.float64)})
