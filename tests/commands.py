"""How tests run the command line: in this process, or as a process of its own where that is the subject."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from lnrewrite.cli import main


def run(*args: Any) -> Result:
    """Run a command here."""
    return CliRunner().invoke(main, [str(a) for a in args])


def ok(*args: Any, code: int = 0) -> Result:
    """Run a command that is to exit with `code`."""
    result = run(*args)
    assert result.exit_code == code, result.output
    return result


def fails(code: str, exit_code: int, *args: Any) -> dict[str, str]:
    """Check that a command fails as a person sees it and as a script does, and writes nothing; return the error."""
    before = sorted(os.listdir())
    seen = run(*args)
    assert seen.exit_code == exit_code, seen.output
    assert seen.stdout == ""
    assert re.fullmatch(rf"error: {code} [^\n]+; [^\n]+\n", seen.stderr), seen.stderr
    scripted = run(*args, "--json")
    assert scripted.exit_code == exit_code
    assert scripted.stderr == ""
    error: dict[str, str] = json.loads(scripted.stdout)["error"]
    assert {"code", "what", "why", "remedy"} <= set(error)
    assert error["code"] == code
    assert sorted(os.listdir()) == before
    return error


def started(function: Callable[..., Any], *args: Any) -> Any:
    """Start a function of a test module in a process of its own, which has imported what is slow; return the process.

    It comes from a server that has run nothing: a copy of this process would wait for threads that it does not have.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "lnrewrite.cli", "lnrewrite.healing.session", "torch.export"])
    process = context.Process(target=function, args=args)
    process.start()
    return process


def as_process(arguments: list[str], said: Path) -> None:
    """Run a command as a process does, what it says on stderr into a file; raise SystemExit where it fails."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with said.open("w") as file, contextlib.redirect_stderr(file):
        try:
            main(arguments)
        except SystemExit as end:
            if end.code:
                raise
