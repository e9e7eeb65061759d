"""Look at OUT before anything runs: what it names, what stands there, and whether that may be replaced."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

from ..errors import Code, LnrewriteError, UsageError
from .landing import TAKEN, failing

SUFFIXES = (".pt2", ".onnx")
PAGES, PICTURES = (".html",), (".html", ".svg")
"""What a report is written as, and a drawing."""

CONFIG = "config.json"
MARKS = (CONFIG, "genai_config.json")
"""A folder that holds one of these is a model's."""
CHECKPOINT = (
    CONFIG, "generation_config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin",
    "pytorch_model.bin.index.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json", "processor_config.json", "modeling_lnrewrite.py",
)  # fmt: skip
"""The names of the files of a checkpoint folder that --force may replace, whatever they were written by."""


def named_path(name: str) -> Path:
    """Return the path that stands on a command line; a `~` of nobody stays one."""
    return Path(os.path.expanduser(name))


def output_named(output: str, default: str, suffixes: Sequence[str] = SUFFIXES) -> Path:
    """Return the file that OUT names: with `default` behind a name without suffix.

    suffixes: of what may be written. Raises UsageError LN025 for an empty name, for one that only a folder can have,
    and for any other suffix.
    """
    name = os.path.basename(output)
    if not output.strip():
        raise UsageError(Code.LN025, repr(output), "it names nothing (an unset variable?)", f"name a {default} file")
    if name.strip() in ("", ".", "..", "-") or name in suffixes:
        raise UsageError(Code.LN025, repr(output), "it names no file", f"name a {default} file")
    suffix, known = Path(name).suffix, " or ".join(suffixes)
    if suffix not in ("", *suffixes):
        what = "a format that lnrewrite writes" if suffixes == SUFFIXES else f"{known}, which is written here"
        raise UsageError(Code.LN025, output, f"{suffix} is not {what}", f"name a {known} file")
    if not suffix and (there := standing(Path(output))):
        what = "models are" if suffixes == SUFFIXES else "this is"
        why = f"it is {there}, and {what} written to {known} files"
        raise UsageError(Code.LN025, output, why, f"name a file, such as {name}{default}")
    return Path(output if suffix else output + default)


def check_output(path: str | os.PathLike[str], force: bool) -> Path:
    """Return the file to write. Raises LnrewriteError LN025 where it cannot be, or where something stands there.

    With `force` a file may stand there, or a link to a file or to nothing: the link is replaced, not what it leads to.
    """
    target = Path(path)
    if not os.fspath(path):
        raise LnrewriteError(Code.LN025, repr(path), "it names nothing", "name a file")
    there = standing(target)
    if there not in ("", "a file", f"{LINK}a file", f"{LINK}nothing"):
        raise LnrewriteError(Code.LN025, str(path), f"it is {there}", "name a file")
    if there and not force:
        raise LnrewriteError(Code.LN025, str(path), "it exists", TAKEN)
    check_parent(target)
    return target


def check_folder(
    output: str | os.PathLike[str],
    source: Path,
    force: bool,
    known: Sequence[str] = CHECKPOINT,
    read: Sequence[Path] = (),
) -> Path:
    """Return the folder to write. Raises LnrewriteError LN025 where it cannot be, or where something stands there.

    With `force` a checkpoint may stand there and nothing else, or a link to a folder or to nothing: the link is
    replaced, not what it leads to. `read`: what else is read, and stays.
    """
    target = Path(output)
    if not os.fspath(output).strip():
        raise LnrewriteError(Code.LN025, repr(output), "it names nothing (an unset variable?)", "name a folder")
    if target.name in ("", ".."):
        raise LnrewriteError(
            Code.LN025, str(output), "it does not name a folder that could be made", "name a new folder"
        )
    check_apart(target, source)
    for path in read:
        check_apart(target, path, str(path))
    there = standing(target)
    if there not in ("", "a folder", f"{LINK}a folder", f"{LINK}nothing"):
        raise LnrewriteError(Code.LN025, str(output), f"it is {there}", "name a folder, or a .pt2 or .onnx file")
    if there and not force:
        raise LnrewriteError(Code.LN025, str(output), "it exists", TAKEN)
    check_replaceable(target, source, known)
    check_parent(target)
    return target


def check_apart(target: Path, source: Path, what: str = "the source") -> None:
    """Raise LnrewriteError LN025 where what is to be written holds what is read, is it, or would lie in it."""
    there, real, home = standing(target), *(Path(os.path.realpath(path)) for path in (target, source))
    if there and home.is_relative_to(real):
        verb = "is" if home == real and what != "the source" else "holds"
        raise LnrewriteError(Code.LN025, str(target), f"it {verb} {what}", "choose another name")
    check_outside(target, source, what)


def check_outside(target: Path, source: Path, what: str) -> None:
    """Raise LnrewriteError LN025 where what is to be written is another path, or would lie in it."""
    real, home = (Path(os.path.realpath(path)) for path in (target, source))
    if real.is_relative_to(home):
        place = "the source folder" if what == "the source" else what
        raise LnrewriteError(Code.LN025, str(target), f"it would lie in {place}", "choose another place")


def check_replaceable(target: Path, source: Path, known: Sequence[str] = CHECKPOINT) -> None:
    """Raise LnrewriteError LN025 where a folder stands at `target` that holds more than a checkpoint.

    known: the names, as patterns, of what may stand there. What `source` holds under the same name is written anew, so
    that may be replaced.
    """
    if standing(target) != "a folder":
        return
    with failing(target):
        foreign = list(islice(_foreign(target, source, known), 4))
        if not foreign and any(target.iterdir()) and not any((target / name).is_file() for name in MARKS):
            foreign = sorted(os.listdir(target))[:4]
    if foreign:
        named = ", ".join(foreign[:3]) + (" and more" if len(foreign) > 3 else "")
        why = f"it holds {named}, no part of a checkpoint, and replacing it would delete that"
        raise LnrewriteError(Code.LN025, str(target), why, "move away what you need, or choose another name")


def _foreign(target: Path, source: Path, patterns: Sequence[str]) -> Iterator[str]:
    """Yield what a folder holds that is no file of a checkpoint, and that the source does not hold."""

    def stop(error: OSError) -> None:
        raise error

    for root, folders, files in os.walk(target, onerror=stop):
        for name in sorted(files + folders):
            path = Path(root, name).relative_to(target)
            known = len(path.parts) == 1 and any(fnmatchcase(name, pattern) for pattern in patterns)
            if not (known and name in files) and not (source / path).exists():
                yield str(path)


def check_parent(target: Path) -> None:
    """Raise LnrewriteError LN025 where the folder that is to hold the output is missing or not writable."""
    parent = target.absolute().parent
    if (there := standing(parent, follow=True)) != "a folder":
        why = f"its folder is {there}" if there else "its folder does not exist"
        raise LnrewriteError(Code.LN025, str(target), why, "make the folder first")
    try:
        tempfile.TemporaryFile(dir=parent).close()  # permissions alone do not tell: a full disk, /proc
    except OSError as why:
        said = f"its folder is not writable: {why.strerror}"
        raise LnrewriteError(Code.LN025, str(target), said, "choose another folder") from why


LINK = "a link to "
KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISREG, "a file"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"),
    (stat.S_ISBLK, "a device"), (stat.S_ISCHR, "a device"),
)  # fmt: skip


def standing(path: Path, follow: bool = False) -> str:
    """Return what stands at a path, in words; empty where nothing does. Raises LnrewriteError LN025."""
    try:
        mode = os.stat(path).st_mode if follow else os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError) as why:  # a name that is too long, a loop of links, a NUL
        said = getattr(why, "strerror", None) or str(why)
        raise LnrewriteError(Code.LN025, str(path), said, "choose another name") from why
    if stat.S_ISLNK(mode):
        try:
            return LINK + (standing(path, follow=True) or "nothing")
        except LnrewriteError:  # a loop of links
            return f"{LINK}nothing"
    return next((word for kind, word in KINDS if kind(mode)), "no file")
