"""A process that has imported what is slow, and runs each command in a copy of itself. One JSON line in, one out."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

WALL = 150  # seconds: a machine may be busy
MEMORY = 3 << 30  # bytes above the baseline: ends a command that would take the machine down
MODULES = (
    "torch", "torch.export", "torch._export.serde.serialize", "torch.export.pt2_archive", "transformers", "onnx",
    "onnxruntime", "safetensors.torch", "numpy", "transformers.models.llama.modeling_llama",
    "lnrewrite.cli", "lnrewrite.api", "lnrewrite.models.onnx_program", "lnrewrite.checkpoints.folders",
    "lnrewrite.pipeline", "lnrewrite.comparison.verifying", "lnrewrite.cli.tables", "lnrewrite.backends.onnx.session",
    "lnrewrite.data.batches", "lnrewrite.export.writer",
)  # fmt: skip


HOOK = runpy.run_path(str(Path(__file__).with_name("hook.py")))  # no folder of tests is importable in a command


def serve() -> None:
    """Answer requests until there are none."""
    sys.dont_write_bytecode = True
    for name in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        answer = run(json.loads(line))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Run one command in a child and measure it."""
    base, start = _resident(os.getpid()), time.monotonic()
    child = os.fork()
    if not child:
        try:
            _command(asked)
        finally:
            os._exit(70)  # whatever happened, there are no two that answer
    killed = ""
    while True:
        pid, status, used = os.wait4(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() - start > WALL:
            killed = killed or "time"
        elif _resident(child) > base + MEMORY:
            killed = killed or "memory"
        if killed:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        time.sleep(0.02)
    code = os.waitstatus_to_exitcode(status)
    killed = killed or ("time" if code in (-signal.SIGXCPU, -signal.SIGKILL) else "")
    cpu = used.ru_utime + used.ru_stime
    peak = max(0, used.ru_maxrss * 1024 - base)
    return {"exit": code, "killed": killed, "cpu": round(cpu, 2), "peak_mb": peak >> 20}


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def _command(asked: dict[str, Any]) -> None:
    """Be the command: its streams, its folder, its environment, the audit hook, then the real `main`."""
    root = asked["root"]
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (asked["limit"], asked["limit"] + 5))
    log = os.open(f"{root}/events", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for fd, name, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY)):
        os.dup2(os.open(f"{root}/{name}", flags | os.O_CREAT), fd)
    sys.stdin = open(0)  # noqa: SIM115
    os.chdir(f"{root}/here")
    os.environ |= {"HOME": f"{root}/home", "TMPDIR": f"{root}/tmp", **asked["environment"]}
    if asked["room"] is not None:  # the signal is ignored in Python, so that writing fails
        resource.setrlimit(resource.RLIMIT_FSIZE, (asked["room"], asked["room"]))
    tempfile.tempdir = None
    if asked["library"]:
        sys.path.insert(0, f"{root}/here/{asked['library']}")
    HOOK["install"](root, asked["repository"], log)
    code: Any = 1
    try:
        import click.utils

        from lnrewrite.cli import main

        vars(click.utils)["should_strip_ansi"] = lambda *how: False  # a terminal would get them too

        sys.argv = ["lnrewrite", *asked["args"]]
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    serve()
