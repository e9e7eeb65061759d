"""Write files whole or not at all, where they may be written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from .diagnostics import LnrewriteError


def check_output(path: str | os.PathLike[str], force: bool) -> Path:
    """Return the output's path. Raises LnrewriteError LN025 where nothing could be written there."""
    target = Path(path)
    if target.is_dir():
        raise LnrewriteError("LN025", str(path), "it is a folder", "name a file")
    if target.exists() and not force:
        raise LnrewriteError("LN025", str(path), "it exists", "choose another name or use --force")
    check_parent(target)
    return target


def check_parent(target: Path) -> None:
    """Raise LnrewriteError LN025 where the folder that is to hold the output is missing or not writable."""
    if not target.absolute().parent.is_dir():
        raise LnrewriteError("LN025", str(target), "its folder does not exist", "make the folder first")
    if not os.access(target.absolute().parent, os.W_OK):
        raise LnrewriteError("LN025", str(target), "its folder is not writable", "choose another folder")


def write_text_whole(target: Path, text: str) -> None:
    """Write a text file whole or not at all."""

    def write(temporary: str) -> None:
        Path(temporary).write_text(text)

    write_whole(target, write)


def write_whole(target: Path, write: Callable[[str], None]) -> None:
    """Write a file beside its place and move it there: whole or not at all, whatever interrupts.

    The file is written under one name always, since archives keep the name that they were written under.
    """
    try:
        with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=".lnrewrite-") as folder:
            whole = os.path.join(folder, f"model{target.suffix}")
            write(whole)
            os.replace(whole, target)
    except OSError as why:
        raise LnrewriteError("LN025", str(target), str(why), "free some room or choose another folder") from why
