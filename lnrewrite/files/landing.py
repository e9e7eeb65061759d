"""Make files and folders beside their place and land them in one step: old or new, whole, whatever interrupts.

A process that is killed leaves a hidden folder behind; the next that writes to the same place removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ..errors import Code, LnrewriteError

PREFIX = ".lnrewrite-"
ROOM = re.compile(rf"{re.escape(PREFIX)}[a-z0-9_]+")
"""The names of the hidden folders in which files are made; a process locks its own for as long as it lives."""

OLD = "old"
NOREPLACE, EXCHANGE = 1, 2  # of Linux's renameat2
CANNOT = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
TAKEN = "choose another name or use --force"


def write_text_whole(target: Path, text: str, *, force: bool = True) -> None:
    """Write a text file whole or not at all. Raises LnrewriteError LN025."""

    def write(temporary: str) -> None:
        Path(temporary).write_text(text, encoding="utf-8")

    write_whole(target, write, force=force)


def write_whole(target: Path, write: Callable[[str], None], *, force: bool = True) -> None:
    """Write a file beside its place and land it there. Raises LnrewriteError LN025.

    The file is written under one name always, since archives keep the name that they were written under.
    """
    with failing(target), room(target.absolute().parent) as folder:
        made = folder / f"model{target.suffix}"
        write(str(made))
        land(made, target, force=force)


@contextmanager
def failing(target: Path) -> Iterator[None]:
    """Turn what the file system says into LnrewriteError LN025 for a target."""
    try:
        yield
    except FileExistsError as why:
        raise LnrewriteError(Code.LN025, str(target), "it exists", TAKEN) from why
    except OSError as why:
        said = why.strerror or str(why)
        raise LnrewriteError(Code.LN025, str(target), said, "free some room or choose another folder") from why


@contextmanager
def room(parent: Path) -> Iterator[Path]:
    """Give a new hidden folder in `parent` that is gone afterwards; those of processes that were killed go first."""
    _sweep(parent)
    path, lock = _locked(parent)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def land(made: Path, target: Path, *, force: bool) -> None:
    """Move a file or folder to its place in one step. Raises OSError.

    A link that stands there is replaced, never what it leads to. Without `force` nothing is replaced: FileExistsError.
    Where the system cannot swap two folders in one step there is a moment between two, and the old one is put back
    where the second fails.
    """
    if not force:
        if not _renamed(made, target, NOREPLACE):
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
            os.rename(made, target)
    elif not made.is_dir():
        os.replace(made, target)
    elif not os.path.lexists(target):
        os.rename(made, target)
    elif not _renamed(made, target, EXCHANGE):
        old = made.with_name(OLD)
        os.rename(target, old)
        try:
            os.rename(made, target)
        except BaseException:
            os.rename(old, target)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _renamed(made: Path, target: Path, flag: int) -> bool:
    """Rename as Linux can: replace nothing, or swap the two. False where this system cannot; raises OSError."""
    if not sys.platform.startswith("linux"):
        return False
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    here = -100  # AT_FDCWD: paths are taken as they stand
    if call(here, os.fsencode(made), here, os.fsencode(target), flag) == 0:
        return True
    number = ctypes.get_errno()
    if number in CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(target))


def _locked(parent: Path) -> tuple[Path, int]:
    """Make a folder and lock it; another process may have swept it away in between."""
    while True:
        path = Path(tempfile.mkdtemp(dir=parent, prefix=PREFIX))
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)


def _sweep(parent: Path) -> None:
    """Remove the folders that nobody locks any more, but for one that still holds what stood at a target."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(parent)):
            if ROOM.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                _remove_abandoned(Path(entry.path))


def _remove_abandoned(path: Path) -> None:
    with contextlib.suppress(OSError):
        lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.lexists(path / OLD):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


# ---- torch's writer ----


def poured(write: Callable[[IO[bytes]], None]) -> Callable[[str], None]:
    """Return what writes a file through a stream that never fails: torch ends the process where one does.

    What went wrong is raised when the writer is done.
    """

    def into(path: str) -> None:
        sink = Sink(path)
        try:
            write(sink)  # type: ignore[arg-type]
        finally:
            sink.settle()

    return into


class Sink(io.RawIOBase):
    """Take bytes to a file, and after the first failure take them to nowhere; `settle` raises it."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "wb", buffering=0)  # noqa: SIM115
        self.error: BaseException | None = None

    def writable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True: the writer goes back to the start at its end."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to no other place: what is written follows what was written."""
        return offset

    def write(self, data: Any, /) -> int:
        """Write bytes, all of them; Ctrl-C waits for `settle` too."""
        view = memoryview(data).cast("B")
        size = len(view)
        try:
            while self.error is None and len(view):
                view = view[self.file.write(view) :]
        except BaseException as error:  # any: above this there is C++, which must not see it
            self.error = error
        return size

    def settle(self) -> None:
        """Close the file and raise what went wrong."""
        self.file.close()
        if self.error is not None:
            raise self.error
